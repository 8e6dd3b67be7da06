"""Files of a stranger: what they hold is a document, or a line of the report; never a traceback,
another file, the memory of this process, or much more memory than they are large.
"""

from __future__ import annotations

import errno
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from revela.corpus import arrow_list
from revela.corpus.read import read_corpus
from revela.corpus.readers import common, read_sources
from revela.corpus.readers.common import ReadReport
from revela.corpus.readers.rows import Fields
from revela.errors import RevelaError
from revela.types import Document

SENTENCE = "A sentence that has more than five words."
FIELDS = Fields("text", "title")
PEAKS = """
import sys
from pathlib import Path
from revela.corpus.readers import File, common, read_file
from revela.corpus.readers.common import ReadReport
from revela.corpus.readers.rows import Fields
common.MAX_BYTES = 2**20
for name in sys.argv[1:]:
    report, path = ReadReport(), Path(name)
    found = read_file(File(path, path.name), Fields("text", "title"), report)
    characters = sum(len(document.text) for document in found)
    status = open("/proc/self/status").read().split()
    print(characters, report.bad, int(status[status.index("VmHWM:") + 1]) // 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_small_files_do_not_fill_the_memory(tmp_path):
    texts = ["word " * 40_000] * 1000
    shared = pa.array(texts[:1] * 1000).dictionary_encode()
    with pa.ipc.new_stream(tmp_path / "shared.arrow", pa.schema([("text", shared.type)])) as sink:
        sink.write_batch(pa.record_batch([shared], ["text"]))
    pq.write_table(pa.table({"text": texts}), tmp_path / "shared.parquet")
    pq.write_table(pa.table({"text": ["word " * 1_600_000] * 100}), tmp_path / "long.parquet")
    pq.write_table(pa.table({"text": [SENTENCE]}), tmp_path / "a.parquet")
    a = b"a" * 100_000_000
    for name, content in {
        "header.csv.gz": a,
        "row.csv.gz": b"text,title\n" + a,
        "attribute.xml.gz": b"<posts><row Body='" + a,
        "posts.xml.gz": b"<posts>" + b"<a/>" * 700_000 + b"</posts>",
    }.items():
        (tmp_path / name).write_bytes(gzip.compress(content, 1))
    names = ["a.parquet", "shared.arrow", "shared.parquet", "header.csv.gz", "row.csv.gz"]
    names += ["attribute.xml.gz", "posts.xml.gz", "long.parquet"]
    command = [sys.executable, "-c", PEAKS, *(str(tmp_path / name) for name in names)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    found = [map(int, line.split()) for line in run.stdout.splitlines()]
    characters, bad, peaks = zip(*found, strict=True)
    assert characters == (len(SENTENCE), 200_000_000, 200_000_000, 0, 0, 0, 0, 0)
    assert bad == (0, 0, 0, 1, 1, 1, 0, 100) and all(
        file.stat().st_size < 2**20 for file in tmp_path.iterdir()
    )
    assert np.diff(peaks).max() < 50, dict(zip(names, peaks, strict=True))


def test_elements_within_elements_are_a_damaged_dump(tmp_path):
    (tmp_path / "Posts.xml").write_bytes(b"<posts>" + b"<a>" * 100_000)
    (tmp_path / "a.txt").write_text(SENTENCE)
    _, report = read_corpus([tmp_path], max_bad_share=0.5)
    assert "elements within elements, no StackExchange Posts.xml" in report.bad_reasons


def test_a_text_that_is_too_long_is_skipped_whatever_the_format(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "MAX_BYTES", 1000)
    pq.write_table(pa.table({"text": ["x " * 5000, SENTENCE]}), tmp_path / "a.parquet")
    documents, report = read_corpus([tmp_path], max_bad_share=0.5)
    assert [d.text for d in documents] == [SENTENCE]
    assert report.examples == {"text over 0 MB": ["a.parquet:1"]}


@pytest.mark.parametrize("offset", [2000, 50_000_000, 1_500_000_000, -1])
@pytest.mark.parametrize("kind", [pa.ipc.new_stream, pa.ipc.new_file])
def test_arrow_offsets_that_point_elsewhere_are_damage(tmp_path, kind, offset):
    """They would read the memory of this process, or end it."""
    path, length = tmp_path / "a.arrow", len(SENTENCE)
    with kind(path, pa.schema([("text", pa.string())])) as sink:
        sink.write_batch(pa.record_batch([pa.array([SENTENCE, SENTENCE])], ["text"]))
    right, wrong = (np.array([0, length, end], "<i4") for end in (2 * length, length + offset))
    content = path.read_bytes()
    assert content.count(right.tobytes()) == 1
    path.write_bytes(content.replace(right.tobytes(), wrong.tobytes()))
    with pytest.raises(RevelaError, match="damaged Arrow file"):
        read_corpus([path])
    if kind is pa.ipc.new_stream:
        with pytest.raises(ValueError):
            arrow_list.read(Document, [path]).validate()


def test_links_out_of_the_folder_are_not_followed(tmp_path):
    (tmp_path / "secret.txt").write_text("what nobody has put into the corpus")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text(SENTENCE)
    (corpus / "inside.txt").symlink_to("a.txt")
    (corpus / "notes.txt").symlink_to(tmp_path / "secret.txt")
    (corpus / "round.txt").symlink_to("round.txt")
    report = ReadReport()
    assert [d.id for d in read_sources([corpus], FIELDS, report)] == ["a.txt", "inside.txt"]
    (line,) = report.lines()[1:]
    assert "link to a file outside of the folder" in line and "corpus/notes.txt" in line
    (tmp_path / "link").symlink_to(corpus)  # who names a link means what it leads to
    assert len(list(read_sources([tmp_path / "link", corpus / "notes.txt"], FIELDS, report))) == 3


def test_files_of_the_hub_s_cache_are_links_and_are_read(tmp_path):
    snapshot = tmp_path / "datasets--a--b" / "snapshots" / "123"
    snapshot.mkdir(parents=True)
    (tmp_path / "datasets--a--b" / "blobs").mkdir()
    (tmp_path / "datasets--a--b" / "blobs" / "f00").write_text(SENTENCE)
    (snapshot / "a.txt").symlink_to("../../blobs/f00")
    assert [d.id for d in read_sources([snapshot], FIELDS, ReadReport())] == ["a.txt"]


def test_folders_may_be_nested_deep(tmp_path):
    deep = "/".join(["d"] * 1100)
    folder = os.open(tmp_path, os.O_RDONLY)
    for _ in range(1100):  # a path may not be as long
        os.mkdir("d", dir_fd=folder)
        folder, above = os.open("d", os.O_RDONLY, dir_fd=folder), folder
        os.close(above)
    Path(f"/proc/self/fd/{folder}/a.txt").write_text(SENTENCE)
    os.close(folder)
    try:
        found = list(read_sources([tmp_path], FIELDS, ReadReport()))
    finally:  # pytest could not remove it
        subprocess.run(["rm", "-r", str(tmp_path / "d")], check=True)
    assert [d.id for d in found] == [f"{deep}/a.txt"]


def test_a_file_whose_path_is_too_long_is_skipped_and_the_others_are_read(tmp_path):
    (tmp_path / "a.txt").write_text(SENTENCE)
    path, folder = tmp_path, os.open(tmp_path, os.O_RDONLY)
    while len(os.fsencode(path)) < 3900:  # of 4096 bytes at most: the folder can be listed
        os.mkdir("d" * 50, dir_fd=folder)
        folder, above = os.open("d" * 50, os.O_RDONLY, dir_fd=folder), folder
        os.close(above)
        path /= "d" * 50
    os.close(os.open("e" * 250 + ".txt", os.O_CREAT, dir_fd=folder))
    os.close(folder)
    report = ReadReport()
    try:
        found = list(read_sources([tmp_path], FIELDS, report))
    finally:  # pytest could not remove it
        subprocess.run(["rm", "-r", str(tmp_path / ("d" * 50))], check=True)
    assert [d.id for d in found] == ["a.txt"] and report.bad == 1
    ((reason, (where,)),) = report.examples.items()
    assert reason == "unreadable, file name too long" and where.endswith("eee.txt")


def test_rows_nested_deeper_than_can_be_written_are_skipped(tmp_path):
    """json.loads goes some levels deeper than json.dumps."""
    nested = ("[" * depth + "]" * depth for depth in range(900, 1010))
    rows = [f'{{"text": "{SENTENCE}", "tags": {value}}}\n' for value in nested]
    (tmp_path / "a.jsonl").write_text("".join(rows) + json.dumps({"text": SENTENCE}))
    fields, report = Fields("text", "title", ("tags",)), ReadReport()
    found = list(read_sources([tmp_path], fields, report))
    assert found[-1].id == f"a.jsonl:{len(rows) + 1}" and len(found) + report.bad == len(rows) + 1
    assert report.bad_reasons <= {"nested too deep", "broken JSON"}


@pytest.mark.skipif(sys.platform == "darwin", reason="file names are UTF-8 there")
def test_names_that_are_not_utf8_are_ids_all_the_same(tmp_path):
    name = os.fsencode(tmp_path) + b"/caf\xe9"
    Path(os.fsdecode(name + b".txt")).write_text(SENTENCE)
    Path(os.fsdecode(name + b".html")).write_text(f"<p>{SENTENCE}</p>")
    documents, _ = read_corpus([tmp_path], distinct=False)
    assert [d.id for d in documents] == [r"caf\xe9.html", r"caf\xe9.txt"]


@pytest.mark.parametrize("charset", ["unicode_escape", "raw_unicode_escape", "undefined", "rot13"])
def test_a_page_with_an_encoding_that_is_none_of_pages_is_skipped(tmp_path, charset):
    page = f"<meta charset={charset}><p>{SENTENCE} \\ud800".encode() + b" \xff</p>"
    (tmp_path / "a.html").write_bytes(page)
    (tmp_path / "b.html").write_bytes(page.replace(charset.encode(), b"windows-1252"))
    documents, report = read_corpus([tmp_path], max_bad_share=0.5)
    assert [d.id for d in documents] == ["b.html"] and "\xff" in documents[0].text
    assert "neither UTF-8 nor the encoding that the page declares" in report.bad_reasons


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_is_no_fault_of_the_corpus(tmp_path, monkeypatch):
    with pytest.raises(RevelaError, match=r"/dev cannot be written .*TMPDIR"):
        arrow_list.write(Document, [Document("a", "text")], Path("/dev/full"))
    write = arrow_list.write
    full = Path("/dev/full")
    monkeypatch.setattr(arrow_list, "write", lambda kind, items, _: write(kind, items, full))
    (tmp_path / "Posts.xml").write_text('<posts><row Id="1" PostTypeId="1" Body="text"/></posts>')
    with pytest.raises(RevelaError, match="cannot be written"):
        read_corpus([tmp_path], max_bad_share=1)


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("opens", ["tempfile.TemporaryDirectory", "pyarrow.OSFile"])
def test_a_disk_that_is_full_before_anything_is_written_is_none_either(
    tmp_path, monkeypatch, opens
):
    (tmp_path / "Posts.xml").write_text('<posts><row Id="1" PostTypeId="1" Body="text"/></posts>')
    monkeypatch.setattr(opens, full)
    with pytest.raises(RevelaError, match=r"cannot be written \(No space left .*TMPDIR"):
        list(read_sources([tmp_path], FIELDS, ReadReport()))


@pytest.mark.parametrize("takes", ["tempfile.TemporaryFile", "os.posix_fallocate"])
def test_vectors_that_the_disk_has_no_room_for_are_one_sentence(monkeypatch, takes):
    monkeypatch.setattr(takes, full, raising=False)
    with pytest.raises(RevelaError, match=r"cannot be written \(No space left .*TMPDIR"):
        arrow_list.vectors_on_disk(2, 3)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_tables_whose_names_are_no_text_are_read(tmp_path):
    table = pa.table({"text": [SENTENCE]})
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as sink:
        sink.write_table(table)
    for ending in ("parquet", "arrow"):
        (tmp_path / f"a.{ending}").rename(tmp_path / f"caf\udce9.{ending}")
    documents, report = read_corpus([tmp_path], distinct=False)
    assert [document.text for document in documents] == [SENTENCE] * 2 and not report.skipped
