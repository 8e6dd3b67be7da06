"""A model with more tokens than rows of its table (Gemma 3 has a token for images)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from small import build, fit
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import TINY, make_rows
from revela import Document, Retriever
from revela import fit as fit_stock
from revela.training.recipe import Recipe
from revela.training.retriever.module import RetrieverEncoder
from revela.training.retriever.save import save_retriever

TEXTS = [row["text"] for row in make_rows(24)]
WITH_IT = [*TEXTS, f"{TEXTS[0]} Then <image> came there. {TEXTS[1]}"]


@pytest.fixture(scope="module")
def lm(tiny_lm_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows") / "lm"
    AutoModelForCausalLM.from_pretrained(tiny_lm_folder).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm_folder)
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    tokenizer.save_pretrained(folder)
    return folder


def test_it_is_fitted_saved_and_read(lm, tmp_path):
    model = build(lm)
    table = model[0].model.get_input_embeddings().weight
    assert len(table) == len(model.tokenizer) and not table[-1].any()
    fit(model, WITH_IT, token_weighting=1e-3, whitening=0.25, lexical=1.0)
    save_retriever(model, tmp_path / "out", "card")
    vectors = RetrieverEncoder(model, False).encode_passages(WITH_IT)
    stock = SentenceTransformer(str(tmp_path / "out"), device="cpu").encode_document(WITH_IT)
    np.testing.assert_allclose(vectors, stock, atol=1e-5)


def test_a_model_that_the_user_opened_is_fitted(lm, tmp_path):
    model = build(lm)
    model[0].model.resize_token_embeddings(len(model.tokenizer) - 1)
    fitted = fit_stock(model, WITH_IT)
    assert np.isfinite(RetrieverEncoder(fitted, False).encode_passages(WITH_IT)).all()


@pytest.mark.parametrize("how", [dict(layers=1), dict(static=True)])
def test_the_whole_fit(lm, tmp_path, how):
    corpus = tmp_path / "text"
    corpus.mkdir()
    for i, text in enumerate(WITH_IT):
        (corpus / f"{i}.txt").write_text(text)
    retriever = Retriever.fit(corpus, tmp_path / "out", model=lm, held_out=0, steps=1, **how)
    assert np.isfinite(retriever.encode_queries(WITH_IT)).all()


@pytest.mark.parametrize("embedder", [False, True])
def test_it_is_trained(lm, tmp_path, embedder, tiny_lm_folder):
    from revela.training.train import train

    model = lm
    if embedder:
        saved = build(lm)
        saved[0].model.resize_token_embeddings(len(saved.tokenizer) - 1)
        saved.save_pretrained(str(tmp_path / "model"))
        model = tmp_path / "model"
    small = dict(layers=1, group_size=4, gate_heads=2, max_steps=1)
    recipe = Recipe.of(model=str(model), lm=str(lm), **TINY | small)
    documents = [Document(str(i), text) for i, text in enumerate(WITH_IT[-9:])]
    train(recipe, documents, tmp_path / "out")  # the LM reads it too
    vectors = Retriever(tmp_path / "out", "fp32").encode_passages(WITH_IT)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert torch.isfinite(torch.from_numpy(vectors)).all()
