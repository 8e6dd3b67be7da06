"""Bring an index in step with its sources: read what is new or has changed, delete what is gone.

A file is unchanged if its size and time of change are, or else its digest (sources.py). After each
commit, the files whose documents are all in the table are recorded, so a killed run goes on from
there. What is gone is deleted at the end.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING

from tqdm import tqdm

from revela.corpus.load import READING, Reading, check_report, filter_documents, first_claim
from revela.corpus.readers import File, files_of, read_file
from revela.corpus.readers.common import FileChanged, ReadReport, display_path, size_and_time
from revela.corpus.readers.hub import PREFIX, read_hub
from revela.corpus.readers.rows import Fields
from revela.corpus.spool import LazyTexts, arrow_list
from revela.errors import RevelaError, first_line
from revela.files import writing
from revela.index.ingest import Added, check_repeated, repeated_id
from revela.index.sources import Loss, ReadFile, Sources, State
from revela.settings import Precision
from revela.silence import progress_bar
from revela.types import Document

if TYPE_CHECKING:
    from revela.index.index import Index

log = logging.getLogger(__name__)
# A file that was written so recently may change again within one tick of the clock: the next run
# compares its digest.
FRESH_NS = 2 * 10**9
DELETE_BATCH = 10_000  # documents per commit


@dataclass(frozen=True)
class Synced:
    """Numbers of documents; ``added`` counts those that were read, ``seconds`` are by step."""

    new: int = 0
    changed: int = 0
    gone: int = 0
    unchanged: int = 0
    added: Added = field(default=Added(), compare=False)
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def any(self) -> bool:
        """Whether the index was changed."""
        return self.new + self.changed + self.gone > 0

    def describe(self) -> str:
        """The numbers, for people."""
        return (
            f"{self.new:,} documents are new, {self.changed:,} changed, {self.gone:,} gone, "
            f"{self.unchanged:,} unchanged"
        )


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
        recorded: Mapping[str, State] | None = None,
        owner_of: Callable[[str], str | None] = lambda name: None,
    ) -> None:
        if reading.join_titles:
            raise RevelaError(
                "--join-titles joins rows of neighbouring files, and --sync reads each by itself: "
                "join them before, or leave --sync out"
            )
        start = time.perf_counter()
        self.sources = [absolute(source) for source in sources]
        self.reading, self.report = reading, ReadReport()
        self.read: list[ReadFile] = []  # new and changed files
        self.touched: list[ReadFile] = []  # files with another time of change and the same digest
        self._fields = Fields(reading.text_field, reading.title_field, tuple(metadata))
        self.listed = dict(self._list())
        self._owner_of, self._is_first = owner_of, first_claim()
        self._unchanged: Set[str] = frozenset()
        self.report.claim = self._claim
        self.is_whole = not self.report.bad  # no folder was unreadable
        self.documents = arrow_list(
            Document, progress_bar("reading", "document", self._documents(recorded or {}))
        )
        self.report.documents = len(self.documents)
        self.seconds = time.perf_counter() - start

    def check_report(self, others: int = 0) -> None:
        """Raise RevelaError if too much could not be read, or no document was found; ``others`` is
        the number of documents in unchanged files.
        """
        total = len(self.documents) + others
        check_report(total, self.report, self.sources)

    def _list(self) -> Iterator[tuple[str, tuple[str, File | None]]]:
        """Path -> source and file; None for a dataset of the hub."""
        for source in self.sources:
            name = display_path(Path(source))
            if source.startswith(PREFIX):
                yield source, (source, None)
                continue
            for file in files_of(source, self.report):
                yield f"{name}/{file.name}", (name, file)

    def _changed(self, recorded: Mapping[str, State]) -> Iterator[tuple[str, State]]:
        """The files that are new or have changed, and their states."""
        for path, (source, file) in self.listed.items():
            before = recorded.get(path)
            size, mtime_ns = size_and_time(file.path) if file else (-1, -1)
            if before and file and (size, mtime_ns) == before[:2]:
                continue
            digest = _digest(file.path) if file else ""
            state = State(size, -1 if time.time_ns() - mtime_ns < FRESH_NS else mtime_ns, digest)
            if before and digest and digest == before.digest:
                self.touched.append(ReadFile(path, source, state, 0, False))
            else:
                yield path, state

    def _documents(self, recorded: Mapping[str, State]) -> Iterator[Document]:
        changed = dict(self._changed(recorded))
        self._unchanged = recorded.keys() & self.listed.keys() - changed.keys()
        for path, state in changed.items():
            source, file = self.listed[path]
            count, bad, torn = 0, self.report.bad, False
            try:
                for document in self._documents_of(source, file):
                    count += 1
                    yield document
            except FileChanged:
                torn = True
            whole = not torn and self.report.bad == bad
            if not whole:  # the next run reads it again
                state = State(state.size, -1, "" if torn else state.digest)
            self.read.append(ReadFile(path, source, state, count, whole))

    def _claim(self, name: str) -> bool:
        """Whether a row may have an id: no other row that is read has it, nor one of a file that is
        unchanged.
        """
        return self._owner_of(name) not in self._unchanged and self._is_first(name)

    def _documents_of(self, source: str, file: File | None) -> Iterator[Document]:
        fields, report = self._fields, self.report
        documents = read_file(file, fields, report) if file else read_hub(source, fields, report)
        return filter_documents(documents, False, 1, report)


def sync(
    index: Index,
    sources: Sequence[Path | str] | None = None,
    reading: Reading | None = None,
    *,
    yes: bool = False,
    progress: bool = False,
    wait: bool = False,
    stop: Event | None = None,
) -> tuple[Synced, ReadReport]:
    """``Index.sync``, and what was read.

    Args:
        wait: for another process that is writing to the index, rather than raise RevelaError.
        stop: once it is set, raise RevelaError after the next commit.
    """
    with writing(index.folder, wait), Sources.opened(index.folder) as record:
        paths, reading = sources or _recorded(index, record), reading or record.reading
        known = record.files(index, reading)
        scan = Scan(paths, reading, list(index.info.columns), known, record.owner_of)
        return _apply(index, record, scan, yes, progress, stop), scan.report


def make(
    scan: Scan,
    create: Callable[[Sequence[Document]], Index],
    *,
    yes: bool = False,
    progress: bool = False,
) -> tuple[Index, Synced]:
    """Make an index of what a scan has found, or finish one that a killed run has left; ``create``
    makes or opens it, and loads its model.
    """
    scan.check_report()
    start = time.perf_counter()
    index = create(scan.documents)
    loading = time.perf_counter() - start
    with writing(index.folder), Sources.opened(index.folder) as record:
        synced = _apply(index, record, scan, yes, progress)
    return index, replace(synced, seconds={"loading the model": loading, **synced.seconds})


def _apply(
    index: Index,
    record: Sources,
    scan: Scan,
    yes: bool,
    progress: bool,
    stop: Event | None = None,
) -> Synced:
    start = time.perf_counter()
    documents, added, unfinished = scan.documents, Added(), deque(scan.read)
    _check(index, record, scan, yes)
    record.begin()
    record.keep(scan.touched)
    index.writer.find_language(LazyTexts(documents, lambda document: document.full_text))
    with tqdm(total=len(documents), unit="document", disable=not (progress and documents)) as bar:
        pending = 0  # documents in the table whose files are not
        for batch in index.writer.add_batches(documents) if documents else ():
            added += batch
            pending += batch.documents
            bar.update(batch.documents)
            finished: list[ReadFile] = []
            while unfinished and unfinished[0].documents <= pending:
                pending -= unfinished[0].documents
                finished.append(unfinished.popleft())
            record.keep(finished)
            record.note(scan.sources, index, scan.reading)
            if stop and stop.is_set():
                raise RevelaError(f"{index.folder} is not in step yet: sync it again to go on")
    record.keep(list(unfinished))  # without documents
    encoded = time.perf_counter()
    gone = _delete(index, record)
    if documents or gone or not index.writer.is_finished:
        index.writer.finish()
    record.note(scan.sources, index, scan.reading)
    unchanged = len(record) - added.new - added.replaced
    seconds = dict(reading=scan.seconds, encoding=encoded - start)
    seconds["finishing"] = time.perf_counter() - encoded
    return Synced(added.new, added.replaced, gone, unchanged, added, seconds)


@contextmanager
def kept_in_step(index: Index, seconds: float, precision: Precision = "auto") -> Iterator[None]:
    """While open, a thread syncs an index with its sources every so many seconds.

    The thread has an ``Index`` and a retriever of its own, so searches never wait for it. It loads
    the retriever when something has changed. It logs what fails.

    Raises:
        RevelaError: the index does not know its sources.
    """
    from revela.index.index import Index as Opened

    with Sources.opened(index.folder) as record:
        _recorded(index, record)
    own, stop = Opened.open(index.folder, index.model_folder, precision=precision), Event()
    thread = Thread(target=_keep_in_step, args=(own, seconds, stop), name="sync", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _keep_in_step(index: Index, seconds: float, stop: Event) -> None:
    while not stop.wait(seconds):
        try:
            synced, _ = sync(index, stop=stop)
            if synced.any:
                log.info(f"{synced.describe()}; {index.folder} is in step again")
        except Exception as error:  # serving goes on
            log.warning(f"not in step with its sources: {first_line(error)}")


def _recorded(index: Index, record: Sources) -> list[str]:
    if not record.paths:
        raise RevelaError(
            f"{index.folder} does not know what it was made of: run revela index CORPUS --out "
            f"{index.folder} --sync once"
        )
    return record.paths


def _check(index: Index, record: Sources, scan: Scan, yes: bool) -> None:
    """Refuse documents that share an id, what cannot be read, and a source that has lost half of
    its documents, unless ``yes``.
    """
    names = [name for some in scan.documents.arrays("id") for name in some.to_pylist()]
    check_repeated(names)
    shared, losses = record.compare(scan.read, names, scan.listed if scan.is_whole else None)
    if shared:
        raise repeated_id(shared)
    untouched = sum(loss.untouched for loss in losses)
    if untouched or names or not any(loss.gone for loss in losses):
        scan.check_report(untouched)
    for loss in losses:
        if 2 * loss.gone >= loss.documents > 0 and not yes:
            raise RevelaError(_refusal(index, loss))


def _refusal(index: Index, loss: Loss) -> str:
    return (
        f"{loss.source} has lost {loss.gone:,} of its {loss.documents:,} documents, so "
        f"{index.folder} stays as it is: give --yes to delete them there too, or bring them back"
    )


def _delete(index: Index, record: Sources) -> int:
    """Delete documents that are gone from the table; how many."""
    gone = record.gone()
    if gone:
        index.writer.begin_adding()
    for start in range(0, len(gone), DELETE_BATCH):
        index.writer.drop(gone[start : start + DELETE_BATCH])
    record.forget_gone()
    return len(gone)


def absolute(source: Path | str) -> str:
    """A source as it is recorded; a link to a file keeps its name, which is its document's id."""
    path = Path(source)
    if str(source).startswith(PREFIX):
        return str(source)
    return str(path.resolve() if path.is_dir() else path.parent.resolve() / path.name)


def _digest(path: Path) -> str:
    """16 hex digits of a file's bytes; "" if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8)).hexdigest()
    except OSError:
        return ""
