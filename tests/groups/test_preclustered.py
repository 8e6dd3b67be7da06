"""Groups of chunks that somebody else has clustered."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import make_rows
from revela.groups.store import GroupFolder
from test_cli import TINY

SIZE, WIDTH = 4, 8
FLAGS = ("--group-size", SIZE, "--held-out", 0.1)
BY_CELL = ("--cluster-column", "cell")


def chunks_in_cells(documents: int = 60) -> list[dict[str, object]]:
    """Rows as revela encode writes them, with a cell: half of all are in cell 7, one has two."""
    rng = np.random.default_rng(0)
    rows = []
    for i, row in enumerate(make_rows(documents, sentences=4)):
        for number, text in enumerate(row["text"].split(". ")):
            cell = -1 if i == 5 and number < 2 else (7 if i % 2 else i % 12)
            vector = rng.normal(size=WIDTH).astype(np.float32) + 3 * (cell == 7)
            rows.append(dict(id=row["_id"], chunk=number, title=row["title"], text=text,
                             vector=vector.tolist(), cell=cell))  # fmt: skip
    return [rows[i] for i in rng.permutation(len(rows))]


def write_cells(path, rows, **kinds):
    table = pa.Table.from_pylist(rows)
    kinds = {"vector": pa.list_(pa.float32(), WIDTH), "cell": pa.int64(), **kinds}
    for name, kind in kinds.items():
        if name in table.schema.names:
            place = table.schema.get_field_index(name)
            table = table.set_column(place, name, table[name].cast(kind))
    pq.write_table(table, path, row_group_size=40)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cells")
    rows = chunks_in_cells()
    write_cells(folder / "a.parquet", rows[:100])
    write_cells(folder / "b.parquet", rows[100:])
    return folder


def groups_of(folder: GroupFolder) -> set[tuple[str, ...]]:
    size = folder.size
    return {
        tuple(sorted(folder.rows[i].text for i in range(start, start + size)))
        for start in range(0, len(folder.rows), size)
    }


def test_groups_keep_to_their_clusters(succeeds, corpus, tiny_lm_folder, tmp_path):
    out = tmp_path / "groups"
    said = succeeds("groups", corpus, "--out", out, *BY_CELL, "--shards", 3, *FLAGS)
    folder, rows = GroupFolder(out), chunks_in_cells()
    held = {document.id for document in folder.held_out}
    cell_of = {(row["title"], row["text"]): row["cell"] for row in rows}
    left = Counter(row["cell"] for row in rows if row["id"] not in held)
    made = Counter()
    for start in range(0, len(folder.rows), SIZE):
        members = [folder.rows[i] for i in range(start, start + SIZE)]
        cells = {cell_of[member.name, member.text] for member in members}
        assert len(cells) == 1
        made[cells.pop()] += 1
    assert made == Counter({cell: n // SIZE for cell, n in left.items() if n >= SIZE})
    texts = [row.text for row in folder.rows]
    assert len(set(texts)) == len(texts)
    assert len(held) == 6 and len(folder.documents) == 54
    whole = {row["_id"]: row["text"] for row in make_rows(60, sentences=4)}
    for document in (*folder.held_out, *folder.documents):
        assert document.text.replace(".", "") == whole[document.id].replace(".", "")
    assert 1 < len(list(out.glob("shard-0*"))) <= 3
    left_out = sum(left.values()) - len(texts)
    assert f"{left_out} chunks left out" in said and "1 clusters have fewer than 4" in said
    succeeds("train", out, "--out", tmp_path / "model", "--model", tiny_lm_folder,
        "--lm", tiny_lm_folder, *TINY, "--group-size", SIZE,
    )  # fmt: skip


def test_rows_without_vectors_are_grouped_by_their_words(succeeds, tiny_lm_folder, tmp_path):
    rows = [{k: row[k] for k in ("id", "chunk", "text", "cell")} for row in chunks_in_cells(24)]
    write_cells(tmp_path / "c.parquet", rows, cell=pa.float64())
    succeeds("groups", tmp_path / "c.parquet", "--out", tmp_path / "out",
        *BY_CELL, "--model", tiny_lm_folder, "--lm", tiny_lm_folder, *FLAGS,
    )  # fmt: skip
    cell_of = {row["text"]: row["cell"] for row in rows}
    for group in groups_of(GroupFolder(tmp_path / "out")):
        assert len({cell_of[text] for text in group}) == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda rows: [{**row, "cell": None} for row in rows], "text or cluster: c.parquet:1"),
        (lambda rows: [{**row, "cell": None if i < 9 else 1} for i, row in enumerate(rows)],
         "9 of 96 entries cannot be read (no id, text or cluster"),
        (lambda rows: [{k: v for k, v in row.items() if k != "cell"} for row in rows],
         'has no column "cell"'),
        (lambda rows: [{**row, "vector": [float("nan")] * WIDTH} for row in rows],
         "a vector that is not finite: encode the corpus again"),
        (lambda rows: [{**row, "cell": f"about {row['cell']}"} for row in rows],
         'column "cell" holds string, and a cluster is a whole number'),
        (lambda rows: rows[:3], "no cluster has 4 chunks: lower --group-size"),
    ],
)  # fmt: skip
def test_bad_rows_are_one_sentence(refused, tmp_path, change, sentence):
    path, out = tmp_path / "c.parquet", tmp_path / "out"
    rows = change(chunks_in_cells(24))
    write_cells(
        path, rows, **({"cell": pa.string()} if isinstance(rows[0].get("cell"), str) else {})
    )
    err = refused("groups", path, "--out", out, *BY_CELL, *FLAGS)
    assert sentence in err and not out.exists()


@pytest.mark.parametrize(
    ("width", "sentence"), [(5, "vectors of 5 numbers, others of 8"), (0, "no vectors")]
)
def test_vectors_of_two_widths_are_one_sentence(refused, tmp_path, width, sentence):
    rows = chunks_in_cells(24)
    write_cells(tmp_path / "a.parquet", rows)
    others = [{**row, "id": f"other {row['id']}", "vector": [0.5] * width} for row in rows]
    if not width:
        others = [{k: v for k, v in row.items() if k != "vector"} for row in others]
    write_cells(tmp_path / "b.parquet", others, vector=pa.list_(pa.float32()))
    err = refused("groups", tmp_path, "--out", tmp_path / "out", *BY_CELL, *FLAGS)
    assert f"b.parquet has {sentence}" in err
