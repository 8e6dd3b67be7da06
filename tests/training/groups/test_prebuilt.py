"""Groups that are ready, in a file and in a dataset of the hub (a local folder that the datasets
library streams the same way).
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from revela.errors import RevelaError
from revela.training.build_groups import build_groups
from revela.training.groups.prebuilt import group_members, holds_groups
from revela.training.recipe import Recipe
from tests.collection_folder import write_lines

LINES = [["a", "b", "c"], {"src": "posts", "text": ["d", "e", "f", "g"]}, ["h", "i", "j"]]


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz"])
def test_groups_of_a_file_are_read(tmp_path, ending):
    path = tmp_path / f"corpus.{ending}"
    text = ("\n".join(map(json.dumps, LINES)) + "\n\n").encode()
    path.write_bytes(gzip.compress(text) if ending.endswith("gz") else text)
    assert holds_groups(path)
    rows = list(group_members(path, 3))
    assert [row.name for row in rows[::3]] == [f"{path.name}:1", "posts:2", f"{path.name}:3"]
    assert "".join(row.text for row in rows) == "abcdefhij"
    assert [row.document for row in rows] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


BAD_LINES = [
    (["a", "b"], ":4 has 2 texts, fewer than a group of 3"),
    (["a", "b", 3], ":4 is neither a list of texts"),
    ({"text": ["a", "b", "c"]}, ":4 is neither"),
    ("abc", ":4 is neither"),
    (["\ud800 a", "b", "c"], r":4 is not Unicode \(half of a surrogate pair\): correct that line"),
    ({"src": "\ud800", "text": ["a", "b", "c"]}, ":4 is not Unicode"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_lines_that_are_no_groups_are_named(tmp_path, line, message):
    path = tmp_path / "c.jsonl"
    path.write_text("\n".join(map(json.dumps, [*LINES, line])))
    with pytest.raises(RevelaError, match=message):
        list(group_members(path, 3))


@pytest.mark.parametrize("text", ["", '{"text": "a document"}\n', "{broken", "plain"])
def test_files_of_documents_hold_no_groups(tmp_path, text):
    (tmp_path / "c.jsonl").write_text(text)
    assert (
        not holds_groups(tmp_path / "c.jsonl")
        and not holds_groups(tmp_path)
        and not holds_groups(tmp_path / "none.jsonl")
    )


def hub_folder(folder: Path, rows: list[object]) -> Path:
    folder.mkdir(parents=True)
    write_lines(folder / "train.jsonl", rows)
    return Path(f"hub:{folder}")


def test_a_dataset_of_the_hub_is_streamed_once(tmp_path, monkeypatch):
    import datasets

    asked, load = [], datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: asked.append(a) or load(*a, **k))
    texts = [[f"passage {j} of row {i}, in a few words" for j in range(8)] for i in range(20)]
    rows = [{"src": f"posts {i}", "text": row} for i, row in enumerate(texts)]
    source = hub_folder(tmp_path / "owner" / "name", rows)
    recipe = Recipe.of("revela-paper", group_size=4, held_out=0.1, chunk_words=8)
    folder = build_groups(recipe, [source], tmp_path / "groups", [])
    assert len(asked) == 2  # its first row, and all
    assert len(folder.held_out) == 2 and folder.settings["documents"] == 18
    left = {document.text for document in folder.held_out}
    stored = [[m.text for m in folder.members(range(4 * i, 4 * i + 4))] for i in range(36)]
    kept = [row for row in texts if "\n\n".join(row) not in left]
    assert sorted(stored) == sorted(row[i : i + 4] for row in kept for i in (0, 4))
    assert {m.document for m in folder.rows} == set(range(18))
    assert {m.name for m in folder.rows} == {d.id for d in folder.documents}


@pytest.mark.parametrize(
    "rows", [[{"id": "1", "text": "A document of the usual kind."}], [{"src": "x", "words": ["a"]}]]
)
def test_datasets_of_documents_hold_no_groups(tmp_path, rows):
    assert not holds_groups(hub_folder(tmp_path / "owner" / "name", rows))
    assert not holds_groups(Path("hub:no-one/nothing"))


UNREADABLE = [
    ("nested.jsonl", b"[" * 10**5, "nested.jsonl:1 is neither"),
    (
        "damaged.jsonl.gz",
        gzip.compress(b'["a", "b", "c"]', mtime=0)[:-20] + b"\xff" * 50,
        "damaged",
    ),
    ("latin.jsonl", b'["a", "b", "c"]\n["\xe9", "b", "c"]\n', "latin.jsonl cannot be read"),
    ("damaged.parquet", b"PAR1", "damaged.parquet cannot be read"),
]


@pytest.mark.parametrize(("name", "content", "message"), UNREADABLE)
def test_files_that_cannot_be_read_are_one_sentence(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RevelaError, match=message) as error:
        list(group_members(tmp_path / name, 3))
    assert "\n" not in str(error.value)


def test_a_parquet_file_of_documents_or_with_bad_text_holds_no_groups(tmp_path):
    pq.write_table(pa.table({"text": ["a document"]}), tmp_path / "d.parquet")
    assert not holds_groups(tmp_path / "d.parquet")
    raw = pa.array([b"a", b"b", b"c", b"d", b"\xff\xfe", b"f"], pa.binary())
    texts = pa.Array.from_buffers(pa.string(), 6, raw.buffers())
    groups = pa.ListArray.from_arrays(pa.array([0, 3, 6], pa.int32()), texts)
    pq.write_table(pa.table({"text": groups}), tmp_path / "g.parquet")
    with pytest.raises(RevelaError, match=r"g\.parquet cannot be read \('utf-8' codec"):
        list(group_members(tmp_path / "g.parquet", 3))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_a_file_whose_name_is_no_text_gives_groups(tmp_path):
    path = tmp_path / "caf\udce9.jsonl"
    path.write_text(json.dumps(["a", "b", "c"]))
    assert next(group_members(path, 3)).name == r"caf\xe9.jsonl:1"
