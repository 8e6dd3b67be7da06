"""``revela encode``: what an index would hold, in files."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest

from conftest import make_rows
from revela import Index
from tests.collection_folder import write_lines

FLAGS = ("--chunk-words", 12, "--precision", "fp32")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    rows = [dict(row, title=row["title"] * (i % 2)) for i, row in enumerate(make_rows(24))]
    return write_lines(tmp_path_factory.mktemp("encode") / "corpus.jsonl", rows)


def test_the_vectors_of_an_index(succeeds, refused, corpus, saved_retriever, tmp_path):
    model = ("--model", saved_retriever, *FLAGS)
    succeeds("index", corpus, "--out", tmp_path / "index", *model)
    index = Index.open(tmp_path / "index").table.lance.search().limit(10**6).to_list()
    wanted = {(row["id"], row["chunk"]): row for row in index}
    out = tmp_path / "vectors.parquet"
    said = succeeds("encode", corpus, "--out", out, *model)
    table = pq.read_table(out)
    assert table.schema.names == [
        *("id", "chunk", "title", "text", "line", "page", "date", "type", "language", "vector")
    ]
    rows = table.to_pylist()
    assert f"{len(index)} vectors of {len(rows[0]['vector'])} numbers in {out}" in said
    assert len(rows) == len(index) and wanted.keys() == {(row["id"], row["chunk"]) for row in rows}
    for row in rows:
        known = wanted[row["id"], row["chunk"]]
        np.testing.assert_allclose(row["vector"], known["vector"], atol=1e-5)
        assert np.linalg.norm(row["vector"]) == pytest.approx(1, abs=1e-5)
        assert f"{row['title']} {row['text']}".strip() == known["passage"].strip()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index", "vectors.parquet"]
    assert "exists: choose another --out" in refused("encode", corpus, "--out", out, *model)


def test_other_formats_and_repeated_ids_are_refused(refused, corpus, saved_retriever, tmp_path):
    twice = tmp_path / "twice.jsonl"
    twice.write_text('{"_id": 1, "text": "one"}\n' * 2)
    for texts, out, why in (
        (corpus, "x.npy", "ends in .parquet"),
        (twice, "y.parquet", 'two documents have the id "1"'),
    ):
        flags = ("--out", tmp_path / out, "--model", saved_retriever, *FLAGS)
        assert why in refused("encode", texts, *flags)


def test_an_index_is_written_as_it_is(succeeds, refused, saved_retriever, tmp_path):
    table = tmp_path / "rows.csv"
    table.write_text("id,text,year,line\na,the castle opens,2020,x\nb,a violin,2021,y\n")
    model = ("--model", saved_retriever, *FLAGS)
    succeeds("index", table, "--out", tmp_path / "index", *model, "--metadata year,line")
    index = ("encode", tmp_path / "index", "--out")
    assert "2 vectors of" in succeeds(*index, tmp_path / "a.parquet")
    given = ("encode", table, "--out", tmp_path / "b.parquet", *model)
    succeeds(*given, "--metadata year line")
    made, same = (pq.read_table(tmp_path / f"{name}.parquet") for name in "ab")
    assert made.schema == same.schema and made.schema.names[-2:] == ["year", "vector"]
    assert made.drop(["vector"]).to_pylist() == same.drop(["vector"]).to_pylist()
    np.testing.assert_allclose(made["vector"].to_pylist(), same["vector"].to_pylist(), atol=1e-6)
    for flags in (model, ("--dimensions", 8), ("--metadata", "year"), (tmp_path / "index",)):
        where = (*index[:-1], "--out", tmp_path / "c.parquet")
        assert "an index is written as it is" in refused(*where, *flags)
    succeeds("index", "--out", tmp_path / "index", "--delete", "a", "b")
    assert "there are no passages to write" in refused(*index, tmp_path / "c.parquet")
    assert not (tmp_path / "c.parquet").exists()
    assert "give the --model" in refused("encode", table, "--out", tmp_path / "c.parquet")
