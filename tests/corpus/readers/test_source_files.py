"""What holds for every format: folders are searched, changes under the reader are noticed, and one
bad file is no disaster.
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from revela.corpus.load import Reading, read_corpus
from revela.corpus.readers import READERS, read_sources
from revela.corpus.readers.common import ReadReport
from revela.corpus.readers.rows import Fields
from revela.errors import RevelaError

SENTENCE = "A sentence that has more than five words."
FIELDS = Fields("text", "title")


def test_folders_are_searched_in_order_and_without_caches(tmp_path):
    names = ["b/2.txt", "a.txt", "b/10.txt", "b-c.txt", "node_modules/x.txt", ".hidden/x.txt"]
    for name in [*names, "b/.x.txt", "__pycache__/x.py"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{SENTENCE} {name}")
    (tmp_path / "b" / "link").symlink_to(tmp_path)  # round and round, if it were followed
    found = [d.id for d in read_sources([tmp_path], FIELDS, ReadReport())]
    assert found == ["a.txt", "b/10.txt", "b/2.txt", "b-c.txt"]


def test_a_folder_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(SENTENCE)
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def refuse(folder):
        if str(folder).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    documents, report = read_corpus([tmp_path], Reading(max_bad_share=0.5))
    assert len(documents) == 1 and report.bad == 1
    assert report.examples["unreadable, permission denied"] == [str(tmp_path / "closed")]


def write(path: Path, rows: int) -> None:
    texts = [f"{SENTENCE} Number {i}." for i in range(rows)]
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": texts}), path, row_group_size=1000)
    elif path.suffix == ".csv":
        path.write_text("\n".join(["text", *texts]))
    else:
        raw = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".csv", ".parquet"])
@pytest.mark.parametrize("keep", [0, 0.3, 1])
def test_a_file_that_changes_while_it_is_read_is_one_sentence(tmp_path, ending, keep):
    """Truncated, written to, or deleted, whether the rest is still readable or not."""
    path = tmp_path / f"a{ending}"
    write(path, 10_000)
    reading = read_sources([path], FIELDS, ReadReport())
    next(reading)
    if keep:
        os.truncate(path, int(path.stat().st_size * keep))
        os.utime(path, ns=(1, 1))
    else:
        path.unlink()
    with pytest.raises(RevelaError, match=rf"a{ending} changed while it was read: .*run again"):
        list(reading)


def test_one_damaged_file_of_each_kind_costs_nothing_but_itself(tmp_path):
    """Bytes that are no file of any kind, under every ending that a reader claims."""
    for ending in READERS:
        (tmp_path / f"Posts{ending}").write_bytes(b"\x80\x81 \xff no file at all\n\xfe" * 30)
    (tmp_path / "good.txt").write_text(SENTENCE)
    documents, report = read_corpus([tmp_path], Reading(max_bad_share=1.0))
    assert [d.id for d in documents] == ["good.txt"]
    # What looks like a table without a column "text" is left out, and not bad.
    assert report.bad >= len(READERS) - 2


def test_nothing_known_is_said_with_what_is_known(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"x")
    with pytest.raises(RevelaError, match=r"no document found in .*Parquet"):
        read_corpus([tmp_path])
    with pytest.raises(RevelaError, match=r"unknown ending; give a folder.*hub:owner/name"):
        read_corpus([tmp_path / "a.bin"])


def test_files_that_are_not_read_are_counted_by_their_ending(tmp_path):
    names = ["a.xyz", "b.XYZ", "c.png", "Makefile", "d.lock", "e.xml", "f.tar.gz", "g.gz"]
    for name in (
        *names,
        "h.xyz.zst",
        ".hidden.xyz",
        "node_modules/x.xyz",
        "sub/i.xyz",
        "sub/Posts.xml",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("<posts/>")
    (tmp_path / "a.txt").write_text(SENTENCE)
    _, report = read_corpus([tmp_path], Reading(max_bad_share=0))
    assert report.lines()[1:] == [
        "not read: 4 .xyz, 1 with no ending, 1 .png, 1 .lock, 1 .xml, 1 .tar, 1 .gz (no reader)"
    ]
    assert report.documents == 1 and not report.skipped


def test_reports_of_parts_add_up_and_name_ten_endings_at_most():
    both, other = ReadReport(), ReadReport()
    for number in range(14):
        other.leave_unread(Path(f"a.{number:02}"))
    other.leave_unread(Path("b.docx"), "pip install it")
    both.leave_unread(Path("a.13"))
    both.add(other)
    named = ", ".join(f"1 .{number:02}" for number in range(9))
    assert both.lines()[1:] == [
        f"not read: 2 .13, {named}, 4 other endings (no reader); 1 .docx (pip install it)"
    ]


def test_zstd_of_each_format(tmp_path):
    rows = "".join(json.dumps({"text": f"{SENTENCE} {i}."}) + "\n" for i in range(3))
    page = f"<title>T</title><p>{SENTENCE} Page.</p>"
    contents = {"a.jsonl": rows, "b.md": f"{SENTENCE} Text.", "c.html": page}
    contents |= {"d.csv": f"text\n{SENTENCE} Row.", "e.json": rows.splitlines()[0]}
    for name, text in contents.items():
        (tmp_path / f"{name}.zst").write_bytes(pa.compress(text.encode(), "zstd", asbytes=True))
    frames = [pa.compress(line.encode(), "zstd", asbytes=True) for line in rows.splitlines(True)]
    (tmp_path / "f.ndjson.zst").write_bytes(b"".join(frames))
    documents, report = read_corpus([tmp_path], distinct=False)
    assert [d.id for d in documents] == [
        *(f"a.jsonl.zst:{i}" for i in (1, 2, 3)),
        *("b.md.zst", "c.html.zst", "d.csv.zst:2", "e.json.zst"),
        *(f"f.ndjson.zst:{i}" for i in (1, 2, 3)),
    ]
    assert not report.skipped and documents[4].title == "T"


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_packed_file_that_is_cut_or_something_else_is_named(tmp_path, ending):
    rows = "".join(json.dumps({"text": f"{SENTENCE} {i}."}) + "\n" for i in range(9999)).encode()
    whole = gzip.compress(rows) if ending == ".gz" else pa.compress(rows, "zstd", asbytes=True)
    (tmp_path / f"cut.jsonl{ending}").write_bytes(whole[:-30])
    (tmp_path / f"other.jsonl{ending}").write_bytes(b"nothing of the kind")
    _, report = read_corpus([tmp_path], Reading(max_bad_share=1))
    ((reason, places),) = report.examples.items()
    assert reason == "damaged or encrypted .jsonl" and len(places) == 2
    assert places[0].startswith(f"cut.jsonl{ending}: ")
    assert places[1].startswith(f"other.jsonl{ending}: ")
