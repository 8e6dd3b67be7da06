"""A folder of many formats: what workers read of it, and headings of Markdown in an index."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import pyarrow as pa
import pytest

sys.path.append(str(Path(__file__).parents[1] / "corpus" / "readers"))
from letters import build, extend, rows_of

from revela.text.parts import DocumentReader, parts_of
from revela.text.readers import read_sources
from revela.text.readers.common import ReadReport
from revela.text.readers.rows import Fields
from revela.types import Document
from tests.text.readers.test_office import docx

FILLER = "Much is said before the end of it comes. " * 30


@pytest.fixture
def folder(tmp_path):
    docx(tmp_path / "a.docx", "# Guide", FILLER, "The last word is zebra.")
    whole = (tmp_path / "a.docx").read_bytes()
    (tmp_path / "b.docx").write_bytes(whole[: len(whole) // 2])
    rows = [{"text": f"{FILLER} A narwhal."}, {"text": f"{FILLER} An okapi."}]
    (tmp_path / "f.json").write_text(json.dumps(rows))
    (tmp_path / "g.json").write_text('{"some": "settings"}')
    (tmp_path / "i.md").write_text(f"# Guide\n\n{FILLER}\n\n## Install\n\n{FILLER}\n\nAn axolotl.")
    packed = pa.compress(json.dumps({"text": f"{FILLER} An ibex."}).encode(), "zstd", asbytes=True)
    (tmp_path / "j.jsonl.zst").write_bytes(packed)
    (tmp_path / "l.xyz").write_text(FILLER)
    (tmp_path / "m.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    return tmp_path


def test_workers_read_the_same_and_name_the_same(folder):
    here, there = ReadReport(), ReadReport()
    fields = Fields("text", "title")
    whole = list(read_sources([folder], fields, here))
    parts, reader = parts_of([folder], there, size=1), DocumentReader(fields)
    assert len(parts) > 5
    read = []
    for part in parts:
        report = ReadReport()
        sent = pickle.loads(pickle.dumps((reader, part)))
        read += sent[0].documents(sent[1], report)
        there.add(pickle.loads(pickle.dumps(report)))
    assert read == whole
    assert there.unread == here.unread and there.skipped == here.skipped and there.unread


def test_headings_are_titles_of_rows_and_no_part_of_their_texts(tmp_path):
    docs = [Document("a.md", "# abc\n\nabcd efgh.\n\n## def\n\nefgh abcd.", "hhh")]
    index = build(tmp_path / "index", docs)
    assert rows_of(index) == [
        ("a.md", 0, "hhh # abc\n\n"),
        ("a.md", 1, "hhh > abc abcd efgh.\n\n"),
        ("a.md", 2, "hhh > abc ## def\n\n"),
        ("a.md", 3, "hhh > abc > def efgh abcd."),
    ]
    (hit,) = index.search("def efgh", 1)
    assert hit.title in ("hhh > abc > def", "hhh > abc") and not hit.text.startswith(("hhh", ">"))
    assert extend(index, docs).unchanged == 1
