"""The record of what an index has read: a SQLite file beside its table, with the sources, the size,
time of change and digest of every file, and the file of every document.

If the table, the settings or the version of the readers are not those that it was written with,
all files are read again. Documents that are in the table are not encoded again.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from revela.corpus.load import READING, Reading
from revela.corpus.readers import VERSION
from revela.errors import RevelaError

if TYPE_CHECKING:
    from revela.index.index import Index

log = logging.getLogger(__name__)
FILE = "sources.sqlite"
# A document without a path is in no file any more, and will be deleted.
TABLES = """
create table if not exists about (json text);
create table if not exists files (
    path text primary key, source text, size integer, mtime_ns integer, digest text
) without rowid;
create table if not exists documents (id text primary key, path text) without rowid;
create index if not exists document_paths on documents (path);
"""
# The documents of a run, and the files that were read or are gone. No document of a file that was
# not read to the end counts as gone.
RUN_TABLES = """
create temp table now (id text primary key, path text) without rowid;
create index temp.now_paths on now (path);
create temp table touched (path text primary key, whole integer) without rowid;
"""
GONE = "path in (select path from touched where whole) and id not in (select id from now)"


class State(NamedTuple):
    """A file's bytes, time of change in ns (-1: compare its digest) and digest."""

    size: int
    mtime_ns: int
    digest: str


@dataclass(frozen=True)
class ReadFile:
    """A file that was read, with its number of documents; ``path`` begins with its source."""

    path: str
    source: str
    state: State
    documents: int
    whole: bool


class Loss(NamedTuple):
    """Numbers of documents: that a source had, that are gone, and in files that were not read
    again.
    """

    source: str
    documents: int
    gone: int
    untouched: int


class Sources:
    """The record of one index."""

    def __init__(self, folder: Path, database: sqlite3.Connection) -> None:
        self.folder, self._database = folder, database
        row = database.execute("select json from about").fetchone()
        self._about: dict[str, Any] = json.loads(row[0]) if row else {}

    @classmethod
    @contextmanager
    def opened(cls, folder: Path) -> Iterator[Sources]:
        """Open the record of the index in a folder, or make it."""
        file = folder / FILE
        try:
            with closing(sqlite3.connect(file, timeout=60)) as database:
                database.executescript(TABLES)
                yield cls(folder, database)
        except sqlite3.Error as error:
            raise RevelaError(
                f"{file} cannot be used ({error}): make room there, or remove it, and revela index "
                "--sync reads all files again"
            ) from error

    @property
    def paths(self) -> list[str]:
        """The sources that were read last."""
        return list(self._about.get("sources", []))

    @property
    def reading(self) -> Reading:
        """How they were read."""
        return Reading(**self._about["reading"]) if self._about else READING

    def files(self, index: Index, reading: Reading) -> dict[str, State]:
        """The files that were read, by path; none if the table has changed since, or ``reading``
        has.
        """
        if self._about != self._now(self.paths, index, reading):
            if self._about and self._about.get("readers") != VERSION:
                log.info(
                    f"{self.folder} was made by readers of an earlier version: all files are read "
                    "again, and what these read otherwise is encoded again"
                )
            return {}
        rows = self._database.execute("select path, size, mtime_ns, digest from files")
        return {path: State(*state) for path, *state in rows}

    def owner_of(self, name: str) -> str | None:
        """The file that holds the document of this id."""
        row = self._database.execute("select path from documents where id = ?", (name,)).fetchone()
        return str(row[0]) if row and row[0] else None

    def note(self, sources: Sequence[str], index: Index, reading: Reading) -> None:
        """Note that the record describes the table as it is now."""
        self._about = self._now(sources, index, reading)
        with self._database as database:
            database.execute("delete from about")
            database.execute("insert into about values (?)", (json.dumps(self._about),))

    @staticmethod
    def _now(sources: Sequence[str], index: Index, reading: Reading) -> dict[str, Any]:
        made = asdict(index.info)
        names = ("fingerprint", "settings", "columns")
        about = {"sources": sources, "reading": asdict(reading), "version": index.table.version}
        about["readers"] = VERSION
        now: dict[str, Any] = json.loads(json.dumps(about | {name: made[name] for name in names}))
        return now

    def compare(
        self, files: Sequence[ReadFile], ids: Iterable[str], listed: Iterable[str] | None
    ) -> tuple[str | None, list[Loss]]:
        """An id that an unread file has too, if there is one, and the losses of all sources.

        Args:
            files: that were read.
            ids: of all their documents, in order.
            listed: the paths of all files; None: some are unknown.
        """
        database, names = self._database, iter(ids)
        database.executescript(RUN_TABLES)
        rows = ((next(names), file.path) for file in files for _ in range(file.documents))
        database.executemany("insert into now values (?, ?)", rows)
        read = ((file.path, file.whole) for file in files)
        database.executemany("insert into touched values (?, ?)", read)
        if listed is not None:
            present = set(listed)
            recorded = [path for (path,) in database.execute("select path from files")]
            missing = ((path, True) for path in recorded if path not in present)
            database.executemany("insert into touched values (?, ?)", missing)
        shared = database.execute(
            "select id from now join documents using (id) "
            "where documents.path not in (select path from touched) limit 1"
        ).fetchone()
        losses = database.execute(
            f"select source, count(*), sum({GONE}), sum(path not in (select path from touched)) "
            "from documents join files using (path) group by source"
        )
        return shared and shared[0], [Loss(*row) for row in losses]

    def begin(self) -> None:
        """Mark documents that are gone, and forget the files that were read, until ``keep``."""
        with self._database as database:
            database.execute(f"update documents set path = null where {GONE}")
            database.execute("delete from files where path in (select path from touched)")

    def keep(self, files: Sequence[ReadFile]) -> None:
        """Note files whose documents are all in the table."""
        with self._database as database:
            for file in files:
                row = (file.path, file.source, *file.state)
                database.execute("insert or replace into files values (?, ?, ?, ?, ?)", row)
                database.execute(
                    "insert or replace into documents select id, path from now where path = ?",
                    (file.path,),
                )

    def gone(self) -> list[str]:
        """The documents that are in no file any more."""
        rows = self._database.execute("select id from documents where path is null")
        return [name for (name,) in rows]

    def forget_gone(self) -> None:
        """Note that these documents are not in the table any more."""
        with self._database as database:
            database.execute("delete from documents where path is null")

    def __len__(self) -> int:
        """The number of documents."""
        rows = self._database.execute("select count(*) from documents where path is not null")
        return int(rows.fetchone()[0])
