"""Make an index of its sources, or update it: read new and changed files, delete what is gone.

A file is unchanged if its size and time of change are the same, or else its digest. Each commit
notes in the state (state.py) the files that are completely in the table, so a killed run continues
from there. Deletions come last. If the settings of reading or the version of the readers differ
from the last time, all files are read again; documents that are in the table already are not
encoded again.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, replace
from math import inf
from pathlib import Path

from revela.errors import RevelaError
from revela.searching.changes import Changes
from revela.searching.ingest import Counts, check_repeated
from revela.searching.state import FileState, Loss, State
from revela.terminal import counted, progress_bar
from revela.text.load import READING, Reading, check_report, filter_documents, first_claim
from revela.text.parallel import batches
from revela.text.readers import VERSION, File, files_of, read_file
from revela.text.readers.common import FileChanged, ReadReport, display_path, size_and_time
from revela.text.readers.hub import PREFIX, read_hub
from revela.text.spool import arrow_list
from revela.types import Document

log = logging.getLogger(__name__)
# A file changed more recently than this may change again within one tick of the clock, so the next
# run compares its digest.
FRESH_NS = 2 * 10**9
DELETE_BATCH = 10_000  # documents per commit
HALF, ALL, NONE = 0.5, 1.0, inf  # shares of a source's documents whose loss is refused


class Scan:
    """The files of sources, and the documents of those that are new or have changed.

    Args:
        recorded: files and their states at the last run, by path.
        owner_of: the file that a document was read from at the last run, by id.
    """

    def __init__(
        self,
        sources: Sequence[Path | str],
        reading: Reading = READING,
        metadata: Sequence[str] = (),
        recorded: Mapping[str, FileState] | None = None,
        owner_of: Callable[[str], str | None] = lambda name: None,
    ) -> None:
        if reading.join_titles:
            raise RevelaError(
                "--join-titles joins rows of neighbouring files, and --sync reads each by itself: "
                "join them first, or leave --sync out"
            )
        self.sources = [absolute(source) for source in sources]
        self.reading, self.report = reading, ReadReport()
        self.read: list[FileState] = []  # new and changed files
        self.touched: list[FileState] = []  # files with another time of change and the same digest
        self._fields = reading.fields(metadata, for_search=True)
        self.listed = dict(self._list())
        self._owner_of, self._is_first = owner_of, first_claim()
        self._unchanged: Set[str] = frozenset()
        self.report.claim = self._claim
        self.documents = arrow_list(
            Document, progress_bar("reading", "document", self._documents(recorded or {}))
        )
        self.report.documents = len(self.documents)

    def check_report(self, others: int = 0) -> None:
        """Raise RevelaError if too much could not be read, or no document was found; ``others`` is
        the number of documents in unchanged files.
        """
        check_report(len(self.documents) + others, self.report, self.sources)

    def _list(self) -> Iterator[tuple[str, tuple[str, File | None]]]:
        """Path -> source and file; None for a dataset of the hub."""
        for source in self.sources:
            name = display_path(Path(source))
            if source.startswith(PREFIX):
                yield source, (source, None)
                continue
            for file in files_of(source, self.report):
                yield f"{name}/{file.name}", (name, file)

    def _changed(self, recorded: Mapping[str, FileState]) -> Iterator[FileState]:
        """The files that are new or have changed."""
        for path, (source, file) in self.listed.items():
            before = recorded.get(path)
            size, mtime_ns = size_and_time(file.path) if file else (-1, -1)
            if before and file and (size, mtime_ns) == (before.size, before.mtime_ns):
                continue
            digest = _digest(file.path) if file else ""
            is_fresh = time.time_ns() - mtime_ns < FRESH_NS
            state = FileState(path, source, size, -1 if is_fresh else mtime_ns, digest)
            if before and digest and digest == before.digest:
                self.touched.append(state)
            else:
                yield state

    def _documents(self, recorded: Mapping[str, FileState]) -> Iterator[Document]:
        changed = {state.path: state for state in self._changed(recorded)}
        for path in [*changed]:  # a row that has the id of a new file gets another
            source, file = self.listed[path]
            owner = self._owner_of(file.name) if file else None
            if owner in self.listed and owner in recorded:
                changed.setdefault(owner, recorded[owner])
        self._unchanged = recorded.keys() & self.listed.keys() - changed.keys()
        for path, state in changed.items():
            source, file = self.listed[path]
            count, bad, torn = 0, self.report.bad, False
            fields, report = self._fields, self.report
            read = read_file(file, fields, report) if file else read_hub(source, fields, report)
            try:
                for document in filter_documents(read, False, 1, report):
                    count += 1
                    yield document
            except FileChanged:
                torn = True
            whole = not torn and self.report.bad == bad
            if not whole:  # the next run reads it again
                state = state._replace(mtime_ns=-1, digest="" if torn else state.digest)
            self.read.append(state._replace(documents=count, whole=whole))

    def _claim(self, name: str) -> bool:
        """Whether a row may have an id: no other row of this run has it, and no row of an unchanged
        file.
        """
        return self._owner_of(name) not in self._unchanged and self._is_first(name)


def rescan(
    changes: Changes, sources: Sequence[Path | str] | None = None, reading: Reading | None = None
) -> Scan:
    """Read what is new or has changed in the sources of an index, and the settings of reading; by
    default both are those of the last time.
    """
    state = changes.state
    known, sources = state.sources, sources or recorded_sources(state)
    reading = reading or (Reading(**known["reading"]) if known else READING)
    if known and known["readers"] != VERSION:
        log.info(
            f"{state.folder} was made with the file readers of an earlier version: reading all "
            "files again, and encoding documents whose text differs"
        )
    is_same = all(known.get(name) == value for name, value in _how(reading).items())
    recorded = state.files() if is_same else {}
    return Scan(sources, reading, list(changes.info.columns), recorded, state.owner_of)


def sync(
    changes: Changes,
    scan: Scan,
    refused: float = HALF,
    progress: bool = False,
    begin: Callable[[Sequence[Document]], None] | None = None,
    tell: Callable[[float], None] | None = None,
) -> Counts:
    """Update an index from its sources; returns what has changed.

    Args:
        changes: of the index to update.
        scan: of its sources.
        refused: raise RevelaError if a source has lost at least this share of its documents.
        progress: show a bar.
        begin: called with the documents of new and changed files before they are encoded.
        tell: as for ``Changes.commits``.
    """
    state = changes.state
    _check(changes, scan, refused)
    if begin:
        begin(scan.documents)
    gone = state.begin({"sources": scan.sources, **_how(scan.reading)})
    state.keep(scan.touched)
    commits = changes.commits(scan.documents, progress, tell)
    changed = changes.follow(commits, batches(gone, lambda _: 1, DELETE_BATCH), scan.read)
    return replace(changed, unchanged=state.documents() - changed.new - changed.replaced)


def _how(reading: Reading) -> dict[str, object]:
    """The settings of reading, for the state."""
    return {"reading": asdict(reading), "readers": VERSION}


def recorded_sources(state: State) -> list[str]:
    """The sources of an index; RevelaError if none are recorded."""
    if not state.sources:
        raise RevelaError(
            f"{state.folder} has no record of its sources: run revela index CORPUS --out "
            f"{state.folder} --sync once"
        )
    return list(state.sources["sources"])


def _check(changes: Changes, scan: Scan, refused: float) -> None:
    """Raise RevelaError for repeated ids, unreadable files, and a source that has lost too much."""
    names: list[str] = scan.documents.column("id").tolist()
    unlisted = scan.report.unlisted
    shared, losses = changes.state.compare(scan.read, names, scan.listed, unlisted)
    check_repeated([*names, *shared])
    untouched = sum(loss.untouched for loss in losses)
    if untouched or names or not any(loss.gone for loss in losses):
        scan.check_report(untouched)
    if refused == ALL and names:  # files were renamed: on a lost disk none would be read
        return
    for loss in losses:
        if loss.gone >= refused * loss.documents > 0:
            raise RevelaError(_refusal(changes.folder, loss, refused))


def _refusal(folder: Path, loss: Loss, refused: float) -> str:
    if refused == ALL:  # the index of a folder, in the cache
        return (
            f"{loss.source} has lost all of its {counted(loss.documents, 'document')}, so its "
            f"index was not changed: restore them, or run revela cache {loss.source} --clear"
        )
    return (
        f"{loss.source} has lost {loss.gone:,} of its {counted(loss.documents, 'document')}, so "
        f"{folder} was not changed: restore them, or run revela index --sync --yes to delete them "
        "from the index"
    )


def absolute(source: Path | str) -> str:
    """A source as it is recorded; a link to a file keeps its name, which is its document's id."""
    path = Path(source)
    if str(source).startswith(PREFIX):
        return str(source)
    return str(path.resolve() if path.is_dir() else path.parent.resolve() / path.name)


def _digest(path: Path) -> str:
    """16 hex digits of a file's bytes; "" if it cannot be read."""
    digest = hashlib.blake2b(digest_size=8)
    try:
        # hashlib.file_digest clears a large buffer for each file: most of a small one's time.
        with path.open("rb", buffering=0) as file:
            while piece := file.read(2**16):
                digest.update(piece)
    except OSError:
        return ""
    return digest.hexdigest()
