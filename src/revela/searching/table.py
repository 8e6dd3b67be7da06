"""The LanceDB table of an index: one row per chunk. The only file that imports LanceDB.

Each change makes a new version; the state (state.py) names the version of the index.

Shapes: N rows, W width of a stored vector.
"""

from __future__ import annotations

import os
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from revela.errors import QueryError, RevelaError
from revela.files import disk_error
from revela.ranking.bm25 import TermCounts
from revela.ranking.fusion import Owner
from revela.searching.filters import id_filter, own_filter
from revela.searching.manifest import Info
from revela.searching.rows import HIT_COLUMNS, Stored, schema_of
from revela.terminal import progress_bar
from revela.text.analyzer import QUERY_WORDS, Analyzer, searched
from revela.types import Vectors, evenly_spaced, shortened

TABLE = "chunks"
EXACT_BELOW = 20_000  # chunks; vectors of a larger table are searched by an approximate index
CELLS = 20  # cells of the approximate index that a query reads
CANDIDATES = 200  # minimum number of candidates that are scored again by their stored vectors
FILTER_IDS = 1000  # ids in one filter
FIRST = 4  # passages per document in which its language is detected
READ_ROWS = 2**14  # rows per batch when all passages are read
# A large table is packed after at most ``UNPACKED`` changed chunks, because each chunk whose words
# are not indexed adds 3 us to a search; below 100,000 chunks after one in ``PACKED_SHARE``, because
# replaced chunks stay on the disk until then. Packing takes half a second.
UNPACKED, PACKED_SHARE = 2000, 50
# Minimum size in bytes of LanceDB's caches of indices and of metadata; for a large table the size
# of its vectors. LanceDB's defaults are 6 GB and 1 GB, which a service fills with former versions.
CACHE = 2**23
NEVER = timedelta(days=36_500)  # LanceDB removes versions of more than 7 days by default
Candidates = dict[int, tuple[Owner, float]]
"""Row -> its document and its score, best first."""
LANCE_ERRORS = (ValueError, RuntimeError, OSError)
PANIC = "RustPanic"  # of damaged files; its module is made by Rust and cannot be imported
_FILES = re.compile(r"\(IO\)|Not found:|panicked")  # are at fault, and not the filter
_SOURCE = re.compile(r",? ?/\S+\.rs:\d+:\d+.*", re.DOTALL)
_PREAMBLE = re.compile(r"(?:Schema error|sql parser error|Invalid user input|Invalid input)[:,] ")


@dataclass
class Table:
    """The rows of an index. Raises RevelaError for damaged files.

    Attributes:
        database, lance: the LanceDB database and its table.
        number: the version that it was opened ``at``.
    """

    folder: Path
    info: Info
    database: Any
    lance: Any
    number: int = -1

    @cached_property
    def passage_terms(self) -> Analyzer:
        return self.info.analyzer()

    @cached_property
    def query_terms(self) -> Analyzer:
        return self.info.analyzer(QUERY_WORDS)

    @classmethod
    def open(cls, folder: Path, info: Info, chunks: int = 10**6, create: bool = False) -> Table:
        """Open the last version of a table of about this many chunks; ``create`` makes an empty one
        first.
        """
        # Read by LanceDB when it is imported; hides its warnings for programmers.
        os.environ.setdefault("LANCEDB_LOG", "error")
        with _unchecked_calls():
            import lancedb
        # The processes that read text are forked, but do not use LanceDB.
        warnings.filterwarnings("ignore", "lancedb fork support is experimental")

        with lance_errors(folder):
            size = max(CACHE, 4 * info.width * chunks)
            session = lancedb.Session(index_cache_size_bytes=size, metadata_cache_size_bytes=size)
            current = timedelta(0)
            database = lancedb.connect(folder, read_consistency_interval=current, session=session)
            if create:
                lance = database.create_table(TABLE, schema=schema_of(info), mode="overwrite")
            else:
                lance = database.open_table(TABLE)
        return cls(folder, info, database, lance)

    def at(self, version: int, info: Info | None = None) -> Table:
        """The table at a version, read-only; ``info`` replaces the manifest. RevelaError if the
        version was removed, as those are that the state no longer names.
        """
        with lance_errors(self.folder):
            lance = self.database.open_table(TABLE)
            lance.checkout(version)
        return Table(self.folder, info or self.info, self.database, lance, version)

    def __len__(self) -> int:
        return int(self.lance.count_rows())

    @property
    def documents(self) -> int:
        """The number of documents."""
        with lance_errors(self.folder):
            return int(self.lance.count_rows("chunk = 0"))

    @property
    def version(self) -> int:
        """Number of the version."""
        return int(self.lance.version)

    # Read

    def nearest(self, vector: Vectors, depth: int, where: str = "") -> Candidates:
        """The ``depth`` rows nearest to a unit vector (W,), by cosine, without those that have no
        vector because they have no words.
        """
        query = self.lance.search(vector, vector_column_name="vector", query_type="vector")
        # More cells are read where a filter leaves too few rows in these; candidates are scored
        # again by their stored vectors.
        query = query.distance_type("dot").minimum_nprobes(CELLS).maximum_nprobes(0)
        query = query.refine_factor(-(-CANDIDATES // depth))
        found = self._ranking(query, depth, where, "_distance", lambda distance: 1.0 - distance)
        return {row: hit for row, hit in found.items() if hit[1]} or found

    def matching(self, text: str, depth: int, where: str = "") -> Candidates:
        """The ``depth`` best rows with terms of the text, by BM25."""
        from lancedb.query import MatchQuery

        if not (terms := self.query_terms.of_query(text)):
            return {}
        query = self.lance.search(MatchQuery(" ".join(terms), "terms"), query_type="fts")
        return self._ranking(query, depth, where, "_score", float)

    def _ranking(
        self, query: Any, depth: int, where: str, column: str, score: Callable[[float], float]
    ) -> Candidates:
        query = (query.where(where) if where else query).limit(depth).with_row_id(True)
        result = self._read(query, ["id", "chunks", column], where)
        names = "_rowid", "id", "chunks", column
        rows, ids, chunks, values = (result[name].to_pylist() for name in names)
        owners = map(Owner, ids, chunks)
        return dict(zip(rows, zip(owners, map(score, values), strict=True), strict=True))

    def rows(self, numbers: Sequence[int], names: Sequence[str] = ()) -> dict[int, dict[str, Any]]:
        """Columns of rows, by default those of a hit; deleted rows are missing."""
        names = list(names) or [*HIT_COLUMNS, *self.info.columns]
        if not numbers:
            return {}
        rows = self._read(self.lance.take_row_ids(list(numbers)).with_row_id(), names)
        return {row["_rowid"]: row for row in rows.to_pylist()}

    def document(self, name: str) -> list[dict[str, Any]]:
        """The rows of a document by its id, in order, with the columns of a hit."""
        (rows,) = self._rows_of([name], [*HIT_COLUMNS, *self.info.columns])
        return sorted(rows.to_pylist(), key=lambda row: int(row["chunk"]))

    def cosines(self, numbers: Sequence[int], vector: Vectors) -> dict[int, float]:
        """The cosines of rows with a unit vector (W,); KeyError if a row was deleted."""
        rows = self._read(self.lance.take_row_ids(list(numbers)).with_row_id(), ["vector"])
        products = (self.vectors_in(rows) @ vector).tolist()
        cosines = dict(zip(rows["_rowid"].to_pylist(), products, strict=True))
        return {row: cosines[row] for row in numbers}

    def frozen(self) -> Table:
        """The table in its current version, for ``digests`` and ``find`` while documents are added.
        In a large one the ids are indexed first, so that look-ups stay fast.
        """
        from lancedb.index import BTree

        with lance_errors(self.folder):
            if len(self) >= EXACT_BELOW:
                indices = self.lance.list_indices()
                name = next((index.name for index in indices if index.columns == ["id"]), None)
                if not name or self.lance.index_stats(name).num_unindexed_rows > UNPACKED:
                    self.lance.create_index("id", config=BTree(), replace=True)
        return self.at(self.version)

    def digests(self, documents: Sequence[str]) -> dict[str, str]:
        """Id -> digest of the documents that are in the table."""
        digests = dict[str, str]()
        # Read for all chunks: selecting the first ones would read one more column of scattered
        # rows, which takes three times as long.
        for rows in self._rows_of(documents, ["id", "digest"]):
            digests |= zip(rows["id"].to_pylist(), rows["digest"].to_pylist(), strict=True)
        return digests

    def find(self, documents: Sequence[str]) -> tuple[list[int], TermCounts]:
        """The numbers of the rows of these documents, and the counts of their terms."""
        numbers, terms = list[int](), list[list[str]]()
        for rows in self._rows_of(documents, ["terms"]):
            numbers += rows["_rowid"].to_pylist()
            terms += map(str.split, rows["terms"].to_pylist())
        return numbers, TermCounts.of(terms)

    def passages(self, documents: Sequence[str]) -> dict[str, Stored]:
        """The passages of these documents."""
        tokens = ["tokens"] if self.info.settings.keep_tokens else []
        found = dict[str, Stored]()
        for rows in self._rows_of(documents, ["passage", "vector", *tokens]):
            packed = rows["tokens"].to_pylist() if tokens else [None] * len(rows)
            stored = map(Stored, self.vectors_in(rows), packed)
            found |= zip(rows["passage"].to_pylist(), stored, strict=True)
        return found

    def terms(self) -> Iterator[list[str]]:
        """The terms of each row."""
        for batch in self.batches(["terms"]):
            yield from map(str.split, batch.column("terms").to_pylist())

    def batches(self, names: Sequence[str]) -> Iterator[Any]:
        """Columns of all rows, in Arrow, some rows at a time."""
        with lance_errors(self.folder):
            yield from self.lance.search().select(list(names)).to_batches(READ_ROWS)

    def _rows_of(self, documents: Sequence[str], names: Sequence[str]) -> Iterator[Any]:
        """The rows of these documents, with their numbers, in parts."""
        for start in range(0, len(documents), FILTER_IDS):
            where = id_filter(documents[start : start + FILTER_IDS])
            yield self._read(self.lance.search().where(where).with_row_id(True), names)

    def _read(self, query: Any, names: Sequence[str], where: str = "") -> Any:
        """Columns of the rows that a query selects, in Arrow; ``where`` is its user's filter."""
        with lance_errors(self.folder, where, self.info.columns):
            return query.select(list(names)).to_arrow()

    def sample(self, *columns: str) -> Any:
        """At most a thousand rows, evenly spaced, in Arrow."""
        offsets = evenly_spaced(len(self)).tolist() if len(self) else []
        return self._read(self.lance.take_offsets(offsets), columns)

    def first_passages(self) -> list[str]:
        """The first passages of at most a thousand documents, evenly spaced, each joined: a long
        document counts as much as a short one.
        """
        first = self.lance.search().where(f"chunk < {FIRST}").with_row_id(True)
        found = self._read(first, ["id", "chunk"]).sort_by("chunk")
        numbers = defaultdict[str, list[int]](list)
        for name, number in zip(found["id"].to_pylist(), found["_rowid"].to_pylist(), strict=True):
            numbers[name].append(number)
        documents = [*numbers.values()]
        some = [documents[i] for i in evenly_spaced(len(documents))]
        rows = self.rows([number for of in some for number in of], ["passage"])
        return ["\n".join(rows[number]["passage"] for number in of) for of in some]

    def vectors_in(self, rows: Any) -> Vectors:
        """The vectors (N, W) of rows in Arrow."""
        numbers: Vectors = rows["vector"].combine_chunks().flatten().to_numpy()
        return numbers.reshape(-1, self.info.width)

    # Change

    def replace(self, rows: Any, numbers: Collection[int]) -> None:
        """Add ``arrow_rows``, if there are any, and delete the rows of these numbers."""
        with lance_errors(self.folder):
            if rows is not None:
                self.lance.add(rows)
            if numbers:
                self.lance.delete(f"_rowid in ({', '.join(map(str, numbers))})")

    def restore(self, version: int) -> None:
        """Undo changes since a version."""
        with lance_errors(self.folder):
            self.lance.restore(version)

    def rewrite_terms(self) -> None:
        """Rewrite the terms of all rows, which get new numbers. Until ``pack``, words are searched
        without an index.
        """
        import pyarrow as pa

        before, analyze = self.at(self.version).lance, self.passage_terms
        place = before.schema.get_field_index("terms")

        def batches() -> Iterator[Any]:
            for batch in before.search().to_batches(READ_ROWS):
                texts = map(searched, *(batch.column(c).to_pylist() for c in ("id", "passage")))
                terms = [" ".join(analyze(text)) for text in texts]
                yield batch.set_column(place, before.schema.field(place), pa.array(terms))

        with lance_errors(self.folder):
            reader = pa.RecordBatchReader.from_batches(before.schema, batches())
            self.database.create_table(TABLE, reader, mode="overwrite")

    def is_worth_packing(self, changed: int) -> bool:
        """Whether chunks have changed and ``pack`` is either cheap or needed for fast searches."""
        size = len(self)
        return changed > (0 if size < EXACT_BELOW else min(UNPACKED, size // PACKED_SHARE))

    def pack(self) -> None:
        """Pack the table, update its indices, and make missing ones."""
        from lancedb.index import FTS, Bitmap, BTree, HnswFlat, HnswSq, IvfRq

        is_large = len(self) >= EXACT_BELOW
        # Terms are only split at spaces.
        words = FTS(
            base_tokenizer="whitespace",
            lower_case=False,
            stem=False,
            remove_stop_words=False,
            ascii_folding=False,
            max_token_length=None,
        )
        configs: dict[str, Any] = {"id": BTree(), "terms": words}
        if is_large:
            for name, kind in self.info.columns.items():
                configs[name] = Bitmap() if kind == "bool" else BTree()
            vectors = {"binary": IvfRq, "int8": HnswSq, "float32": HnswFlat}
            # The inner product of unit vectors is their cosine.
            configs["vector"] = vectors[self.info.settings.vectors](distance_type="dot")
        with lance_errors(self.folder):
            present = {column for index in self.lance.list_indices() for column in index.columns}
            if not is_large:  # an updated index of words would still count deleted rows
                present.discard("terms")
            missing = {name: config for name, config in configs.items() if name not in present}
            with progress_bar("packing", "part", total=2 + len(missing)) as shown:
                self.lance.optimize(cleanup_older_than=NEVER)
                shown.update()
                for column, config in missing.items():
                    self.lance.create_index(column, config=config, replace=True)
                    shown.update()
                # Joins fragments that the indices know by now.
                self.lance.optimize(cleanup_older_than=NEVER)
                shown.update()

    def clean(self) -> None:
        """Remove all versions but the last, which the state must name: if this is killed, files of
        the others may be missing. A process that reads one of these opens the last one instead.
        """
        with lance_errors(self.folder):
            # Other writers are locked out: files without a version are those of a killed run.
            age = timedelta(milliseconds=1)
            self.lance.optimize(cleanup_older_than=age, delete_unverified=True)


@contextmanager
def _unchecked_calls() -> Iterator[None]:
    """Keep pydantic from preparing checks of functions' arguments.

    LanceDB 0.40 always imports a REST client that nothing here calls. Preparing its checks takes
    0.3 of the 1.4 s of a search from cold by a static index.
    """
    import pydantic

    def unchecked(function: Any = None, **_: Any) -> Any:
        return function or unchecked

    checked = pydantic.validate_call
    pydantic.validate_call = unchecked
    try:
        yield
    finally:
        pydantic.validate_call = checked


def as_stored(vectors_ND: Vectors, info: Info, folder: Path) -> Vectors:
    """Vectors as an index stores them, (N, W): truncated to its width."""
    vectors_NW = shortened(np.ascontiguousarray(vectors_ND, np.float32), info.settings.dimensions)
    if vectors_NW.shape[1] != info.width:
        raise RevelaError(
            f"the model gives {vectors_NW.shape[1]} dimensions and {folder} holds "
            f"{info.width}: index again"
        )
    return vectors_NW


@contextmanager
def lance_errors(folder: Path, where: str = "", columns: Iterable[str] = ()) -> Iterator[None]:
    """Turn LanceDB's errors into a QueryError if the filter ``where`` is at fault, otherwise into a
    RevelaError about a full disk or damaged files.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, LANCE_ERRORS) and type(error).__name__ != PANIC:
            raise
        if sentence := disk_error(error, folder):
            raise RevelaError(sentence) from error
        reason = " ".join(_SOURCE.sub("", str(error)).split())[:300]
        if where and not isinstance(error, OSError) and not _FILES.search(reason):
            why = _PREAMBLE.split(reason)[-1].split(". Valid fields")[0].rstrip(".)")
            names = ", ".join([*HIT_COLUMNS, *columns])
            raise QueryError(
                f'the filter "{own_filter(where)[:80]}" cannot be used ({why}): '
                f"compare columns of this index, which are {names}",
                "where",
            ) from error
        raise RevelaError(
            f"{folder} is damaged or cannot be read ({reason}): "
            "correct that, or make it again with revela index"
        ) from error
