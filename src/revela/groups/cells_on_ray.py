"""``revela groups --cells --engine ray``: cells are grouped by many processes, a shard each.

A shard holds whole cells, chosen by a hash, so that its rows fit into one process's memory; a cell
that is too large for that is divided by k-means first.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from revela import on_ray
from revela.corpus.parts import Part, parts_of
from revela.corpus.read import check_report
from revela.corpus.readers.common import ReadReport
from revela.errors import RevelaError
from revela.files import atomic_write
from revela.groups.cells import (
    CellCount,
    CellReader,
    Grouping,
    Rows,
    cell_groups,
    chosen_documents,
    needed_of,
    no_groups,
    refuse_rows,
    settings_of,
    whole_documents,
)
from revela.groups.folder import (
    SHARDS,
    GroupFolder,
    finish_folder,
    new_folder,
    refuse_out,
    shard_name,
)
from revela.groups.similar import SAMPLE, centroids
from revela.settings import Recipe
from revela.types import Document, Vectors, hash64

log = logging.getLogger(__name__)

LARGEST = 10**5  # chunks of a cell that is never divided


@dataclass
class Survey:
    """What a part of a corpus holds.

    Args:
        report: what was read and skipped.
        owners: the first hashes of documents.
        documents: rows that begin one.
        cells: rows of each cell.
        widths: of vectors, 0 for none, with a file that has it.
    """

    report: ReadReport = field(default_factory=ReadReport)
    owners: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    documents: int = 0
    cells: dict[int, int] = field(default_factory=dict)
    widths: dict[int, Path] = field(default_factory=dict)

    def add(self, other: Survey, needed: int) -> None:
        self.report.add(other.report)
        self.owners = np.union1d(self.owners, other.owners)[:needed]
        self.documents += other.documents
        for cell, count in other.cells.items():
            self.cells[cell] = self.cells.get(cell, 0) + count
        self.widths = {**other.widths, **self.widths}


@dataclass(frozen=True)
class Job:
    """What every process knows.

    Args:
        how: groups are made.
        reader: how rows are read.
        needed: first hashes of documents, to choose some.
        folder: of the groups.
        shards: how many files.
        held: documents that are held out, by hash.
        parts_of_cells: (K, W) for each cell that is divided: the centres of its parts.
    """

    how: Grouping
    reader: CellReader
    needed: int
    folder: Path
    shards: int
    held: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    parts_of_cells: Mapping[int, Vectors] = field(default_factory=dict)

    def rows(self, part: Part, report: ReadReport) -> Iterator[Rows]:
        for piece in part:
            yield from self.reader.rows(piece, report)

    def survey(self, part: Part) -> tuple[Survey, Any]:
        """What a part holds; and the keys of its rows."""
        found = Survey()
        keys = [np.zeros(0, np.uint64)]
        for piece in part:
            for rows in self.reader.rows(piece, found.report):
                cells, counts = np.unique(rows.cells, return_counts=True)
                width = 0 if rows.vectors is None else rows.vectors.shape[1]
                some = Survey(
                    owners=np.unique(rows.documents),
                    documents=sum(number == 0 for number in rows.numbers),
                    cells=dict(zip(cells.tolist(), counts.tolist(), strict=True)),
                    widths={width: piece.file.path} if rows.ids else {},
                )
                found.add(some, self.needed)
                keys.append(rows.keys)
        return found, np.concatenate(keys)

    def refuse(self, part: Part, keys: frozenset[int]) -> tuple[None, None]:
        refuse_rows(self.rows(part, ReadReport()), keys)
        return None, None

    def whole(self, part: Part, chosen: NDArray[np.int64]) -> tuple[list[Rows], None]:
        """The rows of these documents."""
        found = []
        for rows in self.rows(part, ReadReport()):
            mine = np.flatnonzero(np.isin(rows.documents, chosen))
            found.append(rows.some(mine))
        return found, None

    def sample(self, part: Part, shares: Mapping[int, float]) -> tuple[dict[int, Vectors], None]:
        """A share of the vectors of these cells."""
        rng = np.random.default_rng(hash64(str(part[0].file.path)))
        found: dict[int, list[Vectors]] = {cell: [] for cell in shares}
        for rows in self.rows(part, ReadReport()):
            assert rows.vectors is not None
            drawn = rng.random(len(rows.cells))
            for cell, share in shares.items():
                found[cell].append(rows.vectors[(rows.cells == cell) & (drawn < share)])
        return {cell: np.concatenate(some) for cell, some in found.items()}, None

    def tables(self, part: Part) -> Iterator[Any]:
        """Rows that are trained on, with the shard of each."""
        import pyarrow as pa

        for all_rows in self.rows(part, ReadReport()):
            rows = all_rows.some(np.flatnonzero(~np.isin(all_rows.documents, self.held)))
            cells, vectors = self._divided(rows), rows.vectors
            assert vectors is not None
            numbers = pa.array(vectors.ravel(), pa.float32())
            members = list(rows.members)
            yield pa.table(
                {
                    "shard": np.array([hash64(str(c)) % self.shards for c in cells], np.int64),
                    "cell": cells,
                    "key": rows.keys,
                    "document": rows.documents,
                    "text": pa.array([member.text for member in members], pa.string()),
                    "query": pa.array([member.query for member in members], pa.string()),
                    "name": pa.array([member.name for member in members], pa.string()),
                    "vector": pa.FixedSizeListArray.from_arrays(numbers, vectors.shape[1]),
                }
            )

    def _divided(self, rows: Rows) -> NDArray[np.int64]:
        """The cells of rows, with the parts of a divided one as cells of their own."""
        cells = rows.cells.copy()
        for cell, centres in self.parts_of_cells.items():
            mine = np.flatnonzero(rows.cells == cell)
            assert rows.vectors is not None
            products = rows.vectors[mine] @ centres.T - (centres**2).sum(axis=1) / 2
            names = [hash64(f"{cell}/{part}") >> 1 for part in range(len(centres))]
            cells[mine] = np.array(names, np.int64)[products.argmax(axis=1)]
        return cells

    def write(self, table: Any) -> on_ray.Row:
        """Group the cells of a shard, and write its file."""
        import pyarrow as pa

        count = CellCount()
        name = shard_name(table["shard"][0].as_py(), self.shards)
        vectors = table["vector"].combine_chunks()
        flat = vectors.flatten().to_numpy().reshape(len(table), -1)
        cells, keys = table["cell"].to_numpy(), table["key"].to_numpy()
        rows = np.arange(len(table))
        groups = list(cell_groups(flat, cells, keys, rows, self.how, count))
        if groups:
            members = table.select(["document", "text", "query", "name"])
            members = members.take(np.array(groups).ravel()).combine_chunks()
            with (
                atomic_write(self.folder / name) as temporary,
                pa.ipc.new_stream(temporary, members.schema) as writer,
            ):
                writer.write_table(members)
        return {"name": name, "count": count}


def groups_of_cells(
    recipe: Recipe, sources: Sequence[Path], out: Path, cell: str, shards: int
) -> GroupFolder:
    """``cells.groups_of_cells``, by a cluster that is connected.

    Args:
        recipe, sources, out, cell: as there.
        shards: number of files; 0: as many as usual. Some may be missing, for few cells.

    Raises:
        RevelaError: as there; or the rows have no vectors.
    """
    refuse_out(recipe, out)
    report = ReadReport()
    parts = parts_of(sources, report)
    reader = CellReader(cell, recipe.corpus.text_field, recipe.corpus.title_field)
    with new_folder(out) as folder:
        how, needed = Grouping.of(recipe), needed_of(recipe)
        job = Job(how, reader, needed, folder.resolve(), shards or SHARDS)
        found = _surveyed(job, parts, report)
        check_report(found.report.documents, found.report, sources, recipe.corpus.max_bad_share)
        _refuse_vectors(found.widths)
        if max(found.cells.values()) < (size := recipe.groups.group_size):
            raise no_groups(size)
        for line in found.report.lines("chunks"):
            log.info(line)
        chunks = found.report.documents
        held, sample = chosen_documents(recipe, found.owners, found.documents)
        divided = _centres(job, parts, found.cells, max(LARGEST, chunks // job.shards))
        job = replace(job, held=held, parts_of_cells=divided)
        count, counts = CellCount(), {}
        for row in on_ray.shuffled(parts, job.tables, "shard", job.write, job.shards):
            count.add(row["count"])
            if row["count"].groups:
                counts[row["name"]] = row["count"].groups
        count.say(size, chunks)
        if not counts:
            raise no_groups(size)
        settings = settings_of(recipe, sources, found.documents - len(held), cell)
        whole, withheld = (_whole(job, parts, some) for some in (sample, held))
        finish_folder(folder, counts, size, whole, withheld, settings)
    return GroupFolder(out)


def _surveyed(job: Job, parts: Sequence[Part], report: ReadReport) -> Survey:
    """What a corpus holds.

    Raises:
        RevelaError: rows are there twice, or cannot be read.
    """
    found, keys = Survey(report), []
    for some, mine in on_ray.in_tasks(job.survey, parts):
        found.add(some, job.needed)
        keys.append(mine)
    if twice := on_ray.repeated(keys, found.report.documents):
        refuse = functools.partial(job.refuse, keys=frozenset(twice))
        for _ in on_ray.in_tasks(refuse, parts):
            pass
    return found


def _refuse_vectors(widths: Mapping[int, Path]) -> None:
    """Refuse vectors that are missing or differ in width."""
    if 0 in widths:
        raise RevelaError(
            f"{widths[0]} has no vectors: --engine ray groups cells by a column vector, which "
            "revela encode writes"
        )
    if len(widths) > 1:
        (one, _), (other, path), *_ = widths.items()
        raise RevelaError(
            f"{path} has vectors of {other} numbers, others of {one}: encode all of the corpus "
            "with one model"
        )


def _centres(
    job: Job, parts: Sequence[Part], cells: Mapping[int, int], most: int
) -> dict[int, Vectors]:
    """The centres of the parts of each cell that has more than ``most`` rows."""
    large = {cell: count for cell, count in cells.items() if count > most}
    if not large:
        return {}
    log.info(f"{len(large):,} cells of more than {most:,} chunks are divided")
    shares = {cell: min(1.0, SAMPLE / count) for cell, count in large.items()}
    drawn: dict[int, list[Vectors]] = {cell: [] for cell in large}
    sample = functools.partial(job.sample, shares=shares)
    for some, _ in on_ray.in_tasks(sample, parts):
        for cell, vectors in some.items():
            drawn[cell].append(vectors)
    return {
        cell: centroids(np.concatenate(drawn[cell]), -(-2 * count // most), job.how.seed)
        for cell, count in large.items()
    }


def _whole(job: Job, parts: Sequence[Part], chosen: NDArray[np.int64]) -> list[Document]:
    whole = functools.partial(job.whole, chosen=chosen)
    found = (rows for some, _ in on_ray.in_tasks(whole, parts) for rows in some)
    return whole_documents(found, chosen)
