"""Cut a language model's vocabulary to the tokens of a corpus, before it is fitted.

Of the 262,144 tokens of a multilingual model a corpus has some ten thousand.

It keeps the tokens of the texts and those that they are merged from, special tokens, the tokens of
the prompts, and single bytes, or single characters where the tokenizer does not fall back to bytes.
Other texts are read in smaller pieces. Tokens keep their order and get new ids.

The texts are tokenized as before: BPE takes the first merge of its list that fits, and Unigram the
most likely pieces, and these are all kept.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import chain, islice
from typing import Any

from sentence_transformers import SentenceTransformer

from revela.encoders.prompts import Prompts
from revela.errors import RevelaError
from revela.training.retriever.fit import TEXTS, token_ids


def prune(model: SentenceTransformer, texts: Iterable[str]) -> None:
    """Drop a corpus's unused tokens from a model that is not fitted yet, in place."""
    from skeletoken import TokenizerModel
    from skeletoken.external.transformers import reshape_embeddings

    transformer, tokenizer = model[0].model, model.tokenizer
    prompt = Prompts.named(model.prompts).passage
    table = transformer.get_input_embeddings().weight
    if any(p.shape[:1] == table.shape[:1] and p is not table for p in transformer.parameters()):
        raise RevelaError("--prune cuts one table of tokens, and this model has more: leave it out")
    whole: Any = TokenizerModel.from_tokenizer(tokenizer.backend_tokenizer)
    kind, vocabulary = whole.model.type.value, tokenizer.get_vocab()
    if kind not in ("BPE", "Unigram") or whole.vocabulary != vocabulary:
        raise RevelaError(f"--prune cannot renumber this tokenizer, by {kind}: leave it out")
    # Special tokens, also those before, between and after texts.
    used = {*tokenizer.all_special_ids, *tokenizer("a").input_ids, *tokenizer("a", "a").input_ids}
    texts = chain(filter(None, model.prompts.values()), (prompt + text for text in texts))
    while batch := list(islice(texts, TEXTS)):
        used.update(chain.from_iterable(token_ids(tokenizer, batch)))
    kept = {*tokenizer.convert_ids_to_tokens(list(used)), *_smallest(whole)}
    merges = whole.model.merges.root if kind == "BPE" else []
    while parts := {part for pair in merges if "".join(pair) in kept for part in pair} - kept:
        kept |= parts
    pruned = whole.remove_tokens_from_vocabulary([t for t in vocabulary if t not in kept])
    pruned.unk_token = whole.unk_token  # skeletoken 0.6 leaves the number of Unigram's
    tokenizer._tokenizer = pruned.to_tokenizer()
    model[0].model = reshape_embeddings(transformer, pruned)
    logging.getLogger(__name__).info(f"kept {len(tokenizer):,} of {len(vocabulary):,} tokens")


def _smallest(whole: Any) -> set[str]:
    """Single bytes or characters, which let a tokenizer read any text, as far as it can."""
    smallest = {f"<0x{byte:02X}>" for byte in range(256)}
    if not whole.model.byte_fallback or not smallest <= whole.vocabulary.keys():
        smallest = {token for token in whole.vocabulary if len(token.removesuffix("</w>")) == 1}
    if whole.model.type == "Unigram":
        # Its penalty for an unknown character depends on the least likely token.
        smallest.add(min(whole.model.vocab.root, key=lambda pair: pair[1])[0])
    return smallest | {whole.unk_token or ""}
