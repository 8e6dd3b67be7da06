"""Groups that are ready, in a file and in a dataset of the hub (a local folder that the datasets
library streams the same way).
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from revela.corpus.arrow_list import arrow_list
from revela.corpus.readers import common
from revela.errors import RevelaError
from revela.groups.corpora import build_groups
from revela.groups.folder import Member
from revela.groups.ready import group_members, holds_groups, read_groups
from revela.settings import Recipe

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


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["a", "b"], ":4 has 2 texts, fewer than a group of 3"),
        (["a", "b", 3], ":4 is neither a list of texts"),
        ({"text": ["a", "b", "c"]}, ":4 is neither"),
        ("abc", ":4 is neither"),
        (["\ud800 a", "b", "c"], r":4 is not Unicode \(half of a surrogate pair\): mend that line"),
        ({"src": "\ud800", "text": ["a", "b", "c"]}, ":4 is not Unicode"),
    ],
)
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
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Path(f"hub:{folder}")


def test_groups_of_the_hub_are_streamed(tmp_path, monkeypatch):
    import datasets

    asked = []
    load = datasets.load_dataset

    def noting(*arguments, **settings):
        asked.append(settings)
        return load(*arguments, **settings)

    monkeypatch.setattr(datasets, "load_dataset", noting)
    rows = [{"src": f"posts {i}", "text": [f"{i} {j}" for j in range(4)]} for i in range(600)]
    source = hub_folder(tmp_path / "owner" / "name", rows)
    assert holds_groups(source)
    assert list(read_groups(source, 3)) == [
        (f"posts {i}:{i + 1}", row["text"][:3]) for i, row in enumerate(rows)
    ]
    members = list(group_members(source, 4))
    assert members[-1].name == "posts 599:600" and len(members) == 2400
    assert asked and all(
        settings["streaming"] and settings["split"] == "train" for settings in asked
    )
    with pytest.raises(
        RevelaError, match=r"owner/name:1 has 4 texts, fewer than a group of 5: lower --group-size"
    ):
        list(read_groups(source, 5))


@pytest.mark.parametrize("ready", [True, False])
def test_a_dataset_of_the_hub_is_streamed_once(tmp_path, monkeypatch, ready):
    import datasets

    asked, load = [], datasets.load_dataset
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *a, **named: asked.append(a) or load(*a, **named)
    )
    texts = [[f"passage {j} of row {i}, in a few words" for j in range(4)] for i in range(20)]
    rows = [
        {"src": f"posts {i}", "text": row if ready else " ".join(row)}
        for i, row in enumerate(texts)
    ]
    source = hub_folder(tmp_path / "owner" / "name", rows)
    recipe = Recipe.of("paper", group_size=4, held_out=0.1, chunk_words=8)
    folder = build_groups(recipe, [source], tmp_path / "groups", [], None)
    assert len(asked) == 2  # its first row, and all
    assert len(folder.held_out) == 2 and folder.settings["documents"] == 18
    if ready:
        left = {document.text for document in folder.held_out}
        stored = [[m.text for m in folder.members(range(4 * i, 4 * i + 4))] for i in range(18)]
        assert sorted(stored) == sorted(row for row in texts if "\n\n".join(row) not in left)
        assert {m.name for m in folder.rows} == {d.id for d in folder.documents}


@pytest.mark.parametrize(
    "rows", [[{"id": "1", "text": "A document of the usual kind."}], [{"src": "x", "words": ["a"]}]]
)
def test_datasets_of_documents_hold_no_groups(tmp_path, rows):
    assert not holds_groups(hub_folder(tmp_path / "owner" / "name", rows))
    assert not holds_groups(Path("hub:no-one/nothing"))


def test_files_that_no_reader_can_read_hold_no_groups_and_are_one_sentence(tmp_path, monkeypatch):
    whole = gzip.compress(json.dumps(["a" * 9] * 10**5).encode() + b"\n")
    contents = {
        "nested.jsonl": b"[" * 10**5,
        "damaged.jsonl.gz": whole[:200] + b"\xff" * 50 + whole[250:],
        "long.jsonl": json.dumps(["a" * 10**6, "b", "c"]).encode(),
        "latin.jsonl": json.dumps(["a", "b", "c"]).encode() + b'\n["\xe9", "b", "c"]\n',
    }
    messages = {
        "long.jsonl": r"long\.jsonl cannot be read after line 0 \(line over 0 MB",
        "latin.jsonl": r"latin\.jsonl cannot be read after line 0 \('utf-8' codec .*: mend what",
    }
    monkeypatch.setattr(common, "MAX_BYTES", 10**5)
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        assert not holds_groups(tmp_path / name)
        with pytest.raises(RevelaError, match=messages.get(name, name)):
            list(read_groups(tmp_path / name, 3))


def test_a_parquet_file_with_a_text_that_is_not_utf8_is_one_sentence(tmp_path):
    raw = pa.array([b"a", b"b", b"c", b"d", b"\xff\xfe", b"f"], pa.binary())
    texts = pa.Array.from_buffers(pa.string(), 6, raw.buffers())
    groups = pa.ListArray.from_arrays(pa.array([0, 3, 6], pa.int32()), texts)
    pq.write_table(pa.table({"text": groups}), tmp_path / "g.parquet")
    with pytest.raises(RevelaError, match=r"g\.parquet cannot be read after row 1 \('utf-8' codec"):
        list(read_groups(tmp_path / "g.parquet", 3))


def test_a_group_of_parquet_that_is_too_large_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "MAX_BYTES", 10**5)
    rows = [["a", "b", "c"], ["a" * 6 * 10**4] * 2]
    pq.write_table(pa.table({"text": rows}), tmp_path / "g.parquet")
    with pytest.raises(RevelaError, match=r"after row 1 \(a group over 0 MB\): mend what follows"):
        list(read_groups(tmp_path / "g.parquet", 1))


PEAKS = """
import sys
from pathlib import Path
from revela.groups.ready import read_groups
for name in sys.argv[1:]:
    count = sum(1 for _ in read_groups(Path(name), 3))
    status = open("/proc/self/status").read().split()
    print(count, int(status[status.index("VmHWM:") + 1]) // 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_a_small_parquet_file_of_long_groups_does_not_fill_the_memory(tmp_path):
    pq.write_table(pa.table({"text": [["a", "b", "c"]]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": [["word " * 200_000] * 3] * 128}), tmp_path / "b.parquet")
    assert (tmp_path / "b.parquet").stat().st_size < 10**5
    command = [sys.executable, "-c", PEAKS, tmp_path / "a.parquet", tmp_path / "b.parquet"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    (_, before), (count, after) = (map(int, line.split()) for line in run.stdout.splitlines())
    assert count == 128 and after < before + 80, f"{before} MB -> {after} MB"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_a_file_whose_name_is_no_text_gives_groups(tmp_path):
    path = tmp_path / "caf\udce9.jsonl"
    path.write_text(json.dumps(["a", "b", "c"]))
    assert (
        next(row.name for row in arrow_list(Member, group_members(path, 3))) == r"caf\xe9.jsonl:1"
    )
