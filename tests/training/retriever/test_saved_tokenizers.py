"""A saved retriever reads texts as it did in memory, whatever class its tokenizer is of."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer
from small import build

from conftest import tiny_config
from revela.errors import RevelaError
from revela.training.retriever import save
from revela.training.retriever.context import SavedContext, add_context, load_context_encoder
from revela.training.retriever.save import save_retriever
from revela.training.settings import Context

# Classes that build themselves again when they are opened, and a kind of model that has them.
CLASSES = {
    "GPT2Tokenizer": "gpt2",
    "Qwen2Tokenizer": "qwen2",
    "GemmaTokenizer": "gemma3",
    "LlamaTokenizer": "llama",
    "GPTNeoXTokenizer": "gpt_neox",
}
TEXTS = ["ocean engine garden", "OCEAN ENGINE GARDEN", "Ocean Garden 7"]


@pytest.fixture(params=CLASSES)
def lm(request, tmp_path, tiny_tokenizer):
    """A language model whose tokenizer is of this class."""
    kind, model = CLASSES[request.param], json.loads(tiny_tokenizer.backend_tokenizer.to_str())
    made = getattr(transformers, request.param)(
        vocab=model["model"]["vocab"],
        merges=[tuple(pair) for pair in model["model"]["merges"]],
        **dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<pad>"),
    )
    size = len(made)
    if kind == "gpt2":
        width = dict(n_embd=32, n_layer=2, n_head=4)
        config = transformers.GPT2Config(vocab_size=size, bos_token_id=1, eos_token_id=2, **width)
    else:
        config = tiny_config(kind, size)
    torch.manual_seed(0)
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path / "lm")
    made.save_pretrained(tmp_path / "lm")
    opened = transformers.AutoTokenizer.from_pretrained(tmp_path / "lm")
    assert type(opened).__name__ == request.param
    return tmp_path / "lm"


def ids(model):
    return [model.tokenizer(text)["input_ids"] for text in TEXTS]


@pytest.mark.parametrize(("pooling", "lower_case"), [("mean", "yes"), ("eos", "no")])
def test_ids_and_vectors_are_kept(lm, tmp_path, pooling, lower_case):
    model = build(lm, pooling, lower_case=lower_case)
    before = ids(model)
    vectors = model.encode_query(TEXTS), model.encode_document(TEXTS)
    assert (before[0] == before[1]) == (lower_case == "yes")
    assert all(row[-1] == model.tokenizer.eos_token_id for row in before) == (pooling == "eos")
    save_retriever(model, tmp_path / "out", "card")
    stock = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert ids(stock) == before
    found = stock.encode_query(TEXTS), stock.encode_document(TEXTS)
    np.testing.assert_allclose(found, vectors, atol=1e-5)
    names = ("model_input_names", "padding_side", "truncation_side")
    assert [getattr(stock.tokenizer, n) for n in names] == [
        getattr(model.tokenizer, n) for n in names
    ]


@pytest.mark.parametrize("adds", [dict(add_eos_token=True), dict(add_bos_token=True), {}])
def test_what_the_class_adds_to_a_text_is_kept(lm, tmp_path, adds):
    """Some classes put EOS after a text if they are told to, and others BOS before it."""
    transformers.AutoTokenizer.from_pretrained(lm, **adds).save_pretrained(lm)
    model = build(lm, lower_case="yes")
    before, vectors = ids(model), model.encode_document(TEXTS)
    assert [model.tokenizer.decode(row) for row in before] == [
        transformers.AutoTokenizer.from_pretrained(lm).decode(row)
        for row in map(transformers.AutoTokenizer.from_pretrained(lm).encode, map(str.lower, TEXTS))
    ]
    save_retriever(model, tmp_path / "out", "card")
    stock = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert ids(stock) == before
    np.testing.assert_allclose(stock.encode_document(TEXTS), vectors, atol=1e-5)


def test_the_first_stage_of_a_context_reads_as_before(lm, tmp_path):
    model = build(lm, lower_case="yes")
    first = add_context(Context(2), model, TEXTS[0], 0)
    before = ids(first.model)
    assert before[0] == before[1]
    rows = first.of_texts(TEXTS)
    save_retriever(model, tmp_path / "out", "card", context=SavedContext(first, rows, {}))
    assert ids(load_context_encoder(tmp_path / "out").model) == before


def test_a_folder_that_would_read_otherwise_is_not_saved(tiny_lm_folder, tmp_path, monkeypatch):
    model = build(tiny_lm_folder, lower_case="yes")
    kept = save.keep_tokenizer

    def loses_case(folder, tokenizer):
        kept(folder, tokenizer)
        for name, key in (("tokenizer.json", "normalizer"), ("sentence_bert_config.json", "")):
            if (file := folder / name).is_file():
                known = json.loads(file.read_text())
                known.pop("do_lower_case", None)
                file.write_text(json.dumps({**known, key: None} if key else known))

    save_retriever(model, tmp_path / "good", "card")
    monkeypatch.setattr(save, "keep_tokenizer", loses_case)
    with pytest.raises(RevelaError, match="is not saved, as its files would give other vector"):
        save_retriever(model, tmp_path / "bad", "card")
    assert not [*(tmp_path / "bad").iterdir()]
