"""An index and its sources: what is new, has changed or was deleted; after a kill; and what is
not deleted unless one says so.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from letters import Letters, begun, rows_of, wanted_rows

from revela.errors import RevelaError
from revela.searching import sync, table
from revela.searching.index import Index
from revela.searching.ingest import Counts
from revela.searching.server.lifecycle import sync_periodically
from revela.text.load import read_corpus
from revela.text.readers import read_file
from revela.types import Document

TEXTS = {f"d{i}": f"abba{i} cede{i} fade{i} gaga{i} hehe{i}" for i in range(12)}
LATER = {name: text for name, text in TEXTS.items() if name not in ("d1", "d2")} | {
    "d3": "dada dada",
    "d4": "caca caca",
    "new": "bee bee",
}


def as_files(folder: Path, texts: dict[str, str]) -> None:
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.stem not in texts:
            path.unlink()
    for name, text in texts.items():
        if not (file := folder / f"{name}.txt").exists() or file.read_text() != text:
            file.write_text(text)


def rows(texts: dict[str, str]) -> list[dict[str, str]]:
    return [{"_id": name, "text": text} for name, text in texts.items()]


def as_jsonl(folder: Path, texts: dict[str, str]) -> None:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps(row) for row in rows(texts)]
    (folder / "a.jsonl").write_text("\n".join(lines[:6]))
    (folder / "b.jsonl").write_text("\n".join(lines[6:]))


def holds(index: Index, *sources: Path) -> bool:
    """Whether it holds what is in its sources, and nothing else."""
    documents, _ = read_corpus(sources, distinct=False, min_words=1)
    return rows_of(index) == wanted_rows(list(documents))


@pytest.fixture
def synced(tmp_path):
    """A folder of files, and its up-to-date index."""
    as_files(tmp_path / "docs", TEXTS)
    index = begun(tmp_path / "index")
    assert index.sync(tmp_path / "docs") == Counts(new=12)
    index.encoder.seen.clear()
    return index, tmp_path / "docs"


@pytest.mark.parametrize("write", [as_files, as_jsonl])
def test_an_index_follows_its_sources(tmp_path, write):
    docs = tmp_path / "docs"
    write(docs, TEXTS)
    index = begun(tmp_path / "index")
    assert index.sync(docs) == Counts(new=12)
    assert index.sync() == Counts(unchanged=12) == index.sync([docs])
    index.encoder.seen.clear()
    write(docs, LATER)
    assert index.sync() == Counts(new=1, replaced=2, gone=2, unchanged=8)
    assert holds(index, docs) and len(index.encoder.seen) == 3
    assert index.search("abba1", 20, "lexical") == []
    assert Index.open(index.folder).sync() == Counts(unchanged=11)


def test_a_file_is_read_if_its_digest_is_another(synced):
    index, docs = synced
    (docs / "d0.txt").touch()
    before = (docs / "d1.txt").stat()
    (docs / "d1.txt").write_text(TEXTS["d1"].replace("abba1", "dada1"))
    os.utime(docs / "d1.txt", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert index.sync() == Counts(replaced=1, unchanged=11), "it had just been written"
    for path in docs.iterdir():
        os.utime(path, (0, 0))
    assert index.sync() == Counts(unchanged=12)
    (docs / "d2.txt").write_text("bee")
    os.utime(docs / "d2.txt", (0, 0))
    assert index.sync() == Counts(replaced=1, unchanged=11) and holds(index, docs)


@pytest.mark.skipif(os.name != "posix", reason="needs ctime")
@pytest.mark.parametrize("how", ["written", "replaced"])
def test_a_file_of_the_same_size_and_time_is_read_again(synced, monkeypatch, how):
    """As after cp -p, rsync -t or an unpacked archive."""
    index, docs = synced
    monkeypatch.setattr(sync, "FRESH_NS", 0)  # files were written long ago
    (docs / "d0.txt").touch()
    assert index.sync() == Counts(unchanged=12)
    before, text = (docs / "d1.txt").stat(), TEXTS["d1"].replace("abba1", "dada1")
    written = docs / "d1.txt" if how == "written" else docs.parent / "other.txt"
    written.write_text(text)
    os.utime(written, ns=(before.st_atime_ns, before.st_mtime_ns))
    written.replace(docs / "d1.txt")
    after = (docs / "d1.txt").stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert index.sync() == Counts(replaced=1, unchanged=11) and holds(index, docs)


def test_files_beside_an_unreadable_folder_may_go(synced, monkeypatch):
    index, docs = synced
    (docs / "closed").mkdir()
    (docs / "closed/c.txt").write_text("bee bee")
    assert index.sync() == Counts(new=1, unchanged=12)
    scandir = os.scandir

    def refuse(folder):
        if str(folder).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(folder))
        return scandir(folder)

    (docs / "d1.txt").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        assert index.sync() == Counts(gone=1, unchanged=12)
        assert index.sync() == Counts(unchanged=12)
        assert [hit.id for hit in index.search("bee", 5, "lexical")] == ["closed/c.txt"]
    (docs / "closed/c.txt").unlink()
    assert index.sync() == Counts(gone=1, unchanged=11) and holds(index, docs)


def test_rows_give_way_to_files_of_their_id_whichever_comes_first(tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "rows.jsonl").write_text(json.dumps({"_id": "README.md", "text": TEXTS["d1"]}))
    for name in "abc":
        (docs / f"{name}.txt").write_text("bee bee")
    index = begun(tmp_path / "index")
    assert index.sync(docs) == Counts(new=4)
    assert [hit.id for hit in index.search("abba1", 5, "lexical")] == ["README.md"]
    (docs / "README.md").write_text(TEXTS["d2"])
    index.sync()
    assert [hit.id for hit in index.search("abba2", 5, "lexical")] == ["README.md"]
    assert [hit.id for hit in index.search("abba1", 5, "lexical")] == ["rows.jsonl:1"]
    assert index.sync() == Counts(unchanged=5)
    (docs / "README.md").unlink()
    assert index.sync() == Counts(gone=1, unchanged=4)
    assert [hit.id for hit in index.search("abba1", 5, "lexical")] == ["rows.jsonl:1"]
    assert index.search("abba2", 5, "lexical") == []


@pytest.mark.parametrize("left", [0, 6])
def test_what_has_lost_half_stays_unless_one_says_so(synced, tmp_path, left):
    index, docs = synced
    other = tmp_path / "other.txt"
    other.write_text("bee")
    index.sync([docs, other])
    as_files(docs, dict(list(TEXTS.items())[:left]))
    with pytest.raises(RevelaError, match=f"lost {12 - left} of its 12 documents.*--sync --yes"):
        index.sync()
    assert len(rows_of(index)) == 25
    assert index.sync(yes=True) == Counts(gone=12 - left, unchanged=left + 1)
    assert holds(index, docs, other)


def test_what_others_changed_is_read_again_and_what_they_added_stays(synced):
    index, _ = synced
    index.delete(["d3.txt"])
    added = Document("added", "bee")
    index.add([added])
    assert index.sync() == Counts(new=1, unchanged=11)
    assert {*rows_of(index)} >= {*wanted_rows([added])}
    assert index.sync() == Counts(unchanged=12)


def test_documents_that_move_to_another_file_are_not_encoded_again(tmp_path):
    docs = tmp_path / "docs"
    as_jsonl(docs, TEXTS)
    index = begun(tmp_path / "index")
    index.sync(docs)
    index.encoder.seen.clear()
    (docs / "a.jsonl").rename(docs / "c.jsonl")
    assert index.sync() == Counts(unchanged=12) and not index.encoder.seen
    (docs / "d.jsonl").write_text(json.dumps({"_id": "d3", "text": "other"}))
    assert index.sync() == Counts(new=1, unchanged=12)
    assert {"d3", "d.jsonl:1"} <= {hit.id for hit in index.search("other", 99)}
    (docs / "d.jsonl").write_text(json.dumps({"_id": "d3", "text": "other than before"}))
    assert index.sync() == Counts(replaced=1, unchanged=12)


def test_documents_of_what_cannot_be_read_stay(tmp_path):
    docs = tmp_path / "docs"
    as_jsonl(docs, TEXTS)
    index = begun(tmp_path / "index")
    index.sync(docs)
    whole = (docs / "a.jsonl").read_text()
    (docs / "a.jsonl").write_text(whole[:-5])
    (docs / "new.txt").write_text("a new file is found all the same")
    assert index.sync() == Counts(new=1, unchanged=12)
    (docs / "new.txt").unlink()
    as_jsonl(docs, LATER)
    assert index.sync() == Counts(new=1, replaced=2, gone=3, unchanged=8) and holds(index, docs)


def test_an_index_that_does_not_know_its_sources_says_so(tmp_path):
    index = begun(tmp_path / "index")
    index.add([Document("a", "bee")])
    with pytest.raises(RevelaError, match="has no record of its sources"):
        index.sync()
    with (
        pytest.raises(RevelaError, match="has no record of its sources"),
        sync_periodically(index, 60),
    ):
        pass
    with pytest.raises(RevelaError, match="does not exist"):
        index.sync(tmp_path / "none")


def test_files_are_read_again_by_newer_readers_which_say_so(synced, monkeypatch, caplog):
    index, _ = synced
    caplog.set_level("INFO")
    assert index.sync() == Counts(unchanged=12) and "earlier version" not in caplog.text
    monkeypatch.setattr(sync, "VERSION", sync.VERSION + 1)
    read = []

    def newer(file, fields, report):
        read.append(file.name)
        text = file.path.read_text().replace("abba3", "bullet points")
        yield from (replace(one, text=text) for one in read_file(file, fields, report))

    with monkeypatch.context() as patch:
        patch.setattr("revela.searching.sync.read_file", newer)
        assert index.sync() == Counts(replaced=1, unchanged=11)
    assert len(read) == 12 and "file readers of an earlier version" in caplog.text
    assert index.search("bullet", 1, "lexical")[0].id == "d3.txt"
    caplog.clear()
    assert index.sync() == Counts(unchanged=12) and not caplog.text


def test_what_was_measured_in_an_earlier_way_is_measured_again(synced):
    index, _ = synced
    wanted = index.calibration
    former = replace(index.info, calibration=replace(wanted, version=1, words=77))
    index.state.commit(index.table.number, info=former)
    older = Index.open(index.folder, encoder=Letters())
    assert older.calibration.words == 77 and older.sync() == Counts(unchanged=12)
    assert older.calibration == wanted == Index.open(index.folder).calibration
    version = older.table.version
    assert older.sync() == Counts(unchanged=12) and older.table.version == version


def test_what_is_gone_after_a_kill_is_deleted(synced, monkeypatch):
    """Files that a killed run had begun to read, and that were deleted before the next one."""
    index, docs = synced
    (docs / "d1.txt").write_text("dada")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(table.Table, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        index.sync()
    (docs / "d1.txt").unlink()
    assert index.sync() == Counts(gone=1, unchanged=11) and holds(index, docs)
