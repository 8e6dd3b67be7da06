"""BEIR-layout folders: read whole or refused in one sentence, scored as pytrec_eval scores them."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from conftest import MadeUpEncoder
from revela import Retriever, evaluate
from revela.encoders.load import load_encoder
from revela.errors import RevelaError
from revela.evaluation.collection import Collection, load_collection
from revela.evaluation.evaluate import outcomes, rankings, short_names, without_themselves
from revela.evaluation.metrics import mean_scores, per_query
from revela.evaluation.runs import read_run, write_run
from revela.training.recipe import Recipe
from revela.training.retriever.build import build_retriever
from tests.collection_folder import write_collection, write_lines


class Oracle(MadeUpEncoder):
    """Knows that query i wants document i."""

    def encode_passages(self, texts, progress=False):
        return np.eye(len(texts), dtype=np.float32)

    def encode_queries(self, texts, progress=False):
        return np.eye(4, dtype=np.float32)[[int(t.split()[-1]) for t in texts]]


class Words(MadeUpEncoder):
    """Counts some words."""

    def encode_passages(self, texts, progress=False):
        known = ("zoos", "protect", "harm", "hill", "dance", "bees", "sea", "salt")
        counts = np.array([[t.lower().count(word) for word in known] for t in texts])
        return (counts / np.linalg.norm(counts, axis=1, keepdims=True)).astype(np.float32)

    encode_queries = encode_passages


def write(folder, qrels="q0\td0\t1\nq1\td1\t2\nq1\td2\t0\nq2\td3\t0\n"):
    rows = [
        {"_id": f"d{i}", "title": "t" if i else "", "text": f"words {i} apple{i}"} for i in range(4)
    ]
    write_collection(folder, rows, {f"q{i}": f"query {i}" for i in range(3)}, {})
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + qrels)
    return folder


@pytest.mark.parametrize("packed", [False, True])
def test_reads_and_scores(tmp_path, packed):
    folder = write(tmp_path / "c")
    if packed:
        corpus = folder / "corpus.jsonl"
        (folder / "corpus.jsonl.gz").write_bytes(gzip.compress(corpus.read_bytes()))
        corpus.unlink()
    collection = load_collection(folder)
    assert collection.query_ids == ["q0", "q1"]  # q2 has no relevant document
    assert collection.documents[:2] == ["words 0 apple0", "t words 1 apple1"]
    scores = outcomes(collection, {"oracle": Oracle()})
    assert list(scores) == ["BM25", "oracle", "oracle + BM25", "oracle + BM25 (RRF)"]
    names = ("ndcg@10", "recall@100", "mrr@10", "mrr@100", "map")
    assert mean_scores(scores["oracle"]) == dict.fromkeys(names, 1.0)


def test_a_query_that_is_a_document_does_not_find_itself():
    """Only where it is: queries and documents may be numbered apart, or a document be judged
    relevant to its own words.
    """
    documents = ["Zoos  protect animals", "zoos harm animals", "bees dance", "a hill of bees"]
    queries = ["Zoos protect animals", "zoos and animals", "hill", "dance"]
    names, asked = ["1", "2", "3", "4"], ["1", "2", "4", "0"]
    qrels = {"1": {"2": 1}, "2": {"2": 1}, "4": {"4": 1}, "0": {"3": 1}}
    collection = Collection("c", names, documents, asked, queries, qrels)
    assert collection.among_documents == {"1"}

    for system, run in rankings(collection, {"m": Words()}):
        found = without_themselves(collection, run)
        assert next(iter(found["1"])) == "2" and next(iter(found["4"])) == "4", system
        assert per_query(qrels, found)["1"]["ndcg@10"] == 1.0, system


def test_evaluate_gives_the_scores_of_every_system_by_collection(tmp_path, monkeypatch):
    monkeypatch.setattr("revela.encoders.load.resolve", lambda name: name)
    monkeypatch.setattr("revela.encoders.load.load_encoder", lambda *_, **__: Oracle())
    folders = [write(tmp_path / "one"), write(tmp_path / "two")]
    scores = evaluate(["owner/first", "owner/second"], folders)
    assert list(scores) == ["one", "two"]
    systems = [f"{m}{s}" for m in ("first", "second") for s in ("", " + BM25", " + BM25 (RRF)")]
    assert list(scores["two"]) == ["BM25", *systems]
    second = scores["one"]["second"]
    assert second.means["ndcg@10"] == 1.0 and list(second.queries) == ["q0", "q1"]
    assert list(second.p) == ["BM25", "first"] and list(scores["one"]["BM25"].p) == ["first"]
    assert list(evaluate([], [str(folders[0])])["one"]) == ["BM25"]


def test_names_are_shortened_where_they_stay_apart(tmp_path, monkeypatch):
    found = short_names(["a/model", "b/model", "c/other"])
    assert found == {"a/model": "a/model", "b/model": "b/model", "other": "c/other"}
    monkeypatch.chdir(write(tmp_path / "one"))
    assert short_names([".", "../one/.."]) == {"one": ".", tmp_path.name: "../one/.."}
    assert load_collection(Path()).name == "one"


def test_broken_model_is_refused(tmp_path, saved_retriever):
    encoder = load_encoder(saved_retriever, "fp32")
    next(encoder.model.parameters()).data[:] = np.nan
    with pytest.raises(RevelaError, match="not finite for 4 of 4 texts"):
        outcomes(load_collection(write(tmp_path / "c")), {"m": encoder})


def test_a_missing_corpus_or_document_is_one_sentence(tmp_path):
    with pytest.raises(RevelaError, match=r"not a BEIR-layout folder: it has no corpus\.jsonl"):
        load_collection(tmp_path)
    said = r"has 1 corpus-id that corpus\.jsonl lacks \(first: nowhere\)"
    with pytest.raises(RevelaError, match=said):
        load_collection(write(tmp_path / "c", "q0\tnowhere\t1\n"))


def test_an_empty_query_without_judgements_is_left_out(tmp_path):
    folder = write(tmp_path / "c")
    rows = [{"_id": f"q{i}", "text": f"query {i}"} for i in range(2)]
    write_lines(folder / "queries.jsonl", [*rows, {"_id": "q2", "text": " "}])
    assert load_collection(folder).queries == ["query 0", "query 1"]


def test_a_limit_of_tokens_is_refused_where_it_has_no_effect(refused, static_folder, tmp_path):
    Retriever(static_folder).index(["the ocean is wide", "a castle"], tmp_path / "index")
    folder = write(tmp_path / "judged")
    with pytest.raises(RevelaError, match=r"--max-tokens has no effect on the index .*index: give"):
        evaluate([tmp_path / "index"], [folder], max_tokens=9)
    said = refused("eval", static_folder, "--text", folder, "--max-tokens 9")
    assert "--max-tokens has no effect on --text: leave it out" in said


@pytest.mark.parametrize("method", ["revela-paper", "revela-paper-code"])
def test_the_presets_of_the_paper_save_the_limit_of_its_evaluation(method, tiny_lm_folder):
    model = build_retriever(tiny_lm_folder, Recipe.of(method).retriever)
    assert model.max_seq_length == 2048


def test_candidates_of_a_run_are_all_that_is_ranked(tmp_path, monkeypatch):
    monkeypatch.setattr("revela.encoders.load.resolve", lambda name: name)
    monkeypatch.setattr("revela.encoders.load.load_encoder", lambda *_, **__: Words())
    texts = ["sea salt", "sea sea salt", "salt", "hill", "sea hill"]
    rows = [{"_id": f"d{i}", "text": text} for i, text in enumerate(texts)]
    judged = {("a", "d1"): 1, ("b", "d3"): 1}
    folder = write_collection(tmp_path / "c", rows, {"a": "sea", "b": "hill"}, judged)
    run, out = tmp_path / "first.trec", tmp_path / "c"
    write_run(run, {"a": dict(d2=4, d0=3, d4=2, d1=1), "b": dict(d4=2, d3=1)}, "x")
    found = evaluate(["m"], [folder], candidates=[run], depth=3, runs=tmp_path)["c"]
    ranked = {file.stem: read_run(file) for file in out.glob("*.trec")}
    ids = {s: {q: [*found] for q, found in run.items()} for s, run in ranked.items()}
    assert ids["BM25"] == {"a": ["d0", "d4"], "b": ["d3", "d4"]}  # those with a word of the query
    assert ids["m"] == ids["m-BM25"] == {"a": ["d0", "d4", "d2"], "b": ["d3", "d4"]}
    assert {s.means["mrr@100"] for s in found.values()} == {0.5}  # d1 is no candidate
    for text, models, message in (
        ("a Q0 d0 1 1 x\n\nb Q0 d9 1 1 x\n", ["m"], r"first\.trec:3: c has no d9: give a run of c"),
        ("a Q0 d0 1 1 x\n", ["m"], "lacks the query b of c: give a run of all"),
        ("a Q0 d0 1 1 x\n", [run], "--candidates needs models and one run per folder of --on"),
    ):
        run.write_text(text)
        with pytest.raises(RevelaError, match=message):
            evaluate(models, [folder], candidates=[run])
