"""The LanceDB table of an index: one row per chunk. The only file that imports LanceDB.

A change is one commit, so a kill leaves all of it or nothing. Replacing documents takes two: the
new rows are added, then the former ones deleted. A file beside the table names the documents until
that is done.

Shapes: N rows, W numbers of a stored vector.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from revela.errors import QueryError, RevelaError
from revela.files import atomic_write, disk_error
from revela.index.fusion import Ranking
from revela.index.language import ENGLISH_STOP_WORDS, QUERY_WORDS, Terms
from revela.index.manifest import Calibration, Info
from revela.index.term_stats import TermCounts
from revela.silence import progress_bar
from revela.types import Encoder, Value, Vectors, evenly_spaced

TABLE = "chunks"
REPLACING = "replacing.json"  # id -> digest of the documents of a commit that replaces some
HIT_COLUMNS = ("id", "chunk", "title", "passage")  # columns of a hit, before those of metadata
RESERVED = (*HIT_COLUMNS, "terms", "digest", "vector", "tokens")
EXACT_BELOW = 20_000  # chunks; from there on, vectors are searched by an approximate index
VECTOR_INDEX = "IVF_RQ"  # Lance's name of the index of binary vectors; the other forms have HNSW
CELLS = 20  # cells of the approximate index that a query reads
CANDIDATES = 200  # minimum number of candidates that are scored again by their stored vectors
LOOKED_UP = 1000  # ids in one filter
READ_ROWS = 2**14  # rows per batch when all passages are read
# Changed chunks before a large table is packed, and the minimum that a commit counts as: a search
# takes 3 us more for each, as its words are read, and .3 ms for the file of a commit.
UNPACKED, COMMIT = 2000, 100
KEEP_VERSIONS = timedelta(days=1)  # for readers that opened the table before it was packed
# LanceDB splits terms at spaces and changes nothing. In indices of earlier versions it finds the
# words of passages itself.
TOKENIZER: dict[str, Any] = dict(
    base_tokenizer="whitespace",
    lower_case=False,
    stem=False,
    remove_stop_words=False,
    ascii_folding=False,
    max_token_length=None,
)
FORMER_TOKENIZER = TOKENIZER | dict(
    base_tokenizer="simple",
    lower_case=True,
    stem=True,
    remove_stop_words=True,
    custom_stop_words=ENGLISH_STOP_WORDS,
)


class Table:
    """The rows of one index, in the LanceDB table ``lance``.

    Reading and writing raise RevelaError where files are damaged.
    """

    def __init__(self, folder: Path, info: Info, lance: Any) -> None:
        self.folder, self.info, self.lance = folder, info, lance
        former = info.language is None
        self._searched = "passage" if former else "terms"  # by words
        self._tokenizer = FORMER_TOKENIZER if former else TOKENIZER

    @cached_property
    def passage_terms(self) -> Terms:
        return self.info.analyzer()

    @cached_property
    def query_terms(self) -> Terms:
        return self.info.analyzer(QUERY_WORDS)

    @classmethod
    def open(cls, folder: Path, info: Info, create: bool = False) -> Table:
        """Open a table; ``create`` makes an empty one if there is none with a version."""
        # Hides warnings for programmers; read when LanceDB is imported.
        os.environ.setdefault("LANCEDB_LOG", "error")
        with _unchecked_calls():
            import lancedb

        with lance_errors(folder):
            database = lancedb.connect(folder, read_consistency_interval=timedelta(0))
            if create and not any(Path(table_uri(folder), "_versions").glob("*.manifest")):
                made = database.create_table(TABLE, schema=_schema(info), mode="overwrite")
                return cls(folder, info, made)
            return cls(folder, info, database.open_table(TABLE))

    def __len__(self) -> int:
        return int(self.lance.count_rows())

    @property
    def version(self) -> int:
        """Number of the current commit."""
        return int(self.lance.version)

    # Read

    def nearest(self, vector: Vectors, depth: int, where: str = "") -> Ranking:
        """The ``depth`` rows nearest to a unit vector (W,), by cosine."""
        query = self.lance.search(vector, vector_column_name="vector", query_type="vector")
        # More cells are read where a filter leaves too few rows in these; candidates are scored
        # again by their stored vectors.
        query = query.distance_type("dot").minimum_nprobes(CELLS).maximum_nprobes(0)
        query = query.refine_factor(-(-CANDIDATES // depth))
        return self._ranking(query, depth, where, "_distance", lambda distance: 1.0 - distance)

    def matching(self, text: str, depth: int, where: str = "") -> Ranking:
        """The ``depth`` best rows that hold terms of the text, by BM25."""
        from lancedb.query import MatchQuery

        if self._searched == "terms":
            text = " ".join(self.query_terms(text))
        if not text:
            return {}
        query = self.lance.search(MatchQuery(text, self._searched), query_type="fts")
        return self._ranking(query, depth, where, "_score", float)

    def _ranking(
        self, query: Any, depth: int, where: str, column: str, score: Callable[[float], float]
    ) -> Ranking:
        query = query.limit(depth).select(["id", column]).with_row_id(True)
        with lance_errors(self.folder, where, self.info.columns):
            found = (query.where(where) if where else query).to_arrow()
        rows, documents, values = (found[n].to_pylist() for n in ("_rowid", "id", column))
        return dict(zip(rows, zip(documents, map(score, values), strict=True), strict=True))

    def rows(self, numbers: Sequence[int], names: Sequence[str] = ()) -> dict[int, dict[str, Any]]:
        """Columns of these rows, by default of a hit; a row that is gone is missing."""
        names = list(names) or [*HIT_COLUMNS, *self.info.columns]
        if not numbers:
            return {}
        with lance_errors(self.folder):
            found = self.lance.take_row_ids(list(numbers)).select(names).with_row_id().to_list()
        return {row["_rowid"]: row for row in found}

    def document(self, name: str) -> list[dict[str, Any]]:
        """The rows of a document by its id, in order, with the columns of a hit."""
        query = self.lance.search().where(id_filter([name]))
        with lance_errors(self.folder):
            rows = query.select([*HIT_COLUMNS, *self.info.columns]).to_list()
        return sorted(rows, key=lambda row: int(row["chunk"]))

    def cosines(self, numbers: Sequence[int], vector: Vectors) -> dict[int, float]:
        """The cosine of each of these rows with a unit vector (W,); KeyError if one is gone."""
        with lance_errors(self.folder):
            taken = self.lance.take_row_ids(list(numbers)).select(["vector"])
            found = taken.with_row_id().to_arrow()
        products = (self._matrix(found["vector"]) @ vector).tolist()
        cosines = dict(zip(found["_rowid"].to_pylist(), products, strict=True))
        return {row: cosines[row] for row in numbers}

    def frozen(self) -> Table:
        """The table as it is now, for ``digests`` and ``find`` while documents are added.

        Nearly all ids of a large table are in its index, so a look-up does not slow down.
        """
        from lancedb.index import BTree

        with lance_errors(self.folder):
            if len(self) >= EXACT_BELOW:
                indices = self.lance.list_indices()
                known = next((i.name for i in indices if i.columns == ["id"]), None)
                if not known or self.lance.index_stats(known).num_unindexed_rows > UNPACKED:
                    self.lance.create_index("id", config=BTree(), replace=True)
        return self.at(self.version)

    def at(self, version: int) -> Table:
        """The table as it was at a version, to be read only."""
        import lancedb

        with lance_errors(self.folder):
            former = lancedb.connect(self.folder).open_table(TABLE)
            former.checkout(version)
        return Table(self.folder, self.info, former)

    def digests(self, documents: Sequence[str]) -> dict[str, str]:
        """The digest of each of these documents that the table holds, by id."""
        found = dict[str, str]()
        with lance_errors(self.folder):
            for where in self.id_filters(documents):
                # Not "and chunk = 0": to read one more column of scattered rows takes thrice as
                # long as to read the digests of all chunks.
                rows = self.lance.search().where(where).select(["id", "digest"]).to_arrow()
                found |= dict(zip(rows["id"].to_pylist(), rows["digest"].to_pylist(), strict=True))
        return found

    def terms(self, rows: range | None = None) -> Iterator[list[str]]:
        """The terms of each row, or of each of these, counted from the first."""
        query = self.lance.search()
        if rows is not None:
            query = query.offset(rows.start).limit(len(rows))
        return (terms for _, terms in self._numbered_terms(query))

    def find(self, documents: Sequence[str]) -> tuple[list[int], TermCounts]:
        """The numbers of the rows of these documents, and their terms."""
        queries = (self.lance.search().where(where) for where in self.id_filters(documents))
        found = [row for query in queries for row in self._numbered_terms(query)]
        return [number for number, _ in found], TermCounts.of(terms for _, terms in found)

    def _numbered_terms(self, query: Any) -> Iterator[tuple[int, list[str]]]:
        """The number of each row of a query, and its terms."""
        find = str.split if self._searched == "terms" else self.passage_terms
        query = query.select([self._searched]).with_row_id(True)
        with lance_errors(self.folder):
            for batch in query.to_batches(READ_ROWS):
                texts = batch.column(self._searched).to_pylist()
                yield from zip(batch.column("_rowid").to_pylist(), map(find, texts), strict=True)

    @staticmethod
    def id_filters(documents: Sequence[str]) -> list[str]:
        """SQL filters that hold for the rows of these documents, some documents each."""
        starts = range(0, len(documents), LOOKED_UP)
        return [id_filter(documents[start : start + LOOKED_UP]) for start in starts]

    def calibrate(self, encoder: Encoder) -> Calibration:
        """Measure words and vectors on a sample of the rows."""
        from revela.index.calibration import SentenceTest

        kept = ["tokens"] if self.info.settings.keep_tokens else []
        rows = self.sample("passage", "vector", *kept)
        test = SentenceTest(rows["passage"].to_pylist(), self.info.language or "en")
        packed = rows["tokens"].to_pylist() if kept else []
        return test(encoder, self._matrix(rows["vector"]), scored=True, packed=packed)

    def sample(self, *columns: str) -> Any:
        """At most a thousand rows, evenly spaced, in Arrow."""
        with lance_errors(self.folder):
            taken = self.lance.take_offsets(evenly_spaced(len(self)).tolist() if len(self) else [])
            return taken.select(list(columns)).to_arrow()

    def _matrix(self, column: Any) -> Vectors:
        numbers: Vectors = column.combine_chunks().flatten().to_numpy()
        return numbers.reshape(-1, self.info.width)

    # Change

    def write(self, rows: Any, former: Collection[int]) -> None:
        """Add ``arrow_rows``, all chunks of some documents, and delete the former rows of these."""
        if former:
            digests = dict(zip(rows["id"].to_pylist(), rows["digest"].to_pylist(), strict=True))
            with atomic_write(self.folder / REPLACING) as temporary:
                temporary.write_text(json.dumps(digests), encoding="utf-8")
        with lance_errors(self.folder):
            self.lance.add(rows)
        if former:
            self.delete(former)
            (self.folder / REPLACING).unlink()

    def settle(self) -> None:
        """Delete the former rows that a killed process has left of documents it replaced."""
        if not (file := self.folder / REPLACING).is_file():
            return
        digests = json.loads(file.read_text(encoding="utf-8"))
        written, old = set[str](), list[dict[str, Any]]()
        with lance_errors(self.folder):
            for where in self.id_filters(list(digests)):
                query = self.lance.search().where(where).select(["id", "digest"])
                for row in query.with_row_id(True).to_list():
                    if row["digest"] == digests[row["id"]]:
                        written.add(row["id"])
                    else:
                        old.append(row)
        self.delete([row["_rowid"] for row in old if row["id"] in written])
        file.unlink()

    def delete(self, numbers: Collection[int]) -> None:
        """Delete these rows, in one commit."""
        if numbers:
            with lance_errors(self.folder):
                self.lance.delete(f"_rowid in ({', '.join(map(str, numbers))})")

    def is_worth_packing(self, changes: int) -> bool:
        """Whether ``pack`` is cheap, or searches are slower by these changes of chunks."""
        return len(self) < EXACT_BELOW or changes > UNPACKED

    def pack(self, new: bool) -> None:
        """Pack the table and bring its indices up to date; make those that are missing.

        ``new``: nobody reads the table yet, so former versions are deleted at once.
        """
        from lancedb.index import FTS, Bitmap, BTree, HnswFlat, HnswSq, IvfRq

        vector_index = {"binary": IvfRq, "int8": HnswSq, "float32": HnswFlat}
        configs = {
            "BTREE": BTree(),
            "BITMAP": Bitmap(),
            "INVERTED": FTS(**self._tokenizer),
            # By inner product of unit vectors throughout, so that scores are cosines.
            VECTOR_INDEX: vector_index[self.info.settings.vectors](distance_type="dot"),
        }
        with lance_errors(self.folder):
            missing = self._missing()
            with progress_bar("packing", "part", total=1 + len(missing)) as shown:
                # The lock keeps other writers away, so what no version holds is a killed run's.
                self.lance.optimize(
                    cleanup_older_than=timedelta(milliseconds=1) if new else KEEP_VERSIONS,
                    delete_unverified=True,
                )
                shown.update()
                for column, kind in missing.items():
                    self.lance.create_index(column, config=configs[kind])
                    shown.update()

    def missing_indices(self) -> list[tuple[str, str, dict[str, Any]]]:
        """The indices that ``pack`` makes: column, kind and options, as Lance names them."""
        # LanceDB's own choice is one bit, on which lance_ray and pylance disagree. As many cells as
        # LanceDB's, of 256 vectors at least, without which lance_ray makes none.
        cells = max(1, min(int(len(self) ** 0.5), len(self) // 256))
        options: dict[str, dict[str, Any]] = {
            "INVERTED": self._tokenizer,
            VECTOR_INDEX: {"metric": "dot", "num_bits": 1, "num_partitions": cells},
        }
        return [(column, kind, options.get(kind, {})) for column, kind in self._missing().items()]

    def _missing(self) -> dict[str, str]:
        """Column -> kind of its missing index; a large table has more."""
        wanted = {"id": "BTREE", self._searched: "INVERTED"}
        if len(self) >= EXACT_BELOW:
            for name, kind in self.info.columns.items():
                wanted[name] = "BITMAP" if kind == "bool" else "BTREE"
            wanted["vector"] = VECTOR_INDEX
        present = {column for index in self.lance.list_indices() for column in index.columns}
        return {column: kind for column, kind in wanted.items() if column not in present}


@contextmanager
def _unchecked_calls() -> Iterator[None]:
    """While open, pydantic prepares no checks of functions' arguments.

    LanceDB 0.40 always imports a client of REST servers, which nothing here calls. Without its
    checks a search of a static index from cold takes 1.1 s of one core instead of 1.4.
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


def table_uri(folder: Path) -> str:
    """Where the table of an index is, for programs that know Lance."""
    return str(folder / f"{TABLE}.lance")


def as_stored(vectors: Vectors, info: Info, folder: Path) -> Vectors:
    """(N, D) vectors as an index stores them, (N, W): shortened if it is so made."""
    vectors = shortened(np.ascontiguousarray(vectors, np.float32), info.settings.dimensions)
    if vectors.shape[1] != info.width:
        raise RevelaError(
            f"the model gives {vectors.shape[1]} dimensions and {folder} holds "
            f"{info.width}: index again"
        )
    return vectors


def shortened(vectors_ND: Vectors, width: int) -> Vectors:
    """The first ``width`` dimensions, of length one again, (N, W); all of them for 0."""
    if not 0 < width < vectors_ND.shape[1]:
        return vectors_ND
    cut_NW = vectors_ND[:, :width]
    lengths_N1 = np.linalg.norm(cut_NW, axis=1, keepdims=True)
    return np.asarray(cut_NW / np.maximum(lengths_N1, 1e-12), np.float32)


def arrow_rows(
    info: Info,
    columns: Mapping[str, Sequence[Value | None]],
    vectors: Vectors,
    tokens: Sequence[bytes] | None,
) -> Any:
    """Rows in Arrow, of values by column, unit vectors (N, W) and, if kept, ``packed_signs``."""
    import pyarrow as pa

    schema = _schema(info)
    names = [name for name in schema.names if name in columns]
    arrays = {name: pa.array(columns[name], schema.field(name).type) for name in names}
    if tokens is not None:
        arrays["tokens"] = pa.array(tokens, pa.binary())
    numbers = pa.array(vectors.ravel())
    arrays["vector"] = pa.FixedSizeListArray.from_arrays(numbers, info.width)
    return pa.table(arrays, schema=schema)


def _schema(info: Info) -> Any:
    import pyarrow as pa

    columns = {
        "id": pa.string(),
        "chunk": pa.int32(),
        "title": pa.string(),
        "passage": pa.string(),
        "digest": pa.string(),
        "vector": pa.list_(pa.float32(), info.width),
    }
    if info.language is not None:
        columns["terms"] = pa.string()
    if info.settings.keep_tokens:
        columns["tokens"] = pa.binary()
    kinds = {name: pa.type_for_alias(kind) for name, kind in info.columns.items()}
    return pa.schema(columns | kinds)


def id_filter(documents: Iterable[str]) -> str:
    """SQL that holds for the rows of these documents."""
    quoted = ("'{}'".format(name.replace("'", "''")) for name in documents)
    return f"id in ({', '.join(quoted)})"


LANCE_ERRORS = (ValueError, RuntimeError, OSError)
PANIC = "RustPanic"  # of damaged files; its module is made by Rust and cannot be imported
_FILES = re.compile(r"\(IO\)|Not found:|panicked")  # are at fault, and not the filter
_SOURCE = re.compile(r",? ?/\S+\.rs:\d+:\d+.*", re.DOTALL)
_PREAMBLE = re.compile(r"(?:Schema error|sql parser error|Invalid user input|Invalid input)[:,] ")


@contextmanager
def lance_errors(folder: Path, where: str = "", columns: Iterable[str] = ()) -> Iterator[None]:
    """Turn LanceDB's errors into one sentence: a QueryError if the filter ``where`` is at fault, a
    RevelaError about a full disk or damaged files otherwise.
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
                f'the filter "{where[:80]}" cannot be used ({why}): '
                f"compare columns of this index, which are {names}"
            ) from error
        raise RevelaError(
            f"{folder} is damaged or out of reach ({reason}): "
            "mend that, or make it again with revela index"
        ) from error
