"""Test sets of one's own: made from text, scored by models, by indexes and from run files."""

from __future__ import annotations

import json
from zlib import crc32

import pytest

from conftest import make_rows
from revela.evaluation.collection import load_collection
from revela.evaluation.runs import file_name
from tests.collection_folder import write_collection, write_lines

ROWS = make_rows(24)


def ask(passages):
    """A question about each passage; to some, none."""
    return [question(passage, crc32(passage.encode())) for passage in passages]


def question(passage, number):
    word = passage.split()[-1].strip(".").lower()
    return f"What does {word} say of number {number}?" if number % 4 else "nothing"


@pytest.fixture
def text(tmp_path, monkeypatch):
    """A corpus, beside a language model that knows what to ask."""
    monkeypatch.setattr("revela.training.lm.generate.writer", lambda *_: ask)
    return write_lines(tmp_path / "text.jsonl", ROWS)


@pytest.fixture
def make(doing, text, tmp_path, tiny_lm_folder):
    def run(*flags):
        small = f"--lm {tiny_lm_folder} --chunk-words 20 --precision fp32 --threads 1"
        return doing("queries", text, f"--out {tmp_path / 'own'}", small, *flags)

    return run


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_from_text_to_scores(succeeds, make, text, tmp_path, saved_retriever, caplog):
    code, said, err = make("--max-queries 60 --seed 1")
    assert code == 0 and "not a question" in caplog.text, err
    folder, index, runs = tmp_path / "own", tmp_path / "index", tmp_path / "runs"
    queries, passages = lines(folder / "queries.jsonl"), lines(folder / "corpus.jsonl")
    assert f"{len(queries)} queries saved to {folder}" in said and len(queries) > 20
    assert {row["document_id"] for row in passages} == {row["_id"] for row in ROWS}
    collection = load_collection(folder)
    texts = dict(zip(collection.document_ids, collection.documents, strict=True))
    for name, query in zip(collection.query_ids, collection.queries, strict=True):
        (passage,) = collection.qrels[name]
        assert query.split()[2] in texts[passage].lower()

    succeeds("index", text, f"--model {saved_retriever} --out {index}")
    scores = tmp_path / "scores.json"
    flags = f"--on {folder} --rerank late-interaction --precision fp32 --json {scores}"
    said = succeeds("eval", saved_retriever, index, flags, f"--runs {runs}")
    assert "finding a passage's document counts" in said
    by_document = json.loads(scores.read_text())["own"]
    reranked = "index + late interaction"
    assert {"BM25", "index", reranked, f"{saved_retriever.name} + BM25"} <= {*by_document}
    assert all(len(system["queries"]) == len(queries) for system in by_document.values())
    assert by_document["index"]["means"]["recall@100"] == 1.0
    for system in ("BM25", reranked):
        file = f"{file_name(system)}.trec"
        succeeds("eval", runs / "own" / file, flags)
        again = json.loads(scores.read_text())["own"]
        assert again[file]["queries"] == by_document[system]["queries"]


def test_titles_find_all_passages_of_their_document_without_a_language_model(make, text, tmp_path):
    titles = {row["_id"]: " ".join(row["text"].split()[:9:3]) for row in ROWS}
    write_lines(text, [row | {"title": f"{titles[row['_id']]} and more"} for row in ROWS])
    code, said, err = make("--queries title --max-queries 10")
    assert code == 0 and "10 queries saved to" in said, err
    collection = load_collection(tmp_path / "own")
    texts = dict(zip(collection.document_ids, collection.documents, strict=True))
    for query, title in zip(collection.query_ids, collection.queries, strict=True):
        judged = collection.qrels[query]
        assert len(judged) > 1 and not any(title in texts[passage] for passage in judged)


@pytest.fixture(scope="module")
def index(saved_retriever, tmp_path_factory):
    from revela import Document, Retriever

    folder = tmp_path_factory.mktemp("searched") / "index"
    documents = [Document(row["_id"], row["text"], row["title"]) for row in ROWS]
    Retriever(saved_retriever, "fp32").index(documents, folder)
    return folder


QUERIES = {"q1": "ocean01 ocean02", "q2": "engine00", "q3": "garden04 garden02"}


@pytest.mark.parametrize("flags", ["", "--rerank late-interaction"])
def test_a_file_of_queries_finds_what_each_finds_alone(succeeds, index, tmp_path, flags):
    rows = [{"_id": name, "text": query} for name, query in QUERIES.items()]
    write_lines(tmp_path / "q.jsonl", rows)
    (tmp_path / "q.txt").write_text("\n".join(QUERIES.values()))
    alone = {}
    for query in QUERIES.values():
        said = succeeds("search", index, query, f"--json --top 3 {flags}".strip())
        alone[query] = json.loads(said)
    for file, names in (("q.jsonl", [*QUERIES]), ("q.txt", ["1", "2", "3"])):
        given = f"--queries {tmp_path / file} --top 3 {flags}".strip()
        said = succeeds("search", index, given)
        found = [json.loads(line) for line in said.splitlines()]
        assert [row["_id"] for row in found] == names
        for row in found:
            same = alone[row["query"]]
            assert row.keys() - same.keys() == {"_id"} and row["answer"] == same["answer"]
            for hit, wanted in zip(row["data"], same["data"], strict=True):
                for number in ("score", "confidence"):
                    assert hit[number] == pytest.approx(wanted[number], abs=1e-5)
                    hit[number] = wanted[number]
                assert hit == wanted
    succeeds("search", index, given, f"--run {tmp_path / 'my.trec'}")
    ranked = [line.split() for line in (tmp_path / "my.trec").read_text().splitlines()]
    assert ranked[0][:4] == ["1", "Q0", "d0", "1"] and ranked[0][5] == "index"
    assert [row[2] for row in ranked] == [
        h["id"] for found in alone.values() for h in found["data"]
    ]


def test_an_index_and_a_run_are_scored_as_they_are(succeeds, index, tmp_path):
    judged = {("q1", "d0"): 1, ("q2", "d1"): 1, ("q3", "d2"): 1}
    folder = write_collection(tmp_path / "set", ROWS, QUERIES, judged)
    trec = [f"{query} 0 {document} {grade}" for (query, document), grade in judged.items()]
    (folder / "qrels" / "test.tsv").write_text("\n".join(trec))
    (tmp_path / "my.trec").write_text("q1 Q0 d0 1 2.5 me\nq2 Q0 d5 1 9 me\nq2 Q0 d1 2 8 me\n")
    scores = tmp_path / "scores.json"
    said = succeeds("eval", index, tmp_path / "my.trec", f"--on {folder} --json {scores}")
    assert "my.trec lacks 1 query of set, scored as 0" in said
    found = json.loads(scores.read_text())["set"]
    assert [found[name]["means"]["mrr@10"] for name in ("index", "my.trec")] == [1.0, 0.5]
    assert found["my.trec"]["p"].keys() == {"BM25", "index"}


RUN = "q1 Q0 d0 1 2.5 me\n"


BAD_RUNS = [
    ("", "r.trec is empty: give a TREC run, a model or an index"),
    (f"{RUN}q1 Q0 d1\n", "r.trec:2 is not a TREC run: give query-id Q0"),
    ("q1 Q0 d0 1 nan me\n", "r.trec:1 is not a TREC run"),
    (RUN * 2, "r.trec:2 ranks d0 for q1 again: give each system its own"),
    ("x Q0 d0 1 2.5 me\n", "has queries such as x instead of q1: give a run of set"),
    ("q1 Q0 no 1 2 me\n", "does not have the documents of set (it has ids such as no instead"),
]


@pytest.mark.parametrize(("content", "sentence"), BAD_RUNS)
def test_bad_runs_are_one_sentence(refused, tmp_path, content, sentence):
    folder = write_collection(tmp_path / "set", ROWS, QUERIES, {("q1", "d0"): 1})
    (tmp_path / "r.trec").write_text(content)
    err = refused("eval", tmp_path / "r.trec", f"--on {folder}", f"--runs {tmp_path / 'runs'}")
    assert sentence in err
    assert not (tmp_path / "runs").exists()


def test_an_index_of_other_ids_is_refused(refused, index, tmp_path):
    rows = [{**row, "_id": f"docs/{row['_id']}"} for row in ROWS]
    folder = write_collection(tmp_path / "set", rows, QUERIES, {("q1", "docs/d0"): 1})
    err = refused("eval", index, f"--on {folder}")
    assert "it has ids such as d0 instead of docs/d0): index its corpus.jsonl" in err


TWICE = '{"_id": "a", "text": "one"}\n{"_id": "a", "text": "two"}\n'
SPACED = '{"_id": "a b", "text": "one"}'


BAD_QUERIES = [
    (None, "--queries {file}", "q.jsonl does not exist: give a file with one query per line"),
    ("", "--queries {file}", "q.jsonl is empty"),
    (TWICE, "--queries {file}", 'q.jsonl has two texts for _id "a"'),
    (SPACED, "--queries {file} --run {run}", "the id 'a b' has a space"),
    (SPACED, "--run {run}", "or a folder and --queries FILE; --run needs --queries"),
]


@pytest.mark.parametrize(("content", "flags", "sentence"), BAD_QUERIES)
def test_bad_queries_are_one_sentence(doing, index, tmp_path, content, flags, sentence):
    file, run = tmp_path / "q.jsonl", tmp_path / "my.trec"
    if content is not None:
        file.write_text(content)
    code, said, err = doing("search", index, flags.format(file=file, run=run))
    assert code == 2 and sentence in err and not said and not run.exists(), err


WITHOUT_TEST_SET = [
    ("--queries-file {tmp}/text.jsonl", "is not a line of queries"),
    ("--queries title --title-field none", "no passage has a query: give more text"),
]


@pytest.mark.parametrize(("flags", "sentence"), WITHOUT_TEST_SET)
def test_without_a_test_set_nothing_is_left(make, tmp_path, flags, sentence):
    code, _, err = make(flags.format(tmp=tmp_path))
    assert code == 2 and sentence in err, err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.jsonl"]


def test_a_folder_is_never_written_over(make, tmp_path):
    (tmp_path / "own").mkdir()
    assert "exists: choose another --out" in make()[2]
