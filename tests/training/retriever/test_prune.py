"""A vocabulary cut to a corpus: the same tokens and vectors there, smaller pieces elsewhere."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from small import build
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from conftest import make_rows, tiny_config
from revela.errors import RevelaError
from revela.training.retriever.fit import fit_to_corpus
from revela.training.retriever.module import RetrieverModule
from revela.training.retriever.prune import prune
from revela.training.retriever.save import save_retriever
from revela.training.settings import Fit

EVERYTHING = [f"{row['title']}\n\n{row['text']}" for row in make_rows(120)]
CORPUS = [text for text in EVERYTHING if "ocean" in text or "garden" in text]
OTHER = ["violin3 castle2 glacier5", "the engine", "中文 and 🙂", "\x01", "q"]


def of_characters(kind):
    """A tokenizer as SentencePiece makes them, by BPE or Unigram, with special and added tokens at
    both ends.
    """
    special = [*(f"<unused{i}>" for i in range(9)), "<pad>", "<unk>"]
    every_byte = [f"<0x{byte:02X}>" for byte in range(256)]
    shared = dict(special_tokens=special, show_progress=False)
    if kind == "bpe":
        model = models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        shared["special_tokens"] = [*special, *every_byte]
        trainer = trainers.BpeTrainer(vocab_size=700, **shared)
    else:
        model = models.Unigram()
        trainer = trainers.UnigramTrainer(vocab_size=300, unk_token="<unk>", **shared)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.train_from_iterator(EVERYTHING, trainer)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [a for a in state["added_tokens"] if a["content"] not in every_byte]
    if kind == "bpe":  # several ways lead to a token, as in merges that SentencePiece's are made of
        model = state["model"]
        pairs = {(t[:i], t[i:]) for t in model["vocab"] for i in range(1, len(t))}
        pairs = [pair for pair in pairs if set(pair) <= model["vocab"].keys()]
        pairs.sort(key=lambda pair: (model["vocab"]["".join(pair)], pair))
        model["merges"] = pairs
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_tokens([AddedToken("garden12", normalized=False), AddedToken("harbour3")])
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    begins = ("<bos>", tokenizer.token_to_id("<bos>"))
    tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[begins]
    )
    named = dict(pad_token="<pad>", unk_token="<unk>", bos_token="<bos>", eos_token="<eos>")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)


@pytest.fixture(scope="module", params=["bytes", "bpe", "unigram"])
def folder(request, tiny_tokenizer, tmp_path_factory):
    tokenizer = tiny_tokenizer if request.param == "bytes" else of_characters(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    config = tiny_config("llama", len(tokenizer) + 7)  # some rows more than tokens, as many have
    for name in ("pad", "bos", "eos"):
        setattr(config, f"{name}_token_id", getattr(tokenizer, f"{name}_token_id"))
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tokens_of(model, texts, prompt="passage: "):
    rows = model.tokenizer([prompt + text for text in texts])["input_ids"]
    return [model.tokenizer.convert_ids_to_tokens(row) for row in rows]


def test_a_corpus_has_the_same_tokens_and_vectors(folder, tmp_path):
    whole, pruned = (build(folder, max_tokens=200) for _ in range(2))
    prune(pruned, CORPUS)
    assert tokens_of(pruned, CORPUS) == tokens_of(whole, CORPUS)
    rows = len(pruned[0].model.get_input_embeddings().weight)
    assert rows == len(pruned.tokenizer) == pruned[0].model.config.vocab_size
    assert rows < len(whole.tokenizer)
    tokens = list(pruned.tokenizer.get_vocab())
    one, other = (
        m[0].model.get_input_embeddings().weight[m.tokenizer.convert_tokens_to_ids(tokens)]
        for m in (whole, pruned)
    )
    assert len(tokens) == rows and torch.equal(one, other)
    for model in (whole, pruned):
        fit_to_corpus(RetrieverModule(model), CORPUS, Fit())
    save_retriever(pruned, tmp_path / "saved", "")
    stock = SentenceTransformer(str(tmp_path / "saved"))
    assert tokens_of(stock, CORPUS) == tokens_of(whole, CORPUS)
    assert stock[1].emb_layer.num_embeddings == stock[3].emb_layer.num_embeddings == rows
    wanted = whole.encode_document(CORPUS)
    for model in (pruned, stock):
        found = model.encode_document(CORPUS)
        np.testing.assert_allclose(found @ found.T, wanted @ wanted.T, atol=1e-5)


def test_other_texts_are_read_in_smaller_pieces(folder):
    whole, pruned = build(folder), build(folder)
    prune(pruned, CORPUS)
    assert np.isfinite(pruned.encode_query(OTHER)).all()
    pairs = list(zip(tokens_of(whole, OTHER), tokens_of(pruned, OTHER), strict=True))
    assert all(len(after) >= len(before) for before, after in pairs)
    assert sum(len(after) - len(before) for before, after in pairs) > 0
    for text in OTHER[:2]:
        ids = pruned.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert pruned.tokenizer.unk_token_id not in ids
        assert max(ids) < len(pruned.tokenizer)


def test_special_tokens_have_the_ids_that_the_configuration_names(folder):
    model = build(folder, pooling="eos")
    prune(model, CORPUS)
    tokenizer, config = model.tokenizer, model[0].model.config
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        assert getattr(config, name) == getattr(tokenizer, name) < len(tokenizer)
    ids = tokenizer(CORPUS[0])["input_ids"]
    assert ids[-1] == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids(tokenizer.eos_token)
    assert not any("unused" in token for token in tokenizer.get_vocab())
    vocabulary = sorted(tokenizer.get_vocab().values())
    assert vocabulary[0] == 0 and all(b - a == 1 for a, b in pairwise(vocabulary))


def test_what_cannot_be_pruned_is_told_in_one_sentence(tiny_lm_folder, tiny_bert_folder):
    model = build(tiny_lm_folder)
    words = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
    model.tokenizer._tokenizer = words
    with pytest.raises(RevelaError, match="cannot renumber this tokenizer, by WordLevel: leave it"):
        prune(model, CORPUS)
    model = build(tiny_lm_folder)
    rows = len(model[0].model.get_input_embeddings().weight)
    model[0].model.another = torch.nn.Embedding(rows, 2)
    with pytest.raises(RevelaError, match="cuts one table of tokens, and this model has more"):
        prune(model, CORPUS)
