"""A table that is trained: its two halves against a loop, and what is saved of it."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from small import tokenizer_of

from revela.encoders.static_encoder import StaticEncoder
from revela.errors import RevelaError
from revela.training.methods.contrastive import info_nce
from revela.training.retriever.module import RetrieverEncoder
from revela.training.retriever.save import save_retriever
from revela.training.retriever.static_trainable import (
    LexicalAndDense,
    TrainableTable,
    make_trainable,
)

WORDS = ["<unk>", *(f"word{i}" for i in range(20))]
TEXTS = ["word1 word2 word2", "word3", "", "unheard of", "word19 word4 word5 word1 word7 nothing"]


def rows_VD():
    """Random rows; that of unknown words is 0, and words 4 and 5 share one."""
    rows = torch.randn(len(WORDS), 6, generator=torch.Generator().manual_seed(0))
    rows[0] = 0
    rows[5] = rows[6]
    return rows


def static_model(*more, limit=None, **settings):
    parts = [modules.StaticEmbedding(tokenizer_of(WORDS, limit), rows_VD()), *more]
    return SentenceTransformer(modules=parts, device="cpu", **settings)


def trainable(*more, **settings):
    model = static_model(*more, **settings)
    make_trainable(model)
    return model


def moved(model):
    """The same after a few steps away from the start."""
    halves, noise = model[0].halves, torch.Generator().manual_seed(1)
    with torch.no_grad():
        halves.rows_SD += 0.2 * torch.randn(halves.rows_SD.shape, generator=noise)
        halves.change_S += 0.3 * torch.randn(halves.change_S.shape, generator=noise)
    return model


def test_loss_and_gradients_are_those_of_a_loop():
    torch.manual_seed(0)
    halves = LexicalAndDense(torch.randn(9, 4).double(), torch.rand(9).double())
    with torch.no_grad():
        halves.rows_SD += torch.randn(9, 4)
        halves.change_S += torch.randn(9)
    texts = [[0, 1, 1], [2], [8, 4, 3], [1, 3], [2, 5, 6], [7, 4]]
    flat, starts = torch.tensor([*chain(*texts)]), torch.tensor([0, 3, 4, 7, 9, 12])
    queries, passages = F.normalize(halves(flat, starts), dim=1).chunk(2)
    ours = info_nce(queries, passages, torch.arange(3), 0.1)
    ours.backward()
    found = [halves.rows_SD.grad.clone(), halves.change_S.grad.clone()]
    halves.zero_grad()

    def vector(text):
        whole = 0
        for i in text:
            row = torch.cat([halves.fixed_SD[i], halves.rows_SD[i]])
            whole = whole + row * halves.initial_weight_S[i] * halves.change_S[i].exp()
        return whole / whole.norm()

    loss = 0
    for i in range(3):
        scores = torch.stack([vector(texts[i]) @ vector(text) / 0.1 for text in texts[3:]])
        loss = loss - (scores[i] - scores.logsumexp(0)) / 3
    loss.backward()
    torch.testing.assert_close(ours, loss)
    for gradient, expected in zip(found, [halves.rows_SD.grad, halves.change_S.grad], strict=True):
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("more", [(), (modules.Normalize(),)], ids=["plain", "normalised"])
def test_it_begins_with_the_cosines_of_the_static_model(more):
    prompts = {"query": "word8 ", "document": ""}
    stock = RetrieverEncoder(static_model(*more, prompts=prompts), bf16=False)
    ours = RetrieverEncoder(trainable(*more, prompts=prompts), bf16=False)
    for encode in ("encode_queries", "encode_passages"):
        one, two = (getattr(encoder, encode)(TEXTS) for encoder in (stock, ours))
        assert two.shape[1] == 2 * one.shape[1]
        np.testing.assert_allclose(two @ two.T, one @ one.T, atol=1e-6)


def test_what_is_saved_gives_the_same_vectors(tmp_path):
    model = moved(trainable(modules.Normalize(), prompts={"query": "word8 ", "document": ""}))
    encoder = RetrieverEncoder(model, bf16=False)
    save_retriever(model, tmp_path / "out", "a card")
    loaded = StaticEncoder.load(tmp_path / "out")
    stock = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert [type(part).__name__ for part in stock] == ["StaticEmbedding", "Normalize"]
    for encode in ("encode_queries", "encode_passages"):
        expected = getattr(encoder, encode)(TEXTS)
        np.testing.assert_allclose(getattr(loaded, encode)(TEXTS), expected, atol=2e-3)
    assert isinstance(model[0], TrainableTable)  # it can be trained on
    rows = load_file(tmp_path / "out" / "model.safetensors")["embedding.weight"]
    assert rows.dtype == np.float16 and rows.shape == (len(WORDS), 12)
    assert not rows[0].any() and (rows[5] == rows[6]).all()


def test_words_of_one_row_learn_together():
    model = trainable()
    assert len(model[0].halves.rows_SD) == len(WORDS) - 1
    features = model.preprocess(["word4", "word5 word7"])
    model(features)["sentence_embedding"][0].sum().backward()
    learns = model[0].halves.rows_SD.grad.any(dim=1)
    assert learns[model[0].row_V].nonzero().squeeze(1).tolist() == [5, 6]


def test_a_row_of_0_stays_so():
    model = trainable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for _ in range(3):
        vectors = model(model.preprocess(["unheard word1", "word2 word3"]))["sentence_embedding"]
        F.cosine_similarity(*vectors, dim=0).backward()
        optimizer.step()
    rows = model[0].stock().embedding.weight
    assert not rows[0].any() and rows.isfinite().all() and rows[2].any()


def test_truncation_of_texts_and_vectors_is_that_of_the_model(tmp_path):
    stock = static_model(limit=2, truncate_dim=4)
    model = trainable(limit=2, truncate_dim=4)
    one, two = (RetrieverEncoder(m, False).encode_passages(TEXTS) for m in (stock, model))
    assert one.shape[1] == 4 and two.shape[1] == 8
    np.testing.assert_allclose(two @ two.T, one @ one.T, atol=1e-6)
    save_retriever(model, tmp_path / "out", "")
    loaded = StaticEncoder.load(tmp_path / "out").encode_passages(TEXTS)
    np.testing.assert_allclose(loaded, two, atol=2e-3)


def test_other_models_are_refused():
    for parts in ((modules.Dense(6, 4),), (modules.Normalize(), modules.Dense(6, 4))):
        names = ", ".join(["StaticEmbedding", *(type(part).__name__ for part in parts)])
        with pytest.raises(RevelaError, match=rf"cannot be trained \({names}\): give one that"):
            trainable(*parts)
