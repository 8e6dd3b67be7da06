"""Every write of an index, killed before, within and after it, with a full disk, or beside others
that read and write: the index opens and is one version or the next, and the same command again
gives what it gives alone.
"""

from __future__ import annotations

import errno
import shutil
import sqlite3
from contextlib import contextmanager
from pathlib import Path

import pytest
from lancedb.db import LanceDBConnection
from lancedb.table import LanceTable
from letters import begun, counts_of, documents, reopen, rows_of

from revela.errors import RevelaError
from revela.ranking.bm25 import TermCounts
from revela.searching import state
from revela.searching.index import Index
from revela.searching.state import State, is_index, read_info
from revela.searching.table import lance_errors
from revela.text.analyzer import searched
from revela.types import Document
from tests.text.test_language import HOMES, NOTE

DOCS = documents(14)
CHANGED = [Document("d3", "hhhh abba."), Document("d5", DOCS[5].text + " gggg.", DOCS[5].title)]
# All that changes a table, and the state.
LANCE = [
    *((LanceTable, name) for name in ("add", "delete", "restore", "create_index", "optimize")),
    (LanceDBConnection, "create_table"),
]
QUERIES = ["abba abab hhhh", "title gggg", "дом Казани построен"]


FULL = OSError(errno.ENOSPC, "No space left on device (os error 28)")
FULL_DATABASE = sqlite3.OperationalError("database or disk is full")


class Killed(BaseException):
    pass


class Writes:
    """Counts all writes, and ends one of them: it fails as on a full disk before anything is
    written; or the process ends after it, or within it if it is a transaction. Or ``look`` is
    called after and within each.
    """

    def __init__(self, monkeypatch):
        self.count, self.at, self.how, self.look = 0, 0, "", None
        for kind, name in LANCE:
            monkeypatch.setattr(kind, name, self.around(getattr(kind, name)))
        monkeypatch.setattr(state, "atomic_write", self.within(state.atomic_write))
        monkeypatch.setattr(State, "_transaction", self.within(State._transaction))

    def point(self, how: str, error: BaseException) -> None:
        self.count += how == self.how
        if how == self.how and self.count == self.at:
            raise error
        if how == "killed" and self.look:
            look, self.look = self.look, None  # what looks may write too
            look()
            self.look = look

    def around(self, write):
        def writes(*given, **named):
            self.point("full", FULL)
            done = write(*given, **named)
            self.point("killed", Killed())
            return done

        return writes

    def within(self, open_write):
        @contextmanager
        def writes(*given):
            with open_write(*given) as opened:
                yield opened
                if given[1:] != ("deferred",):  # which only reads
                    self.point("full", FULL if isinstance(given[0], Path) else FULL_DATABASE)
                    self.point("killed", Killed())
            if given[1:] != ("deferred",):
                self.point("killed", Killed())

        return writes

    @contextmanager
    def ending(self, at: int, how: str):
        self.count, self.at, self.how = 0, at, how
        try:
            yield
        finally:
            self.how = ""


def opened(folder: Path) -> Index:
    return reopen(folder) if is_finished(folder) else begun(folder)


def is_finished(folder: Path) -> bool:
    return is_index(folder) and read_info(folder).finished


def add(docs):
    def run(place: Path) -> None:
        opened(place / "index").add(docs)

    return run


def delete(place: Path) -> None:
    index = reopen(place / "index")
    left = {name for name, *_ in rows_of(index)}
    index.delete({"d2", "d4"} & left)


def write_files(folder: Path, docs) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for document in docs:
        (folder / f"{document.id}.txt").write_text(document.text, encoding="utf-8")


def sync(docs, yes=False):
    def run(place: Path) -> None:
        write_files(place.parent / "docs", docs)
        opened(place / "index").sync(place.parent / "docs", yes=yes)

    return run


COMMANDS = {
    "index": (lambda place: None, add(DOCS[:8])),
    "append": (add(DOCS[:6]), add([*CHANGED, *DOCS[8:12]])),
    "append again in another language": (add([NOTE]), add(HOMES[:5])),
    "delete": (add(DOCS[:8]), delete),
    "sync": (sync(DOCS[:6]), sync([*CHANGED[:1], *DOCS[3:10]], yes=True)),
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr("revela.searching.ingest.BATCH", 150)  # a few commits
    monkeypatch.setattr("revela.searching.sync.FRESH_NS", 0)


@pytest.fixture
def writes(monkeypatch):
    return Writes(monkeypatch)


def all_of(index: Index) -> list[dict[str, object]]:
    with lance_errors(index.folder):
        return index.table.lance.search().limit(10**4).to_list()


def assert_true(index: Index) -> None:
    """The counts are those of its rows, and every row is there once."""
    rows = index._retried(lambda: all_of(index))
    assert (
        len({(row["id"], row["chunk"]) for row in rows})
        == len(rows)
        == index.state.snapshot().chunks
    )
    counts = TermCounts.of(row["terms"].split() for row in rows)
    wanted = dict(zip(state._signed(counts.hashes), counts.counts.tolist(), strict=True))
    assert counts_of(index.state) == wanted
    analyze = index.info.analyzer()
    for row in rows:
        assert row["terms"] == " ".join(analyze(searched(row["id"], row["passage"])))
    for document in {row["id"] for row in rows}:
        own = [row for row in rows if row["id"] == document]
        assert len({row["digest"] for row in own}) == 1
        assert len(own) == 1 + max(row["chunk"] for row in own)
    for query in QUERIES:
        for hit in index.search(query, 20, explain=True):
            assert hit.score <= 1 and (hit.explanation.words or 0) <= 1


def contents(index: Index) -> tuple[list, list[dict[str, float]]]:
    """Rows, manifest and counts; and the scores of what queries find."""
    ways = [(query, mode) for query in QUERIES for mode in ("hybrid", "lexical", "dense")]
    scores = [{h.id: h.score for h in index.search(query, 20, mode)} for query, mode in ways]
    return [rows_of(index), index.info, counts_of(index.state)], scores


def assert_holds(index: Index, wanted: tuple[list, list[dict[str, float]]]) -> None:
    kept, scores = contents(index)
    assert kept == wanted[0] and scores == [pytest.approx(w, rel=1e-4) for w in wanted[1]]


@pytest.mark.parametrize("how", ["killed", "full"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_ends_at_any_write_is_finished_by_the_next(tmp_path, writes, name, how):
    prepare, run = COMMANDS[name]
    start, alone = tmp_path / "start", tmp_path / "alone"
    start.mkdir()
    prepare(start)
    shutil.copytree(start, alone)
    run(alone)
    made = reopen(alone / "index")
    assert_true(made)
    wanted = contents(made)
    for at in range(1, 1000):
        place = tmp_path / str(at)
        shutil.copytree(start, place)
        reader = None
        if is_index(place / "index"):
            reader = reopen(place / "index")
            before = rows_of(reader)
        try:
            with writes.ending(at, how):
                run(place)
        except (Killed, RevelaError) as error:
            assert how == "killed" or "full" in str(error) or "make room" in str(error)
        if writes.count < at:
            break
        if reader is not None:
            again = reopen(place / "index")
            for index in (reader, again):
                assert_true(index)
            assert rows_of(reader) == rows_of(again)
            if "sync" not in name and "append" not in name:
                assert rows_of(reader) in (before, rows_of(made))
        run(place)
        for index in (opened(place / "index"), *([reader] if reader else [])):
            assert_true(index)
            assert_holds(index, wanted)
        version = Index.open(place / "index").table.number
        if name != "delete":
            run(place)
            assert Index.open(place / "index").table.number == version, "nothing is left to do"
        shutil.rmtree(place)
    assert at > 5


@pytest.mark.parametrize("name", COMMANDS)
def test_others_beside_any_write_are_refused_or_read_one_whole_version(tmp_path, writes, name):
    prepare, run = COMMANDS[name]
    alone, place = tmp_path / "alone", tmp_path / "place"
    place.mkdir()
    prepare(place)
    shutil.copytree(place, alone)
    run(alone)
    folder, looks = place / "index", []
    readers = [reopen(folder)] if is_index(folder) else []

    def look():
        looks.append(folder)
        for change in (add(DOCS[:1]), delete, lambda place: opened(place / "index").sync(place)):
            with pytest.raises(RevelaError, match=r"another process|not finished|is not an index"):
                change(place)
        if is_index(folder) and read_info(folder).finished:
            for index in (reopen(folder), *readers):
                assert_true(index)

    writes.look = look
    run(place)
    writes.look = None
    wanted = contents(reopen(alone / "index"))
    assert_holds(reopen(folder), wanted)
    assert len(looks) > 3
