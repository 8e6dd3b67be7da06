"""The state of an index, in one SQLite file beside its table: what made it, which version of the
table it describes, how many chunks hold each term, and which files and documents were read.

The table is changed first, and then, in one transaction, the state, with the new version in it.
Other processes read the version that the state names, so the transaction makes a change visible. A
kill before it leaves the index as it was; the next change undoes the table's (changes.py).
"""

from __future__ import annotations

import json
import sqlite3
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from revela.errors import RevelaError
from revela.files import LOCK, atomic_write, check_free, hidden_prefix
from revela.ranking.bm25 import TermCounts, idf
from revela.searching.manifest import Info
from revela.types import hash64

STATE = "state.sqlite"
FORMAT = 13
COMMIT = 100  # minimum chunks that a commit counts as: each of its files takes 0.3 ms of a search
# A document without a path is no longer in a file, and will be deleted.
TABLES = f"""
pragma user_version = {FORMAT};
create table about (version integer, chunks integer, changed integer, info text, sources text);
create table terms (hash integer primary key, n integer);
create table files (
    path text primary key, source text, size integer, mtime_ns integer, digest text
) without rowid;
create table documents (id text primary key, path text) without rowid;
create index document_paths on documents (path);
"""
# The documents of a run, and the files that were read or are gone. No document of a file that was
# not read to the end counts as gone.
RUN_TABLES = (
    "drop table if exists now",
    "create temp table now (id text primary key, path text) without rowid",
    "create index temp.now_paths on now (path)",
    "drop table if exists touched",
    "create temp table touched (path text primary key, whole integer) without rowid",
)
GONE = "path in (select path from touched where whole) and id not in (select id from now)"
COUNT = "insert into terms values (?, ?) on conflict do update set n = n + excluded.n"


class Snapshot(NamedTuple):
    """The state at a moment: version of the table, number of chunks, number of chunks changed since
    the table was packed, and ``Info`` in JSON.
    """

    version: int
    chunks: int
    changed: int
    info: str


class StaleSnapshot(KeyError):
    """The index was changed after this snapshot was opened."""


class FileState(NamedTuple):
    """A file as it was read.

    Attributes:
        path: begins with its source.
        size, mtime_ns: bytes, and the time of its last change (-1: compare its digest).
        documents: their number, if it was read in this run.
        whole: it was read to the end.
    """

    path: str
    source: str
    size: int
    mtime_ns: int
    digest: str
    documents: int = 0
    whole: bool = True


class Loss(NamedTuple):
    """Documents that a source has lost.

    Attributes:
        documents: number of documents that it had.
        gone: number of documents that are gone.
        untouched: number of documents in files that were not read again.
    """

    source: str
    documents: int
    gone: int
    untouched: int


class State:
    """The state of the index in a folder. Threads may share it.

    Raises:
        RevelaError: the folder is not an index, or one of another version, or the file is damaged,
            out of reach, or cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._lock = folder, threading.RLock()
        file = folder / STATE
        if not file.is_file():
            raise RevelaError(
                f"{folder} is not an index: it has no {STATE}; make one with revela index"
            )
        with _errors(self.folder):
            # A folder without write access can still be read.
            uri = f"{file.resolve().as_uri()}?mode=rw"
            self._database = sqlite3.connect(
                uri, uri=True, timeout=60, isolation_level=None, check_same_thread=False
            )
            self.close = weakref.finalize(self, self._database.close)
            # Readers do not wait for a long transaction before its commit.
            self._database.execute("pragma cache_spill = off")
            (found,) = self._database.execute("pragma user_version").fetchone()
        if found != FORMAT:
            raise RevelaError(
                f"{folder} was made by another version of revela: make it again with revela index"
            )

    @staticmethod
    def create(folder: Path, info: Info) -> None:
        """Write the state of an index whose table is not there yet: of version 0."""
        with (
            atomic_write(folder / STATE) as temporary,
            _errors(folder),
            closing(sqlite3.connect(temporary)) as made,
        ):
            made.executescript(TABLES)
            made.execute("insert into about values (0, 0, 0, ?, '{}')", (info.to_json(),))
            made.commit()

    @contextmanager
    def _transaction(self, kind: str = "immediate") -> Iterator[sqlite3.Connection]:
        """A transaction: reads see one moment, and writes take effect together at the end."""
        with self._lock, _errors(self.folder), self._database as database:  # commits or rolls back
            database.execute(f"begin {kind}")
            yield database

    # Read

    def _read(self, sql: str, *given: str | int) -> list[tuple[Any, ...]]:
        """The rows that a query gives."""
        with self._lock, _errors(self.folder):
            rows: list[tuple[Any, ...]] = self._database.execute(sql, given).fetchall()
            return rows

    def snapshot(self) -> Snapshot:
        """The current state, which any process may have changed."""
        return Snapshot(*self._read("select version, chunks, changed, info from about")[0])

    @property
    def info(self) -> Info:
        """The manifest."""
        return Info.from_json(self.snapshot().info)

    def idf(self, terms: Sequence[str], version: int | None = None) -> NDArray[np.float64]:
        """The idf of terms, (T,); StaleSnapshot if the state's version is not ``version``."""
        hashes = _signed(np.array([hash64(term) for term in terms], np.uint64))
        with self._transaction("deferred"):
            now = self.snapshot()
            if version not in (None, now.version):
                raise StaleSnapshot(version)
            found = [self._read("select n from terms where hash = ?", term) for term in hashes]
        counts = np.array([rows[0][0] if rows else 0 for rows in found], np.int64)
        return idf(counts, now.chunks)

    # Change

    def commit(
        self,
        version: int,
        added: TermCounts | None = None,
        removed: TermCounts | None = None,
        info: Info | None = None,
        *,
        replace_all: bool = False,
        packed: bool = False,
    ) -> None:
        """Note that the index is this version of the table from now on.

        Args:
            added: terms of chunks that are new in this version.
            removed: terms of chunks that are gone.
            info: the manifest, if it has changed.
            replace_all: ``added`` are the terms of all chunks.
            packed: no chunk has changed since the table was packed.
        """
        text = info and info.to_json()
        with self._transaction() as database:
            _, chunks, changed, _ = self.snapshot()
            if replace_all:
                database.execute("delete from terms")
                chunks = 0
            size = 0
            for sign, counts in ((1, added), (-1, removed)):
                if counts is None:
                    continue
                size += counts.chunks
                chunks += sign * counts.chunks
                numbers = (sign * counts.counts).tolist()
                hashes = _signed(counts.hashes)
                database.executemany(COUNT, zip(hashes, numbers, strict=True))
                if sign < 0:
                    gone = ((term,) for term in hashes)
                    database.executemany("delete from terms where hash = ? and n = 0", gone)
            changed = 0 if packed else changed + (max(size, COMMIT) if size else 0)
            database.execute(
                "update about set version = ?, chunks = ?, changed = ?, info = coalesce(?, info)",
                (version, chunks, changed, text),
            )

    # Files and their documents

    @property
    def sources(self) -> dict[str, Any]:
        """The sources and settings of reading in the last ``begin``; {} if there was none."""
        found: dict[str, Any] = json.loads(self._read("select sources from about")[0][0])
        return found

    def files(self) -> dict[str, FileState]:
        """Path -> state of each file that was read."""
        rows = self._read("select path, source, size, mtime_ns, digest from files")
        return {row[0]: FileState(*row) for row in rows}

    def owner_of(self, name: str) -> str | None:
        """The file that a document was read from."""
        rows = self._read("select path from documents where id = ?", name)
        return rows[0][0] if rows else None

    def file_state(self, name: str) -> FileState | None:
        """The file that a document was read from, as it was then."""
        columns = "path, source, size, mtime_ns, files.digest"
        rows = self._read(
            f"select {columns} from files join documents using (path) where id = ?", name
        )
        return FileState(*rows[0]) if rows else None

    def compare(
        self,
        files: Sequence[FileState],
        ids: Iterable[str],
        listed: Collection[str],
        unlisted: Iterable[str] = (),
    ) -> tuple[list[str], list[Loss]]:
        """An id that an unread file has too, if there is one, and the losses of all sources.

        Args:
            files: that were read.
            ids: of all their documents, in order.
            listed: the paths of all files.
            unlisted: folders whose files are unknown, so that none of them counts as gone.
        """
        names, unknown = iter(ids), tuple(f"{folder}/" for folder in unlisted)
        with self._transaction("deferred") as database:
            for statement in RUN_TABLES:
                database.execute(statement)
            rows = ((next(names), file.path) for file in files for _ in range(file.documents))
            database.executemany("insert or ignore into now values (?, ?)", rows)
            touched = [(file.path, file.whole) for file in files]
            # Those that a killed run has begun to read are in ``documents`` only.
            recorded = self._read(
                "select path from files union select path from documents where path is not null"
            )
            missing = (path for (path,) in recorded if path not in listed)
            touched += ((path, True) for path in missing if not path.startswith(unknown))
            database.executemany("insert or ignore into touched values (?, ?)", touched)
            shared = self._read(
                "select id from now join documents using (id) "
                "where documents.path not in (select path from touched) limit 1"
            )
            losses = self._read(
                f"select source, count(*), sum({GONE}), sum(path not in (select path from touched))"
                " from documents join files using (path) group by source"
            )
        return [name for (name,) in shared], [Loss(*row) for row in losses]

    def begin(self, sources: Mapping[str, object]) -> list[str]:
        """Forget the files that were read, until ``keep``; all files if the ``sources`` are not
        read as before. Returns the documents that are in no file any more, to be deleted.
        """
        with self._transaction() as database:
            database.execute(f"update documents set path = null where {GONE}")
            known = self.sources
            as_before = all(known.get(n) == v for n, v in sources.items() if n != "sources")
            some = " where path in (select path from touched)" if as_before else ""
            database.execute(f"delete from files{some}")
            database.execute("update about set sources = ?", (json.dumps(sources),))
            gone = "select id from documents where path is null and id not in (select id from now)"
            return [name for (name,) in self._read(gone)]

    def keep(self, files: Sequence[FileState]) -> None:
        """Note files whose documents are all in the table."""
        if not files:
            return
        with self._transaction() as database:
            for file in files:
                database.execute("insert or replace into files values (?, ?, ?, ?, ?)", file[:5])
                database.execute(
                    "insert or replace into documents select id, path from now where path = ?",
                    (file.path,),
                )

    def forget(self, ids: Iterable[str]) -> None:
        """Note that documents may differ from their files, so that these are read again."""
        with self._transaction() as database:
            if not database.execute("select 1 from documents limit 1").fetchone():
                return
            for name in ids:
                database.execute(
                    "delete from files where path = (select path from documents where id = ?)",
                    (name,),
                )
                database.execute("delete from documents where id = ?", (name,))

    def documents(self) -> int:
        """The number of documents in files."""
        return int(self._read("select count(*) from documents where path is not null")[0][0])


@contextmanager
def _errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise RevelaError(
            f"{folder} is damaged, full or out of reach ({STATE}: {error}): fix that, or make it "
            "again with revela index"
        ) from error


def _signed(hashes: NDArray[np.uint64]) -> list[int]:
    """Hashes as signed integers, for SQLite."""
    signed: list[int] = hashes.view(np.int64).tolist()
    return signed


def is_index(folder: Path) -> bool:
    """Whether a folder holds an index, of this version or another."""
    return (folder / STATE).is_file()


def read_info(folder: Path) -> Info | None:
    """The manifest of the index in a folder; None if there is none."""
    if not is_index(folder):
        return None
    with closing(State(folder)) as state:
        return state.info


def unfinished_in(folder: Path) -> Info | None:
    """The manifest of an index that a killed run left unfinished; None if the folder is free.
    RevelaError if it holds a finished index or anything else.
    """
    leftovers = LOCK, hidden_prefix(STATE)  # written before the state
    if (info := read_info(folder)) is None:
        check_free(folder, leftovers)
    elif info.finished:
        raise RevelaError(
            f"{folder} exists: choose another --out, update this index with --sync, or add to it "
            "with --append"
        )
    return info
