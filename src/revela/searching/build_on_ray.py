"""``revela index --engine ray``: make the same index as ``Index.add``, in many processes.

A survey refuses a bad corpus before anything is encoded. Then tasks read and cut documents, actors
encode them, tasks write fragments of the table, and this process commits a wave of fragments at a
time. All chunks of a document are in one fragment, so after a kill the digests in the table show
what is left to do. Every process must see corpus, retriever and index under the same paths.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from revela.encoders.model_files import fingerprint
from revela.errors import RevelaError
from revela.ranking.bm25 import TermCounts
from revela.ranking.calibration import Calibration
from revela.searching import on_ray
from revela.searching.changes import Changes, calibrate
from revela.searching.index import Index
from revela.searching.ingest import (
    BATCH_DOCUMENTS,
    Added,
    Batch,
    check_repeated,
    columns_of_types,
    encode_rows,
    note_types,
    table_rows,
)
from revela.searching.manifest import Info
from revela.searching.on_ray import Cluster
from revela.searching.table import Table, table_uri
from revela.text.analyzer import SAMPLE, Analyzer
from revela.text.load import check_report
from revela.text.parallel import batches
from revela.text.parts import DocumentReader, Owners, Part, parts_of
from revela.text.readers.common import ReadReport
from revela.types import Precision, TokenEncoder, evenly_spaced, hash64

WAVE = 10**6  # chunks per commit
FRAGMENTS = 20  # in a wave
FIRST = 10  # documents of a part, at least, that its language is found in
COUNTED = 10**5  # passages whose terms a task counts
CHARACTERS = 6  # of a word, to guess the chunks of a text
BATCH = 2**17  # characters that an actor encodes at once


@dataclass
class Survey:
    """The contents of a corpus: the report, the types of metadata fields, and hashes of the ids of
    documents, and of those that rows have by their fields, in an array of uint64 per part.
    """

    report: ReadReport = field(default_factory=ReadReport)
    types: dict[str, set[type]] = field(default_factory=dict)
    ids: list[NDArray[np.uint64]] = field(default_factory=list)
    rows: list[NDArray[np.uint64]] = field(default_factory=list)

    def add(self, other: Survey) -> None:
        self.report.add(other.report)
        self.ids += other.ids
        self.rows += other.rows
        for name, found in other.types.items():
            self.types.setdefault(name, set()).update(found)


class SurveyedCorpus:
    """Documents in files: read by any process, counted, and each with an id of its own. They are
    read a second time if rows of several parts share ids.
    """

    def __init__(self, sources: Sequence[Path | str], reading: DocumentReader) -> None:
        listed = ReadReport()
        self.parts, self.reading = parts_of(sources, listed), reading
        found = self._surveyed(listed)
        if len((owners := Owners.of(self.parts, found.rows)).ids_N):
            self.reading = replace(reading, owners=owners)
            found = self._surveyed(listed)
        self.report, self.types = found.report, found.types
        self._size = sum(map(len, found.ids))
        check_report(len(self), self.report, sources)
        hashes, counts = np.unique(np.concatenate(found.ids), return_counts=True)
        if repeated := hashes[counts > 1][:10].tolist():  # different ids may have the same hash
            find = functools.partial(_ids_of, reading=self.reading, hashes=frozenset(repeated))
            check_repeated(itertools.chain.from_iterable(on_ray.in_tasks(find, self.parts)))

    def _surveyed(self, listed: ReadReport) -> Survey:
        found = Survey()
        found.report.add(listed)
        survey = functools.partial(_survey, reading=self.reading)
        for part in on_ray.in_tasks(survey, self.parts):
            found.add(part)
        return found

    def __len__(self) -> int:
        return self._size

    def first_texts(self) -> list[str]:
        """Texts of the first documents of some parts; reaching later ones would cost reading."""
        parts = [self.parts[i] for i in evenly_spaced(len(self.parts), SAMPLE // FIRST)]
        documents = (self.reading.documents(part, ReadReport()) for part in parts)
        count = max(FIRST, SAMPLE // max(1, len(parts)))
        return [d.full_text for some in documents for d in itertools.islice(some, count)]

    def metadata_columns(self) -> dict[str, str]:
        """As ``ingest.metadata_columns``."""
        wanted = {name: self.types.get(name, set()) for name in self.reading.fields.metadata}
        return columns_of_types(wanted)


def _survey(part: Part, reading: DocumentReader) -> Survey:
    found = Survey(types={name: set() for name in reading.fields.metadata})
    hashes, taken = list[int](), set[int]()
    for document in reading.documents(part, found.report, taken):
        found.report.documents += 1
        note_types(found.types, document)
        hashes.append(hash64(document.id))
    found.report.claim = None
    found.ids.append(np.array(hashes, np.uint64))
    found.rows.append(np.array([*taken], np.uint64))
    return found


def _ids_of(part: Part, reading: DocumentReader, hashes: frozenset[int]) -> list[str]:
    """The ids in a part with one of these hashes."""
    found = reading.documents(part, ReadReport())
    return [document.id for document in found if hash64(document.id) in hashes]


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

    def read(self, part: Part) -> Iterator[on_ray.Row]:
        """Batches of a part's documents, cut into rows, without those that are in the table."""
        table = None
        if self.version is not None:
            table = Table.open(self.folder, self.info).at(self.version)
        least = max(1, self.characters // BATCH_DOCUMENTS)
        for batch in batches(
            self.reading.documents(part, ReadReport()),
            lambda document: max(least, len(document.text)),
            self.characters,
        ):
            found = Batch.of(batch, table, self.info)
            changed, replaced = len(found.documents), len(found.replaced)
            yield {
                "rows": table_rows(found.documents, found.digests, self.info, self.folder),
                "added": Added(changed - replaced, replaced, len(batch) - changed),
                "replaced": found.replaced,
            }

    def load(self) -> Callable[[list[on_ray.Row]], on_ray.Row]:
        """The function that an actor runs on each batch: encode it for this index."""
        analyze = self.info.analyzer() if self.finds_terms else None
        return functools.partial(self._encode, self.encoder(), analyze)

    def encoder(self) -> TokenEncoder:
        """The retriever."""
        from revela.encoders.load import load_encoder

        model = Path(self.info.model)
        if not model.is_dir() or fingerprint(model) != self.info.fingerprint:
            raise RevelaError(
                f"{model} is not the same model on every machine: put it where all machines see it"
            )
        precision, prompts = self.info.precision_of(self.precision), self.info.prompts
        return load_encoder(model, precision, prompts=prompts)

    def _encode(
        self, encoder: TokenEncoder, analyze: Analyzer | None, batches: list[on_ray.Row]
    ) -> on_ray.Row:
        (batch,) = batches
        if not (rows := batch.pop("rows"))["id"]:
            return {**batch, "table": None}
        encoded = encode_rows(rows, self.info, encoder, self.folder, analyze)
        batch["added"] += Added(chunks=encoded.rows.num_rows, cut=encoded.cut)
        return {**batch, "table": encoded.rows}

    def write(self, batches: list[on_ray.Row]) -> on_ray.Row:
        """Write batches as fragments of the table; they are not committed."""
        import pyarrow as pa

        added = sum((batch["added"] for batch in batches), Added())
        replaced = [name for batch in batches for name in batch["replaced"]]
        row: on_ray.Row = {"added": added, "replaced": replaced, "fragments": [], "terms": []}
        if tables := [batch["table"] for batch in batches if batch["table"] is not None]:
            rows = pa.concat_tables(tables)
            row["fragments"] = on_ray.write_fragments(table_uri(self.folder), rows)
            row["terms"] = [TermCounts.of(map(str.split, rows["terms"].to_pylist()))]
        return row

    def pack(self) -> None:
        """``Table.pack``, whose memory grows with the table (0.4 GB for 10^6 chunks)."""
        Table.open(self.folder, self.info).pack()

    def calibrate(self) -> Calibration:
        """``calibrate``, which loads the model."""
        return calibrate(Table.open(self.folder, self.info), self.encoder())


def add(
    index: Index,
    corpus: SurveyedCorpus,
    cluster: Cluster,
    *,
    wave: int = WAVE,
    precision: Precision = "auto",
    progress: bool = False,
) -> Added:
    """``Index.add`` for a corpus in files, on a cluster that ``on_ray`` is connected to.

    ``wave`` is the number of chunks per commit.
    """
    total = Added()
    with index.changes() as changes:
        changes.state.forget()
        changes.find_language(corpus.first_texts())
        info = changes.info
        size = max(1, wave // FRAGMENTS) * CHARACTERS * info.settings.chunk_words
        characters = min(BATCH, size)
        before = changes.frozen().number if len(changes.table) else None
        reading, folder = corpus.reading, index.folder.resolve()
        job = Job(folder, info, reading, precision, characters, before)
        written = on_ray.stream(
            corpus.parts, job.read, job.load, job.write, cluster, max(1, size // characters)
        )
        with tqdm(total=len(corpus), unit="document", disable=not progress) as bar:
            for rows in batches(written, lambda row: row["added"].chunks, wave):
                added = sum((row["added"] for row in rows), Added())
                _commit(changes, rows)
                total += added
                bar.update(added.documents)
        changes.finish(
            pack=lambda: next(on_ray.in_tasks(Job.pack, [job])),
            measure=lambda: next(on_ray.in_tasks(Job.calibrate, [job])),
        )
    return total


def _commit(changes: Changes, rows: Sequence[on_ray.Row]) -> None:
    """Commit written fragments, and delete the former rows of the documents that they replace."""
    fragments = [fragment for row in rows for fragment in row["fragments"]]
    replaced = [name for row in rows for name in row["replaced"]]
    if not fragments:
        return
    filters, removed = changes.table.id_filters(replaced), changes.table.find(replaced)[1]
    version = changes.state.snapshot().version
    version = on_ray.commit(table_uri(changes.folder), version, fragments, filters)
    added = [terms for row in rows for terms in row["terms"]]
    changes.state.commit(version, added, [removed])
