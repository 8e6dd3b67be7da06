"""A static retriever is trained by every method that compares vectors, as other models are."""

from __future__ import annotations

import json
import operator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from test_train import SHORT, assert_resume_equals_unbroken, losses

from conftest import TINY, make_rows
from revela.encoders.load import load_encoder
from revela.encoders.static_encoder import StaticEncoder
from revela.errors import RevelaError
from revela.text.analyzer import Analyzer
from revela.training.methods.contrastive import ContrastiveLoss
from revela.training.methods.dwell import Spans
from revela.training.retriever.build import untrained_retriever
from revela.training.retriever.fit import WORDS_TO_VECTORS, lexical_vectors
from revela.training.retriever.save import save_retriever
from revela.training.retriever.static_from_words import build_word_table
from revela.training.settings import Optimizer
from revela.training.step import make_optimizer
from revela.training.train import train

CASES = {
    "revela-gated": {},
    "dream-infonce": {"queries": "telling-sentence", "negatives": 2},
    "contrastive-crop": {"crop_window": 30, "groups_per_step": 2, "groups_per_batch": 2},
}


def settings_of(case):
    return {"method": case, **TINY, **CASES[case]}


@pytest.fixture(scope="module")
def table_folder(tmp_path_factory, tiny_lm_folder):
    """As ``revela fit --static --steps 0`` saves it, but with prompts."""
    texts = [f"{row['title']} {row['text']}" for row in make_rows(80)]
    model = build_word_table(tiny_lm_folder, texts, Analyzer("none")).model()
    model.prompts = {"query": "ocean00 ", "document": ""}
    folder = tmp_path_factory.mktemp("table")
    save_retriever(model, folder, "", words_to_vectors=WORDS_TO_VECTORS)
    return folder


@pytest.fixture
def recipe(table_folder, tiny_lm_folder):
    return SHORT.replace(model=str(table_folder), lm=str(tiny_lm_folder), max_steps=3)


def test_words_are_read_on_the_cpu(recipe, documents, table_folder, monkeypatch):
    model = untrained_retriever(recipe.retriever, table_folder, documents)
    table_VD = model[0].table_VD().detach()
    on_a_gpu = SimpleNamespace(cpu=lambda: table_VD)  # of which NumPy reads nothing
    monkeypatch.setattr(type(model[0]), "table_VD", lambda _: on_a_gpu)
    texts = [document.text for document in documents]
    assert lexical_vectors(model, texts, 0.0).shape == (len(texts), table_VD.shape[1])


@pytest.mark.parametrize("case", CASES)
def test_methods_train_a_table(recipe, documents, table_folder, tmp_path, case):
    out, before = tmp_path / "out", load_encoder(table_folder, "auto")
    recipe = recipe.replace(**settings_of(case) | {"learning_rate": 1e-3, "max_steps": 3})
    train(recipe, documents, out)
    assert sorted(losses(out)) == [1, 2, 3] and all(np.isfinite(list(losses(out).values())))
    after = load_encoder(out, "auto")
    assert isinstance(after, StaticEncoder) and after.words_to_vectors == WORDS_TO_VECTORS
    assert after.prompts == ("ocean00 ", "")
    texts = [document.text for document in documents[:20]]
    old, new = before.encode_passages(texts), after.encode_passages(texts)
    assert new.shape[1] == 2 * old.shape[1]
    stock = SentenceTransformer(str(out), device="cpu").encode_document(texts)
    np.testing.assert_allclose(
        stock, new, atol=1e-3
    )  # of length one, as inner products are cosines
    # A row moves by a hundredth at most; fp16 rounds ten times as finely.
    assert 3e-3 < np.abs(new @ new.T - old @ old.T).max() < 0.3
    card = (out / "README.md").read_text()
    assert table_folder.name in card and str(table_folder) not in card
    assert json.loads((out / "run.json").read_text())["model"] == str(table_folder)


def test_resume_equals_unbroken(recipe, documents, tmp_path):
    recipe = recipe.replace(**settings_of("dream-infonce") | {"max_steps": 6})
    assert_resume_equals_unbroken(recipe, documents, tmp_path)


def test_rows_and_weights_have_learning_rates_of_their_own(recipe, documents, tmp_path):
    """Adam's first step moves all by the rate, which the warm-up halves."""
    model = untrained_retriever(recipe.retriever, Path(recipe.retriever.model), documents)
    loss = ContrastiveLoss(model, tau=0.1)
    loss.log_tau = torch.nn.Parameter(torch.zeros(()))  # as DREAM has
    groups = make_optimizer(loss, Optimizer()).param_groups
    assert [group["times"] for group in groups] == [1, 10, 50]
    halves = model[0].halves
    ordered = [p for group in groups for p in group["params"]]
    expected = [loss.log_tau, halves.rows_SD, halves.change_S]
    assert all(map(operator.is_, ordered, expected))
    assert all(map(operator.is_, ordered, loss.parameters()))
    seen = []

    def look(loss_module, step):
        halves = loss_module.model.model[0].halves
        moved = halves.rows_SD - halves.fixed_SD, halves.change_S
        seen.append([float(change.detach().abs().max()) / 1e-4 for change in moved])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("revela.training.train.check_same_weights", look)
        one_step = settings_of("contrastive-crop") | {"max_steps": 1}
        train(recipe.replace(**one_step), documents, tmp_path / "out")
    np.testing.assert_allclose(seen, [[0, 0], [5, 25]], rtol=1e-3)


def test_what_a_table_cannot_do_is_refused(recipe, documents, tmp_path):
    for changes, sentence in (
        ({"similarity": "dot"}, "--similarity dot is for a transformer, and --model"),
        ({"context": 2}, "--context 2 needs a transformer: leave it out"),
        ({"method": Spans(), "lora_rank": 0}, "has no decoder: give --model new:small"),
    ):
        with pytest.raises(RevelaError, match=sentence) as error:
            train(recipe.replace(**changes), documents, tmp_path / "out")
        assert "\n" not in str(error.value)
    static = SentenceTransformer(recipe.retriever.model, device="cpu")[0]
    rows = torch.randn(static.num_embeddings, 8)
    parts = [modules.StaticEmbedding(static.tokenizer, rows), modules.Dense(8, 4)]
    folder = tmp_path / "dense"
    SentenceTransformer(modules=parts, device="cpu").save_pretrained(str(folder))
    with pytest.raises(RevelaError, match=r"cannot be trained \(StaticEmbedding, Dense\)"):
        train(recipe.replace(model=str(folder)), documents, tmp_path / "out")
    assert not (tmp_path / "out").exists()
