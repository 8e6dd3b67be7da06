"""Groups that are ready, in a file and in a dataset of the hub (a local folder that the datasets
library streams the same way).
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from revela.corpus.readers import common
from revela.errors import RevelaError
from revela.groups.ready import group_documents, group_rows, holds_groups, read_groups

LINES = [["a", "b", "c"], {"src": "posts", "text": ["d", "e", "f", "g"]}, ["h", "i", "j"]]


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz"])
def test_groups_of_a_file_are_read(tmp_path, ending):
    path = tmp_path / f"corpus.{ending}"
    text = ("\n".join(map(json.dumps, LINES)) + "\n\n").encode()
    path.write_bytes(gzip.compress(text) if ending.endswith("gz") else text)
    assert holds_groups(path)
    assert [d.id for d in group_documents(path, 3)] == [
        f"{path.name}:1",
        "posts:2",
        f"{path.name}:3",
    ]
    rows = list(group_rows(path, 3, frozenset({"posts:2"})))
    assert [row.text for row in rows] == list("abchij") and [row.document for row in rows] == [
        0,
        0,
        0,
        1,
        1,
        1,
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["a", "b"], ":4 has 2 texts, fewer than a group of 3"),
        (["a", "b", 3], ":4 is neither a list of texts"),
        ({"text": ["a", "b", "c"]}, ":4 is neither"),
        ("abc", ":4 is neither"),
    ],
)
def test_lines_that_are_no_groups_are_named(tmp_path, line, message):
    path = tmp_path / "c.jsonl"
    path.write_text("\n".join(map(json.dumps, [*LINES, line])))
    with pytest.raises(RevelaError, match=message):
        list(group_documents(path, 3))


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
    assert [d.id for d in group_documents(source, 4)][-1] == "posts 599:600" and len(
        list(group_rows(source, 4, frozenset()))
    ) == 2400
    assert asked and all(
        settings["streaming"] and settings["split"] == "train" for settings in asked
    )
    with pytest.raises(
        RevelaError, match=r"owner/name:1 has 4 texts, fewer than a group of 5: lower --group-size"
    ):
        list(read_groups(source, 5))


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
        "long.jsonl": b'["' + b"a" * 10**6,
    }
    monkeypatch.setattr(common, "MAX_BYTES", 10**5)
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        assert not holds_groups(tmp_path / name)
        with pytest.raises(RevelaError, match=name):
            list(read_groups(tmp_path / name, 3))
