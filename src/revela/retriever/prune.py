"""Cut a language model's vocabulary to the tokens of a corpus, before it is fitted.

Of the 262,144 tokens of a multilingual model a corpus has some ten thousand.

It keeps the tokens of the texts and those that they are merged from, special tokens, the tokens of
the prompts, and single bytes, or single characters where the tokenizer does not fall back to bytes.
Other texts are read in smaller pieces. Tokens keep their order and get new ids.

The texts are tokenized as before: BPE takes the first merge of its list that fits, and Unigram the
most likely pieces, and these are all kept.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import torch
from sentence_transformers import SentenceTransformer

from revela.encoder.torch_model import prompt_of
from revela.errors import RevelaError
from revela.retriever.lexical import TEXTS, token_ids
from revela.silence import progress_bar

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def prune(model: SentenceTransformer, texts: Iterable[str]) -> None:
    """Drop a corpus's unused tokens from a model that is not fitted yet, in place."""
    from tokenizers import Tokenizer

    transformer, tokenizer = model[0].model, model.tokenizer
    state = _state(transformer, tokenizer)
    ids = tokenizer.get_vocab()
    names = {i: token for token, i in ids.items()}
    kept = {names[i] for i in _used(model, texts)}
    kept |= set(_smallest(state["model"]))
    if state["model"]["type"] == "BPE":
        kept |= _merged_of(state["model"], kept)
    order = sorted(kept, key=ids.__getitem__)
    number = {token: i for i, token in enumerate(order)}
    pruned = Tokenizer.from_str(json.dumps(_renumbered(state, number)))
    if pruned.get_vocab(with_added_tokens=True) != number:
        raise RevelaError("--prune cannot renumber the tokens of this tokenizer: leave it out")
    tokenizer._tokenizer = pruned
    table = transformer.get_input_embeddings().weight
    table[: len(order)] = table[[ids[token] for token in order]]
    transformer.resize_token_embeddings(len(order), mean_resizing=False)
    _renumber_configuration(transformer, {ids[token]: i for token, i in number.items()})
    logging.getLogger(__name__).info(
        f"kept {len(order):,} of {len(ids):,} tokens: those of the corpus and their parts"
    )


def _state(transformer: PreTrainedModel, tokenizer: Any) -> dict[str, Any]:
    """The tokenizer as tokenizer.json has it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state: dict[str, Any] = json.loads(backend.to_str()) if backend else {}
    kind = state["model"]["type"] if state else type(tokenizer).__name__
    if kind not in ("BPE", "Unigram"):
        raise RevelaError(
            f"--prune cuts tokenizers by BPE or Unigram, and this is by {kind}: leave it out"
        )
    table = transformer.get_input_embeddings().weight
    if any(p.shape[:1] == table.shape[:1] and p is not table for p in transformer.parameters()):
        raise RevelaError("--prune cuts one table of tokens, and this model has more: leave it out")
    return {**state, "truncation": None, "padding": None}  # set again with each call


def _used(model: SentenceTransformer, texts: Iterable[str]) -> set[int]:
    """The ids of the tokens of texts and prompts, and special ones."""
    tokenizer, prompt = model.tokenizer, prompt_of(model, "document")
    used = {*tokenizer.all_special_ids, *tokenizer("a")["input_ids"]}
    used.update(tokenizer("a", "a")["input_ids"])  # special tokens before, between and after texts
    prompted = (prompt + text for text in progress_bar("counting tokens", "text", texts))
    all_texts = chain((each.rstrip() for each in model.prompts.values() if each), prompted)
    while batch := list(islice(all_texts, TEXTS)):
        used.update(chain.from_iterable(token_ids(tokenizer, batch)))
    return used


def _smallest(model: dict[str, Any]) -> Iterator[str]:
    """Single bytes or characters, which let a tokenizer read any text, as far as it can."""
    pieces = model["vocab"] if model["type"] == "BPE" else [piece for piece, _ in model["vocab"]]
    every_byte = {f"<0x{byte:02X}>" for byte in range(256)}
    if model.get("byte_fallback") and every_byte <= set(pieces):
        yield from every_byte
    else:
        before = model.get("continuing_subword_prefix") or ""
        after = model.get("end_of_word_suffix") or ""
        yield from (p for p in pieces if len(p.removeprefix(before).removesuffix(after)) == 1)
    if model["type"] == "Unigram":
        # Its penalty for an unknown character depends on the least likely token.
        yield min(model["vocab"], key=lambda pair: pair[1])[0]
        if model["unk_id"] is not None:
            yield pieces[model["unk_id"]]
    elif model.get("unk_token") in model["vocab"]:
        yield model["unk_token"]


def _merge(model: dict[str, Any], left: str, right: str) -> str:
    return left + right.removeprefix(model["continuing_subword_prefix"] or "")


def _merged_of(model: dict[str, Any], tokens: Iterable[str]) -> set[str]:
    """All tokens from which these may be merged, recursively."""
    parts = defaultdict[str, list[str]](list)
    for left, right in model["merges"]:
        parts[_merge(model, left, right)] += [left, right]
    merged, queue = set[str](), list(tokens)
    while queue:
        new = set(parts.get(queue.pop(), ())) - merged
        merged |= new
        queue += new
    return merged


def _renumbered(state: dict[str, Any], number: dict[str, int]) -> dict[str, Any]:
    """The tokenizer with these tokens only, and these ids."""
    model = dict(state["model"])
    if model["type"] == "BPE":
        model["vocab"] = {t: number[t] for t in model["vocab"] if t in number}
        model["merges"] = [
            pair for pair in model["merges"] if {*pair, _merge(model, *pair)} <= number.keys()
        ]
    else:
        if model["unk_id"] is not None:
            model["unk_id"] = number[model["vocab"][model["unk_id"]][0]]
        model["vocab"] = [pair for pair in model["vocab"] if pair[0] in number]
    added = [
        {**a, "id": number[a["content"]]} for a in state["added_tokens"] if a["content"] in number
    ]
    _renumber_template(state["post_processor"] or {}, number)
    return {**state, "model": model, "added_tokens": added}


def _renumber_template(processor: dict[str, Any], number: dict[str, int]) -> None:
    """Renumber what a post-processor puts around texts, in place."""
    for inner in processor.get("processors", ()):
        _renumber_template(inner, number)
    for role in {"cls", "sep"} & processor.keys():  # BERT's and RoBERTa's
        processor[role] = [processor[role][0], number[processor[role][0]]]
    special = processor.get("special_tokens", {})
    for name in list(special):
        if set(special[name]["tokens"]) <= number.keys():
            special[name]["ids"] = [number[token] for token in special[name]["tokens"]]
        else:
            del special[name]  # in no template


def _renumber_configuration(transformer: PreTrainedModel, new: dict[int, int]) -> None:
    """The ids of special tokens; None for one that is gone."""
    configs = [transformer.config, transformer.config.get_text_config()]
    for config in {id(config): config for config in configs}.values():
        for key, value in list(vars(config).items()):
            if key.endswith("_token_id") and isinstance(value, int):
                setattr(config, key, new.get(value))
            elif key.endswith("_token_id") and isinstance(value, list):
                setattr(config, key, [new[i] for i in value if i in new])
