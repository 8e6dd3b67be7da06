"""Files of a stranger: what they hold is a document, or a line of the report; never a traceback,
another file, or the memory of this process.
"""

from __future__ import annotations

import errno
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import SENTENCE
from revela.errors import RevelaError
from revela.text import spool
from revela.text.load import read_corpus
from revela.text.readers import common, read_sources
from revela.text.readers.common import ReadReport
from revela.text.readers.rows import Fields
from revela.types import Document

FIELDS = Fields("text", "title")


def test_a_text_that_is_too_long_is_skipped_whatever_the_format(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "MAX_BYTES", 1000)
    pq.write_table(pa.table({"text": ["x " * 5000, SENTENCE]}), tmp_path / "a.parquet")
    documents, report = read_corpus([tmp_path], max_bad_share=0.5)
    assert [d.text for d in documents] == [SENTENCE]
    assert report.examples == {"text over 0 MB": ["a.parquet:1"]}


@pytest.mark.parametrize("offset", [2000, 1_500_000_000, -1])
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
    with pytest.raises(RevelaError, match=r"damaged or encrypted \.arrow \(a\.arrow"):
        read_corpus([path])


def test_links_out_of_the_folder_are_not_followed(tmp_path):
    (tmp_path / "secret.txt").write_text("what nobody has put into the corpus")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text(SENTENCE)
    (corpus / "inside.txt").symlink_to("a.txt")
    (corpus / "notes.txt").symlink_to(tmp_path / "secret.txt")
    (corpus / "round.txt").symlink_to("round.txt")
    (corpus / "broken.txt").symlink_to(tmp_path / "nowhere.txt")
    report = ReadReport()
    assert [d.id for d in read_sources([corpus], FIELDS, report)] == ["a.txt", "inside.txt"]
    (line,) = [line for line in report.lines() if "link to a file outside of the folder" in line]
    assert "corpus/notes.txt" in line and "broken" not in line
    assert any("broken link (" in line and "broken.txt" in line for line in report.lines())
    (tmp_path / "link").symlink_to(corpus)  # who names a link means what it leads to
    assert len(list(read_sources([tmp_path / "link", corpus / "notes.txt"], FIELDS, report))) == 3


def test_files_of_the_hub_s_cache_are_links_and_are_read(tmp_path):
    snapshot = tmp_path / "datasets--a--b" / "snapshots" / "123"
    snapshot.mkdir(parents=True)
    (tmp_path / "datasets--a--b" / "blobs").mkdir()
    (tmp_path / "datasets--a--b" / "blobs" / "f00").write_text(SENTENCE)
    (snapshot / "a.txt").symlink_to("../../blobs/f00")
    assert [d.id for d in read_sources([snapshot], FIELDS, ReadReport())] == ["a.txt"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_names_that_are_not_utf8_are_ids_all_the_same(tmp_path):
    table = pa.table({"text": [SENTENCE]})
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as sink:
        sink.write_table(table)
    (tmp_path / "a.txt").write_text(SENTENCE)
    (tmp_path / "a.html").write_text(f"<p>{SENTENCE}</p>")
    (tmp_path / "a.txt.zst").write_bytes(pa.compress(SENTENCE.encode(), "zstd", asbytes=True))
    for path in sorted(tmp_path.iterdir()):
        path.rename(path.with_name(path.name.replace("a.", "caf\udce9.", 1)))
    documents, report = read_corpus([tmp_path], distinct=False)
    assert [d.id.split(":")[0] for d in documents] == [
        rf"caf\xe9.{ending}" for ending in ("arrow", "html", "parquet", "txt", "txt.zst")
    ]
    assert {d.text for d in documents} == {SENTENCE} and not report.skipped


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_is_no_fault_of_the_corpus(tmp_path, monkeypatch):
    with pytest.raises(RevelaError, match=r"/dev cannot be written .*TMPDIR"):
        spool.write(Document, [Document("a", "text")], Path("/dev/full"))
    write, full = spool.write, Path("/dev/full")
    monkeypatch.setattr(spool, "write", lambda kind, items, _: write(kind, items, full))
    (tmp_path / "a.txt").write_text(SENTENCE)
    with pytest.raises(RevelaError, match="cannot be written"):
        read_corpus([tmp_path], max_bad_share=1)


@pytest.mark.parametrize(
    "takes", ["tempfile.TemporaryDirectory", "tempfile.TemporaryFile", "os.posix_fallocate"]
)
def test_a_disk_that_is_full_before_anything_is_written_is_one_sentence(monkeypatch, takes):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(takes, full, raising=False)
    with pytest.raises(RevelaError, match=r"cannot be written \(No space left .*TMPDIR"):
        spool.arrow_list(Document, [])
        spool.vectors_on_disk(2, 3)
