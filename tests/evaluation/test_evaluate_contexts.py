"""Scores of a retriever that reads a context: it is drawn from the documents of each collection,
never from queries.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from conftest import SLOTS, make_rows
from revela import RevelaError, evaluate
from revela.encoder.load import load_encoder
from revela.evaluation.evaluate import load_collection, mean_outcomes
from revela.index.contexts import Context, sample_texts
from revela.retriever.encode import RetrieverEncoder
from revela.settings import Recipe
from tests.collection_folder import write_collection


@pytest.fixture
def collections(tmp_path):
    return [write(tmp_path / name, seed) for seed, name in enumerate(("One", "Two"))]


def write(folder, seed):
    rows = make_rows(30, sentences=3, seed=seed)
    queries = {f"q{i}": rows[i]["text"].split(". ")[1] for i in range(20)}
    return write_collection(folder, rows, queries, {(f"q{i}", f"d{i}"): 1 for i in range(20)})


@pytest.fixture
def read(monkeypatch):
    """The texts of each context that is made."""
    seen, whole = [], RetrieverEncoder.context_of

    def context_of(self, texts):
        seen.append(list(texts))
        return whole(self, texts)

    monkeypatch.setattr(RetrieverEncoder, "context_of", context_of)
    return seen


def test_each_collection_has_a_context_of_its_documents(contextual, collections, read):
    found = [load_collection(path) for path in collections]
    evaluate([contextual], collections, precision="fp32")
    evaluate([contextual], collections, precision="fp32", context_seed=1)
    for texts, collection in zip(read, [*found, *found], strict=True):
        assert len(set(texts)) == SLOTS and set(texts) <= set(collection.documents)
        assert not set(texts) & set(collection.queries)
    assert read[0] != read[2] and read[0] == sample_texts(found[0].documents, SLOTS, 0)


def test_scores_are_those_in_the_context(contextual, collections):
    scores = evaluate([contextual], collections[:1], precision="fp32", context=["a", "text"])
    encoder = load_encoder(contextual, "fp32").with_context_of(["a", "text"])
    wanted = mean_outcomes(load_collection(collections[0]), {"m": encoder})["m"]
    assert scores["One"]["model"].means == pytest.approx(wanted)
    saved = evaluate([contextual], collections[:1], precision="fp32", context="saved")
    plain = mean_outcomes(load_collection(collections[0]), {"m": load_encoder(contextual, "fp32")})
    assert saved["One"]["model"].means == pytest.approx(plain["m"])


def test_other_models_read_none(contextual, saved_retriever, collections, read):
    evaluate([saved_retriever], collections[:1], precision="fp32")
    assert not read
    evaluate([saved_retriever, contextual], collections[:1], precision="fp32", context="none")
    assert read == [[]]
    with pytest.raises(RevelaError, match="has no first stage: train it with --context N"):
        evaluate([saved_retriever], collections[:1], precision="fp32", context="none")


def test_mteb_draws_from_the_tasks_corpus(contextual, collections, read, tmp_path):
    pytest.importorskip("mteb")
    from revela.evaluation.mteb import evaluate_benchmarks

    names, out = [str(path) for path in collections], tmp_path / "out"
    _, scores = evaluate_benchmarks([str(contextual)], names, out, precision="fp32")
    drawn = [list(texts) for texts in read]
    for texts, path in zip(drawn, collections, strict=True):
        collection = load_collection(path)
        assert texts == sample_texts(collection.documents, SLOTS, 42)
        encoder = load_encoder(contextual, "fp32").with_context_of(texts)
        ours = mean_outcomes(collection, {"m": encoder})["m"]
        assert scores[path.name]["model"].means == pytest.approx(
            {**ours, "main": ours["ndcg@10"]}, abs=1e-4
        )
    assert scores["One"]["model"].settings["context"].endswith("seed 42")
    read.clear()
    evaluate_benchmarks([str(contextual)], names, out, precision="fp32")
    assert not read  # scores are kept
    evaluate_benchmarks([str(contextual)], names[:1], out, precision="fp32", context="none")
    assert read == [[]] and len(list(out.rglob("One.json"))) == 2  # and have a place per context


def test_a_judge_reads_each_collection(contextual, collections, read, tmp_path, monkeypatch):
    from revela.evaluation import compare as comparison
    from revela.training.record import UNKNOWN

    encoder, judged = load_encoder(contextual, "fp32"), []

    def stop(*_, plan, **__):
        judged.append(plan.judge(encoder))
        raise RevelaError("stop")

    monkeypatch.setattr(comparison, "train", stop)
    recipe = Recipe.of("gated", max_minutes=0, max_steps=1)
    data = SimpleNamespace(replace=lambda recipe, lazy_queries: None)
    rest = dict(seeds=[0], points=1, provenance=UNKNOWN)
    with pytest.raises(RevelaError, match="stop"):
        comparison.compare(
            {"a": recipe},
            lambda _: (data, SimpleNamespace(tasks=[None], bm25=dict)),
            collections,
            tmp_path / "out",
            **rest,
        )
    found = [load_collection(path) for path in collections]
    assert read == [sample_texts(c.documents, SLOTS, 0) for c in found]
    wanted = mean_outcomes(found[0], {"m": Context("corpus").into(encoder, found[0].documents)})
    assert judged[0]["One"] == pytest.approx(wanted["m"]["ndcg@10"])


def test_a_sample_has_words_and_is_seeded():
    texts = ["", " ", *(f"text {i}" for i in range(9))]
    assert set(sample_texts(texts, 20, 0)) == set(texts[2:])
    assert sample_texts(texts, 4, 0) == sample_texts(texts, 9, 0)[:4] != sample_texts(texts, 4, 1)
    assert np.unique(sample_texts(texts, 9, 2)).size == 9 and sample_texts([], 3, 0) == []
