"""``revela encode``: what an index would hold, in files."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from conftest import make_rows
from revela import Index
from test_cli import run

FLAGS = ("--chunk-words", 12, "--precision", "fp32")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("encode") / "corpus.jsonl"
    rows = [dict(row, title=row["title"] * (i % 2)) for i, row in enumerate(make_rows(24))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_vectors_of_an_index(monkeypatch, capsys, corpus, saved_retriever, tmp_path):
    model = ("--model", saved_retriever, *FLAGS)
    assert run(monkeypatch, capsys, "index", corpus, "--out", tmp_path / "index", *model)[0] == 0
    index = Index.open(tmp_path / "index").table.lance.search().limit(10**6).to_list()
    wanted = {(row["id"], row["chunk"]): row for row in index}
    out = tmp_path / "vectors.npy"
    code, said, err = run(monkeypatch, capsys, "encode", corpus, "--out", out, *model)
    assert code == 0, err
    vectors, rows = np.load(out), pq.read_table(tmp_path / "vectors.rows.parquet").to_pylist()
    assert f"{len(index)} vectors of {vectors.shape[1]} numbers in {out}" in said
    assert len(rows) == len(vectors) == len(index) and vectors.dtype == np.float32
    assert wanted.keys() == {(row["id"], row["chunk"]) for row in rows}
    for row, vector in zip(rows, vectors, strict=True):
        known = wanted[row["id"], row["chunk"]]
        np.testing.assert_allclose(vector, known["vector"], atol=1e-5)
        assert f"{row['title']} {row['text']}".strip() == known["passage"].strip()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["index", "vectors.npy", "vectors.rows.parquet"]
    code, _, err = run(monkeypatch, capsys, "encode", corpus, "--out", out, *model)
    assert code == 2 and "exists: choose another --out" in err


def test_a_parquet_file_and_names_that_say_nothing(
    monkeypatch, capsys, corpus, saved_retriever, tmp_path
):
    model = ("--model", saved_retriever, *FLAGS)
    out = tmp_path / "vectors.parquet"
    assert run(monkeypatch, capsys, "encode", corpus, "--out", out, *model)[0] == 0
    table = pq.read_table(out)
    assert table.schema.names == ["id", "chunk", "title", "text", "vector"]
    vectors = np.stack(table["vector"].to_numpy(zero_copy_only=False))
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    code, _, err = run(monkeypatch, capsys, "encode", corpus, "--out", tmp_path / "x.csv", *model)
    assert code == 2 and "ends in .parquet or .npy" in err
    twice = tmp_path / "twice.jsonl"
    twice.write_text('{"_id": 1, "text": "one"}\n' * 2)
    code, _, err = run(monkeypatch, capsys, "encode", twice, "--out", tmp_path / "y.npy", *model)
    assert code == 2 and 'two documents have the id "1"' in err
