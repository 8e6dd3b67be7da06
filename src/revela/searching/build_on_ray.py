"""``revela index --engine ray``: make the same index as ``Index.add``, in many processes.

A survey refuses a bad corpus before anything is encoded. Then tasks read and cut documents, actors
encode them, tasks write fragments of the table, and this process commits many fragments at a time.
All chunks of a document are in one fragment, so after a kill the digests in the table show what is
left to do. Every process must see corpus, retriever and index under the same paths.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from revela.encoders.base import TextEncoder
from revela.encoders.model_files import fingerprint
from revela.errors import RevelaError
from revela.ranking.bm25 import TermCounts
from revela.ranking.calibration import Calibration
from revela.searching import on_ray
from revela.searching.changes import calibrate
from revela.searching.index import Index
from revela.searching.ingest import BATCH_DOCUMENTS, Batch, Counts, check_repeated, encode_rows
from revela.searching.manifest import Info
from revela.searching.on_ray import Cluster
from revela.searching.rows import columns_of_kinds, note_kinds
from revela.searching.table import Table, table_uri
from revela.text.analyzer import SAMPLE
from revela.text.load import check_report
from revela.text.parallel import batches
from revela.text.parts import DocumentReader, Owners, Part, parts_of
from revela.text.readers.common import ReadReport
from revela.types import Precision, evenly_spaced, hash64

FRAGMENTS = 20  # per commit
FIRST = 10  # documents of a part, at least, that its language is found in
CHARACTERS = 6  # of a word, to guess the chunks of a text
BATCH = 2**17  # characters that an actor encodes at once


class SurveyedCorpus:
    """Documents in files: read by any process, counted, and each with an id of its own. They are
    read a second time if rows of several parts share ids.
    """

    def __init__(self, sources: Sequence[Path | str], reading: DocumentReader) -> None:
        self._listed = ReadReport()
        self.parts, self.reading = parts_of(sources, self._listed), reading
        if len((owners := Owners.of(self.parts, self._survey())).ids_N):
            self.reading = replace(reading, owners=owners)
            self._survey()
        check_report(len(self), self.report, sources)
        hashes, counts = np.unique(self._ids, return_counts=True)
        if repeated := hashes[counts > 1][:10].tolist():  # different ids may have the same hash
            find = functools.partial(_ids_of, reading=self.reading, hashes=frozenset(repeated))
            check_repeated(itertools.chain.from_iterable(on_ray.in_tasks(find, self.parts)))

    def _survey(self) -> list[NDArray[np.uint64]]:
        """Read all parts; returns hashes of the ids that rows of each have by their fields."""
        self.report = ReadReport()
        self.report.add(self._listed)
        self._kinds: dict[str, set[str]] = {name: set() for name in self.reading.fields.metadata}
        ids, rows = list[NDArray[np.uint64]](), list[NDArray[np.uint64]]()
        survey = functools.partial(_survey, reading=self.reading)
        for report, kinds, ids_of_part, rows_of_part in on_ray.in_tasks(survey, self.parts):
            self.report.add(report)
            ids.append(ids_of_part)
            rows.append(rows_of_part)
            for name, found in kinds.items():
                self._kinds[name] |= found
        self._ids = np.concatenate([*ids, np.empty(0, np.uint64)])
        return rows

    def __len__(self) -> int:
        return len(self._ids)

    def first_texts(self) -> list[str]:
        """Texts of the first documents of some parts; reaching later ones would cost reading."""
        parts = [self.parts[i] for i in evenly_spaced(len(self.parts), SAMPLE // FIRST)]
        documents = (self.reading.documents(part, ReadReport()) for part in parts)
        count = max(FIRST, SAMPLE // max(1, len(parts)))
        return [d.full_text for some in documents for d in itertools.islice(some, count)]

    def metadata_columns(self) -> dict[str, str]:
        """As ``rows.metadata_columns``."""
        return columns_of_kinds(self._kinds)


def _survey(
    part: Part, reading: DocumentReader
) -> tuple[ReadReport, dict[str, set[str]], NDArray[np.uint64], NDArray[np.uint64]]:
    """A report on a part, the kinds of its metadata, and hashes of the ids of its documents, and of
    those that rows have by their fields.
    """
    report, hashes, taken = ReadReport(), list[int](), set[int]()
    kinds: dict[str, set[str]] = {name: set() for name in reading.fields.metadata}
    for document in reading.documents(part, report, taken):
        report.documents += 1
        note_kinds(kinds, document)
        hashes.append(hash64(document.id))
    report.claim = None
    return report, kinds, np.array(hashes, np.uint64), np.array([*taken], np.uint64)


def _ids_of(part: Part, reading: DocumentReader, hashes: frozenset[int]) -> list[str]:
    """The ids in a part with one of these hashes."""
    found = reading.documents(part, ReadReport())
    return [document.id for document in found if hash64(document.id) in hashes]


class Written(NamedTuple):
    """Batches in files: their fragments of the table, which are not committed, or names of files;
    and the terms of their chunks.
    """

    counts: Counts
    replaced: list[str]
    files: list[bytes]
    terms: list[TermCounts]


@dataclass(frozen=True)
class Job:
    """What every process needs to know of the index to make."""

    folder: Path
    info: Info
    reading: DocumentReader
    precision: Precision
    characters: int = BATCH  # of a batch, which is encoded at once
    version: int | None = None  # of the table; None: it holds none of the documents
    finds_terms: ClassVar[bool] = True

    def read(self, part: Part) -> Iterator[Batch]:
        """Batches of a part's documents, cut into rows, without those that are in the table."""
        table = None
        if self.version is not None:
            table = Table.open(self.folder, self.info).at(self.version)
        least = max(1, self.characters // BATCH_DOCUMENTS)
        for documents in batches(
            self.reading.documents(part, ReadReport()),
            lambda document: max(least, len(document.text)),
            self.characters,
        ):
            yield Batch.of(documents, table, self.info, self.folder)

    def load(self) -> Callable[[list[Batch]], Batch]:
        """The function that an actor runs on each batch: encode it for this index."""
        encoder, analyze = self.encoder(), self.info.analyzer() if self.finds_terms else None

        def encoded(batches: list[Batch]) -> Batch:
            (batch,) = batches
            return encode_rows(batch, self.info, encoder, self.folder, analyze)

        return encoded

    def encoder(self) -> TextEncoder:
        """The retriever."""
        from revela.encoders.load import load_encoder

        model = Path(self.info.model)
        if not model.is_dir() or fingerprint(model) != self.info.fingerprint:
            raise RevelaError(
                f"{model} is not the same model on every machine: put it where all machines see it"
            )
        precision, prompts = self.info.precision_of(self.precision), self.info.prompts
        return load_encoder(model, precision, prompts=prompts)

    def write(self, batches: list[Batch]) -> Written:
        """Write batches to files."""
        import pyarrow as pa

        counts = sum((batch.counts for batch in batches), Counts())
        tables = [batch.encoded for batch in batches if batch.encoded is not None]
        if not tables:
            return Written(counts, [], [], [])
        replaced = [name for batch in batches for name in batch.replaced]
        return Written(counts, replaced, *self._files(pa.concat_tables(tables)))

    def _files(self, rows: Any) -> tuple[list[bytes], list[TermCounts]]:
        """Write rows in Arrow; returns the last two fields of ``Written``."""
        terms = TermCounts.of(map(str.split, rows["terms"].to_pylist()))
        return on_ray.write_fragments(table_uri(self.folder), rows), [terms]

    def pack(self) -> None:
        """``Table.pack``, whose memory grows with the table (0.4 GB for 10^6 chunks)."""
        Table.open(self.folder, self.info).pack()

    def calibrate(self) -> Calibration:
        """``calibrate``, which loads the model."""
        return calibrate(Table.open(self.folder, self.info), self.encoder())


def add(
    index: Index, corpus: SurveyedCorpus, cluster: Cluster, commit_every: int, precision: Precision
) -> Counts:
    """``Index.add`` for a corpus in files, on a cluster that ``on_ray`` is connected to.

    ``commit_every`` is the number of chunks per commit.
    """
    with index.changes() as changes:
        changes.state.forget()
        changes.find_language(corpus.first_texts())
        info, folder = changes.info, index.folder.resolve()
        size = max(1, commit_every // FRAGMENTS) * CHARACTERS * info.settings.chunk_words
        characters = min(BATCH, size)
        before = changes.frozen().number if len(changes.table) else None
        job = Job(folder, info, corpus.reading, precision, characters, before)
        together = max(1, size // characters)
        written = on_ray.stream(corpus.parts, job.read, job.load, job.write, cluster, together)

        def commits() -> Iterator[Counts]:
            with tqdm(total=len(corpus), unit="document") as bar:
                for parts in batches(written, lambda part: part.counts.chunks, commit_every):
                    former = changes.table.find([name for part in parts for name in part.replaced])
                    files = [file for part in parts for file in part.files]
                    terms = [counts for part in parts for counts in part.terms]
                    version = changes.state.snapshot().version
                    write = functools.partial(on_ray.commit, table_uri(folder), version)
                    changes.commit(files or None, former, terms, write)
                    counts = sum((part.counts for part in parts), Counts())
                    bar.update(counts.documents)
                    yield counts

        total = changes.follow(commits())
        changes.finish(
            pack=lambda: next(on_ray.in_tasks(Job.pack, [job])),
            measure=lambda: next(on_ray.in_tasks(Job.calibrate, [job])),
        )
    return total
