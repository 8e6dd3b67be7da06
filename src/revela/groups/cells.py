"""Groups of chunks that somebody else has put into cells: clusters by faiss, cuVS or NeMo Curator.

A row of Parquet is a chunk: id (of its document), text, a cell (a whole number), and as there may
be title, chunk (its number in the document) and vector; ``revela encode`` writes all but the cell.
The chunks of a cell are ordered so that similar ones are neighbours (similar.py), and cut into
groups; no group has chunks of two cells. What is left over of a cell is left out, and counted.

Shapes: N rows, W numbers of a vector, size chunks a group.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from revela.corpus.arrow_list import ArrowList, arrow_list, vectors_on_disk
from revela.corpus.parts import Piece, parts_of
from revela.corpus.read import check_report
from revela.corpus.readers.common import ReadReport, suffix
from revela.corpus.readers.rows import ID_FIELDS
from revela.corpus.words import count_words
from revela.errors import RevelaError, first_line
from revela.groups.folder import (
    BLOCK,
    KEPT,
    GroupFolder,
    Member,
    batched,
    finish_folder,
    new_folder,
    refuse_out,
    write_shards,
)
from revela.groups.similar import order_by_similarity
from revela.settings import Recipe
from revela.types import Document, Vectors, hash64
from revela.weights import find_weights

log = logging.getLogger(__name__)

READ_ROWS = 4096  # decoded at a time
VECTOR, CHUNK = "vector", "chunk"


@dataclass(frozen=True)
class Rows:
    """Some rows of a file, all of them valid.

    Args:
        ids: of their documents.
        numbers: of the chunks in their documents.
        titles, texts: of the chunks.
        documents: 63 bits of a hash of each id.
        cells: (N,) int64.
        vectors: (N, W) float32, if the file has some.
    """

    ids: list[str]
    numbers: list[int]
    titles: list[str]
    texts: list[str]
    documents: NDArray[np.int64]
    cells: NDArray[np.int64]
    vectors: Vectors | None

    def some(self, which: NDArray[np.int64]) -> Rows:
        """These of them."""
        return Rows(
            [self.ids[i] for i in which],
            [self.numbers[i] for i in which],
            [self.titles[i] for i in which],
            [self.texts[i] for i in which],
            self.documents[which],
            self.cells[which],
            None if self.vectors is None else self.vectors[which],
        )

    @property
    def keys(self) -> NDArray[np.uint64]:
        """A hash of each id and number."""
        pairs = zip(self.ids, self.numbers, strict=True)
        return np.array([hash64(f"{name}\0{number}") for name, number in pairs], np.uint64)

    @property
    def members(self) -> Iterator[Member]:
        columns = zip(self.documents.tolist(), self.texts, self.titles, self.ids, strict=True)
        return (Member(owner, text, "", title or name) for owner, text, title, name in columns)


@dataclass(frozen=True)
class CellReader:
    """How rows are read.

    Args:
        cell: the column of the cell.
        text, title: columns.
    """

    cell: str
    text: str = "text"
    title: str = "title"

    def rows(self, piece: Piece, report: ReadReport) -> Iterator[Rows]:
        """The valid rows of a Parquet file, or of some of its row groups.

        Raises:
            RevelaError: the file is no Parquet, lacks a column, has cells that are no whole
                numbers, or a vector that is not finite or of another width.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        path, name = piece.file.path, piece.file.name
        if suffix(path) != ".parquet":
            raise RevelaError(f"{path}: cells are read from Parquet; give such files or folders")
        try:
            with pa.OSFile(os.fsencode(path)) as source, pq.ParquetFile(source) as file:
                names = file.schema_arrow.names
                columns = self._columns(names, path)
                before = sum(
                    file.metadata.row_group(i).num_rows
                    for i in range(piece.groups.start if piece.groups else 0)
                )
                for batch in file.iter_batches(READ_ROWS, piece.groups, columns):
                    yield self._valid(batch, f"{name}:{{}}", before, path, report)
                    before += len(batch)
        except (OSError, pa.ArrowException) as error:
            reason = first_line(error)
            raise RevelaError(f"{path} cannot be read ({reason}): get a whole copy") from error

    def _columns(self, names: Sequence[str], path: Path) -> list[str]:
        missing = [name for name in (self.text, self.cell) if name not in names]
        has_id = [name for name in ID_FIELDS if name in names]
        if missing or not has_id:
            raise RevelaError(
                f'{path} has no column "{(missing or ["id"])[0]}", but {", ".join(names)}: name '
                "others with --cells and --text-field, or write it"
            )
        wanted = (has_id[0], self.text, self.title, CHUNK, self.cell, VECTOR)
        return [name for name in dict.fromkeys(wanted) if name in names]

    def _valid(self, batch: Any, where: str, before: int, path: Path, report: ReadReport) -> Rows:
        ids = batch.column(0).to_pylist()
        cells, known = _whole_numbers(batch.column(self.cell), path, self.cell)
        texts = batch.column(self.text).to_pylist()
        kept = []
        for i, (name, text) in enumerate(zip(ids, texts, strict=True)):
            place = where.format(before + i + 1)
            if name is None:
                report.skip("no id", place, bad=True)
            elif not isinstance(text, str) or not text.strip():
                report.skip(f'no text in "{self.text}"', place, bad=True)
            elif not known[i]:
                report.skip("no cell", place, bad=True)
            else:
                kept.append(i)
        some = batch.take(np.array(kept, np.int64))
        names = some.schema.names
        titles = some.column(self.title).to_pylist() if self.title in names else []
        chosen = [str(ids[i]) for i in kept]
        report.documents += len(kept)
        report.words += sum(count_words(texts[i]) for i in kept)
        return Rows(
            chosen,
            some.column(CHUNK).to_pylist() if CHUNK in names else [0] * len(kept),
            [title or "" for title in titles] or [""] * len(kept),
            [texts[i] for i in kept],
            np.array([hash64(name) >> 1 for name in chosen], np.int64),
            cells[kept],
            _vectors(some.column(VECTOR), path) if VECTOR in names else None,
        )


def _whole_numbers(
    column: Any, path: Path, name: str
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """A column as int64, and where it has a value; floats may be whole, as pandas writes them."""
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        if pa.types.is_floating(column.type):
            column = pc.if_else(pc.is_nan(column), None, column)
        numbers = pc.cast(column, pa.int64())
    except (pa.ArrowException, TypeError) as error:
        raise RevelaError(
            f'{path}: column "{name}" holds {column.type}, and a cell is a whole number: name '
            "another with --cells"
        ) from error
    return pc.fill_null(numbers, 0).to_numpy(), pc.is_valid(numbers).to_numpy(zero_copy_only=False)


def _vectors(column: Any, path: Path) -> Vectors:
    """A column of lists as (N, W)."""
    import pyarrow as pa
    import pyarrow.compute as pc

    widths = pc.unique(pc.list_value_length(column)).to_pylist()
    if len(column) and (len(widths) != 1 or not widths[0]):
        raise RevelaError(
            f"{path} has vectors of {' and '.join(map(str, widths))} numbers: encode all of the "
            "corpus with one model"
        )
    numbers = pc.cast(pc.list_flatten(column), pa.float32()).to_numpy(zero_copy_only=False)
    if not np.isfinite(numbers).all():
        raise RevelaError(f"{path} has a vector that is not finite: encode the corpus again")
    vectors: Vectors = numbers.reshape(len(column), -1) if len(column) else np.zeros((0, 0), "f4")
    return vectors


def refuse_other_width(vectors: Vectors, width: int, path: Path) -> None:
    if vectors.shape[1] != width:
        raise RevelaError(
            f"{path} has vectors of {vectors.shape[1]} numbers, others of {width}: encode all of "
            "the corpus with one model"
        )


def refuse_rows(parts: Iterator[Rows], keys: frozenset[int]) -> None:
    """Name a row with one of the keys that stand twice."""
    for rows in parts:
        for name, key in zip(rows.ids, rows.keys.tolist(), strict=True):
            if key in keys:
                raise RevelaError(
                    f'two rows have the id "{name}" and the same chunk: give each chunk its own '
                    f'number in a column "{CHUNK}", or drop one'
                )


@dataclass
class CellCount:
    """How many chunks became groups, and what was left out."""

    cells: int = 0
    groups: int = 0
    left_out: int = 0
    small: int = 0
    largest: int = 0

    def add(self, other: CellCount) -> None:
        self.cells += other.cells
        self.groups += other.groups
        self.left_out += other.left_out
        self.small += other.small
        self.largest = max(self.largest, other.largest)

    def say(self, size: int, chunks: int) -> None:
        log.info(
            f"{self.cells:,} cells, the largest of {self.largest:,} of {chunks:,} chunks -> "
            f"{self.groups:,} groups; {self.left_out:,} chunks left out, for which no group of "
            f"their cell has room ({self.small:,} cells have fewer than {size})"
        )


@dataclass(frozen=True)
class Grouping:
    """What of a recipe groups of cells depend on: chunks a group, most members of a cluster, seed;
    without its objective, which imports torch.
    """

    size: int
    cluster_size: int
    seed: int

    @classmethod
    def of(cls, recipe: Recipe) -> Grouping:
        size = recipe.groups.group_size
        return cls(size, recipe.groups.cluster_size or size, recipe.training.seed)


def cell_groups(
    vectors: Vectors,
    cells: NDArray[np.int64],
    keys: NDArray[np.uint64],
    rows: NDArray[np.int64],
    how: Grouping,
    count: CellCount,
) -> Iterator[list[int]]:
    """Groups of rows of one cell each; the same for the same cell, in whatever order its rows come.

    Args:
        vectors: (N, W), which may lie on disk.
        cells: (N,).
        keys: (N,), of ids and numbers of chunks.
        rows: indices of the rows to group.
        how: the sizes, and the seed.
        count: is brought up to date.
    """
    size, seed = how.size, how.seed
    order = rows[np.lexsort((keys[rows], cells[rows]))]
    kinds, starts = np.unique(cells[order], return_index=True)
    for cell, start, end in zip(kinds, starts, [*starts[1:], len(order)], strict=True):
        members = order[start:end]
        own = int(cell) % 2**63
        whole, left_out = divmod(len(members), size)
        count.add(CellCount(1, whole, left_out, not whole, len(members)))
        if not whole:
            continue
        similar = order_by_similarity(vectors, None, how.cluster_size, [seed, own], members)
        similar = np.roll(similar, -random.Random(f"{seed}/{own}").randrange(size))
        for first in range(0, len(similar) - size + 1, size):
            yield np.sort(similar[first : first + size]).tolist()


@dataclass
class CellCorpus:
    """Rows of Parquet files with cells, by one process: texts and vectors lie on disk.

    Raises:
        RevelaError: they cannot be read, too many are bad, or two are the same.
    """

    sources: Sequence[Path]
    reader: CellReader
    max_bad_share: float
    report: ReadReport = field(default_factory=ReadReport)

    def __post_init__(self) -> None:
        self.pieces = [piece for part in parts_of(self.sources, self.report) for piece in part]
        found: list[tuple[NDArray[Any], ...]] = []
        self.rows: ArrowList[Member] = arrow_list(Member, self._members(found))
        check_report(len(self.rows), self.report, self.sources, self.max_bad_share)
        columns = [np.concatenate(some) for some in zip(*found, strict=True)]
        self.documents, self.cells, self.keys = columns
        numbers, counts = np.unique(self.keys, return_counts=True)
        if (counts > 1).any():
            self._refuse_repeated(frozenset(numbers[counts > 1][:10].tolist()))

    def _members(self, found: list[tuple[NDArray[Any], ...]]) -> Iterator[Member]:
        self._vectors: Vectors | None = None
        start = 0
        for piece in self.pieces:
            for rows in self.reader.rows(piece, self.report):
                found.append((rows.documents, rows.cells, rows.keys))
                if rows.vectors is not None and len(rows.cells):
                    if self._vectors is None:
                        self._vectors = vectors_on_disk(self._at_most, rows.vectors.shape[1])
                    refuse_other_width(rows.vectors, self._vectors.shape[1], piece.file.path)
                    self._vectors[start : start + len(rows.cells)] = rows.vectors
                start += len(rows.cells)
                yield from rows.members

    @cached_property
    def _at_most(self) -> int:
        """Rows of all files."""
        import pyarrow.parquet as pq

        return sum(pq.read_metadata(piece.file.path).num_rows for piece in self.pieces)

    def _refuse_repeated(self, keys: frozenset[int]) -> None:
        for piece in self.pieces:
            refuse_rows(self.reader.rows(piece, ReadReport()), keys)

    def vectors(self, recipe: Recipe) -> Vectors:
        """Those of the files; or, if they have none, by the surrogate or by words."""
        if self._vectors is not None:
            return self._vectors
        from revela.groups.order import similar_vectors
        from revela.retriever.build import untrained_retriever

        folder = find_weights(recipe.retriever.model, recipe.retriever.offline_model)
        texts = arrow_list(Document, (Document("", row.text) for row in self.rows))
        rows: Any = self.rows
        return similar_vectors(recipe, rows, lambda: untrained_retriever(recipe, folder, texts))[0]

    def whole(self, chosen: NDArray[np.int64]) -> list[Document]:
        """These documents, by their hashes, with their chunks in order."""
        read = (rows for piece in self.pieces for rows in self.reader.rows(piece, ReadReport()))
        return whole_documents(read, chosen)


def whole_documents(parts: Iterator[Rows], chosen: NDArray[np.int64]) -> list[Document]:
    """Documents joined of their chunks, in the order of their hashes."""
    wanted = set(chosen.tolist())
    found: dict[int, list[tuple[int, str, str, str]]] = {}
    for rows in parts:
        columns = zip(rows.numbers, rows.ids, rows.titles, rows.texts, strict=True)
        for owner, row in zip(rows.documents.tolist(), columns, strict=True):
            if owner in wanted:
                found.setdefault(owner, []).append(row)
    documents = []
    for owner in sorted(found):
        rows_ = sorted(found[owner])
        _, name, title, _ = rows_[0]
        documents.append(Document(name, " ".join(text.strip() for *_, text in rows_), title))
    return documents


def chosen_documents(
    recipe: Recipe, owners: NDArray[np.int64], count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Documents that are held out, and those that are kept whole beside the groups, by hash: the
    first ones, as hashes are random.

    Args:
        recipe: how many are held out.
        owners: hashes in order, all or the first ``needed_of`` them.
        count: of all documents.
    """
    held = min(recipe.corpus.held_out_at_most, int(recipe.corpus.held_out * count))
    return owners[:held], owners[held : held + KEPT]


def needed_of(recipe: Recipe) -> int:
    """How many hashes ``chosen_documents`` reads."""
    return recipe.corpus.held_out_at_most + KEPT


def groups_of_cells(
    recipe: Recipe, sources: Sequence[Path], out: Path, cell: str, shards: int
) -> GroupFolder:
    """Read chunks in cells, group those of each cell, and store the groups.

    Args:
        recipe: how.
        sources: Parquet files, or folders of them.
        out: a folder that does not exist yet.
        cell: column of the cell.
        shards: number of files; 0: as many as usual.
    """
    refuse_out(recipe, out)
    reader = CellReader(cell, recipe.corpus.text_field, recipe.corpus.title_field)
    corpus = CellCorpus(sources, reader, recipe.corpus.max_bad_share)
    for line in corpus.report.lines("chunks"):
        log.info(line)
    owners = np.unique(corpus.documents)
    held, sample = chosen_documents(recipe, owners, len(owners))
    kept = np.flatnonzero(~np.isin(corpus.documents, held))
    count, size = CellCount(), recipe.groups.group_size
    vectors = corpus.vectors(recipe)
    groups = cell_groups(vectors, corpus.cells, corpus.keys, kept, Grouping.of(recipe), count)
    blocks = (
        corpus.rows.take(np.array(some).ravel(), ["document", "text", "query", "name"])
        for some in batched(groups, max(1, BLOCK // size))
    )
    with new_folder(out) as folder:
        made = write_shards(folder, blocks, size, shards)
        count.say(size, len(corpus.rows))
        if not made:
            raise no_groups(size)
        settings = settings_of(recipe, sources, len(owners) - len(held), cell)
        finish_folder(folder, made, size, corpus.whole(sample), corpus.whole(held), settings)
    return GroupFolder(out)


def no_groups(size: int) -> RevelaError:
    return RevelaError(f"no cell has {size} chunks: lower --group-size")


def settings_of(
    recipe: Recipe, sources: Sequence[Path], documents: int, cell: str
) -> dict[str, Any]:
    """What the manifest says of the groups."""
    return {
        "sources": [str(source) for source in sources],
        "shares": [],
        "documents": documents,
        "corpora": [],
        "groups": ["cells"] * len(sources),
        "cells": cell,
        "objective": recipe.objective.name,
        "surrogate": recipe.groups.surrogate,
        "seed": recipe.training.seed,
    }
