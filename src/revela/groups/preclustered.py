"""Groups of chunks that somebody else has clustered: with faiss, cuVS or NeMo Curator.

A row of Parquet is a chunk: the id of its document, its text, its cluster (a whole number) and
optionally its title, its number in the document (``chunk``) and its vector. ``revela encode``
writes all but the cluster. Each cluster is ordered by similarity (similar.py) and cut into groups;
what is left over is counted.

Tasks run in this process or on Ray: ``survey`` counts, ``partition`` deals whole clusters to
shards, ``group`` orders and cuts the clusters of a shard.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from revela import on_ray
from revela.corpus.load import check_report
from revela.corpus.parts import Part, parts_of
from revela.corpus.readers import File
from revela.corpus.readers.common import ReadReport, suffix
from revela.corpus.readers.rows import ID_FIELDS
from revela.corpus.words import count_words
from revela.errors import RevelaError, first_line
from revela.files import atomic_write, disk_errors
from revela.groups.similarity import order_by_similarity
from revela.groups.store import (
    BLOCK,
    KEPT,
    SHARDS,
    GroupFolder,
    batched,
    check_out,
    finish_folder,
    shard_name,
)
from revela.settings import Recipe
from revela.types import Document, Vectors, hash64

log = logging.getLogger(__name__)

READ_ROWS = 4096  # decoded at a time
VECTOR, CHUNK = "vector", "chunk"

Run = Callable[[Callable[[Part], Any], Sequence[Part]], Iterable[Any]]
"""Runs a task on each part, in order."""


@dataclass(frozen=True)
class RowReader:
    """Reads rows of Parquet; ``cluster``, ``text`` and ``title`` are names of columns."""

    cluster: str
    text: str = "text"
    title: str = "title"

    def tables(self, part: Part, report: ReadReport) -> Iterator[Any]:
        """The valid rows of a part as Arrow tables with the columns document (63 bits of a hash of
        the id), id, title, chunk, text, cluster and, if the file has it, vector.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        for piece in part:
            path = piece.file.path
            if suffix(path) != ".parquet":
                raise RevelaError(f"{path}: clusters are read from Parquet; give files of it")
            try:
                with pa.OSFile(os.fsencode(path)) as source, pq.ParquetFile(source) as file:
                    columns = self._columns(file.schema_arrow.names, path)
                    first = piece.groups.start if piece.groups else 0
                    before = sum(file.metadata.row_group(i).num_rows for i in range(first))
                    for batch in file.iter_batches(READ_ROWS, piece.groups, columns):
                        if len(rows := self._valid(batch, piece.file, before, report)):
                            yield rows
                        before += len(batch)
            except (OSError, pa.ArrowException) as error:
                reason = first_line(error)
                raise RevelaError(f"{path} cannot be read ({reason}): get a whole copy") from error

    def _columns(self, names: Sequence[str], path: Path) -> list[str]:
        """The columns to read, the id first."""
        missing = [name for name in (self.text, self.cluster) if name not in names]
        has_id = [name for name in ID_FIELDS if name in names]
        if missing or not has_id:
            raise RevelaError(
                f'{path} has no column "{(missing or ["id"])[0]}", but {", ".join(names)}: name '
                "others with --cluster-column and --text-field, or write it"
            )
        wanted = (has_id[0], self.text, self.title, CHUNK, self.cluster, VECTOR)
        return [name for name in dict.fromkeys(wanted) if name in names]

    def _valid(self, batch: Any, file: File, before: int, report: ReadReport) -> Any:
        """The rows that have an id, a text and a cluster; the others are reported."""
        import pyarrow as pa
        import pyarrow.compute as pc

        names, empty = batch.schema.names, pa.repeat("", len(batch))
        ids = batch.column(0).cast(pa.string())
        texts = batch.column(self.text).cast(pa.large_string())
        titles = batch.column(self.title).cast(pa.string()) if self.title in names else empty
        clusters = _whole_numbers(batch.column(self.cluster), file.path, self.cluster)
        columns = {
            "document": np.array([hash64(str(each)) >> 1 for each in ids.to_pylist()], np.int64),
            "id": ids,
            "title": pc.fill_null(titles, ""),
            CHUNK: batch.column(CHUNK).cast(pa.int64()) if CHUNK in names else [0] * len(batch),
            "text": texts,
            "cluster": clusters,
        }
        if VECTOR in names:
            columns[VECTOR] = _vectors(batch.column(VECTOR), file.path)
        has_text = pc.fill_null(pc.not_equal(pc.utf8_trim_whitespace(texts), ""), False)
        valid = pc.and_(has_text, pc.and_(pc.is_valid(ids), pc.is_valid(clusters)))
        for i in np.flatnonzero(~valid.to_numpy(zero_copy_only=False)):
            report.skip("no id, text or cluster", f"{file.name}:{before + i + 1}", bad=True)
        rows = pa.table(columns).filter(valid)
        report.documents += len(rows)
        report.words += sum(map(count_words, rows["text"].to_pylist()))
        return rows


def _whole_numbers(column: Any, path: Path, name: str) -> Any:
    """A column as int64 with nulls; floats may be whole, as pandas writes them."""
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        if pa.types.is_floating(column.type):
            column = pc.if_else(pc.is_nan(column), None, column)
        return pc.cast(column, pa.int64())
    except (pa.ArrowException, TypeError) as error:
        raise RevelaError(
            f'{path}: column "{name}" holds {column.type}, and a cluster is a whole number: name '
            "another with --cluster-column"
        ) from error


def _vectors(column: Any, path: Path) -> Any:
    """A column of lists as lists of one width, of float32."""
    import pyarrow as pa
    import pyarrow.compute as pc

    widths = pc.unique(pc.list_value_length(column)).to_pylist() or [1]
    if len(widths) != 1 or not widths[0]:
        raise RevelaError(
            f"{path} has vectors of {' and '.join(map(str, widths))} numbers: encode all of the "
            "corpus with one model"
        )
    numbers = pc.cast(pc.list_flatten(column), pa.float32())
    if not pc.all(pc.is_finite(numbers), min_count=0).as_py():
        raise RevelaError(f"{path} has a vector that is not finite: encode the corpus again")
    return pa.FixedSizeListArray.from_arrays(numbers, widths[0])


def _matrix(column: Any) -> Vectors:
    """A column of lists of one width as (rows, width)."""
    flat = [np.zeros(0, np.float32), *(chunk.flatten().to_numpy() for chunk in column.chunks)]
    vectors: Vectors = np.concatenate(flat).reshape(-1, column.type.list_size)
    return vectors


@dataclass
class Survey:
    """What a part of a corpus holds."""

    report: ReadReport = field(default_factory=ReadReport)
    owners: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    "The first hashes of documents, in order."
    documents: int = 0
    widths: dict[int, Path] = field(default_factory=dict)
    "Of vectors, 0 for none, with a file that has it."

    def add(self, other: Survey, owners: int) -> None:
        """Add another part, and keep so many owners."""
        self.report.add(other.report)
        self.owners = np.union1d(self.owners, other.owners)[:owners]
        self.documents += other.documents
        self.widths |= other.widths


@dataclass(frozen=True)
class Tasks:
    """The work, and what every process knows for it. A recipe is not sent: it imports torch."""

    reader: RowReader
    group_size: int
    seed: int
    owners: int  # hashes of documents that a survey keeps
    folder: Path
    shards: int
    held_out: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    encode: Callable[[Sequence[str]], Vectors] | None = None  # where rows have no vectors

    def survey(self, part: Part) -> Survey:
        found = Survey()
        for piece in part:
            for rows in self.reader.tables((piece,), found.report):
                width = rows[VECTOR].type.list_size if VECTOR in rows.column_names else 0
                some = Survey(
                    owners=np.unique(rows["document"].to_numpy()),
                    documents=int((rows[CHUNK].to_numpy() == 0).sum()),
                    widths={width: piece.file.path},
                )
                found.add(some, self.owners)
        return found

    def documents(self, part: Part, chosen: NDArray[np.int64]) -> list[Any]:
        """The rows of these documents, without vectors."""
        columns = ["document", CHUNK, "id", "title", "text"]
        return [
            rows.filter(np.isin(rows["document"].to_numpy(), chosen)).select(columns)
            for rows in self.reader.tables(part, ReadReport())
        ]

    def partition(self, part: Part) -> Iterator[Any]:
        """The rows that are trained on, with the shard of each."""
        for rows in self.reader.tables(part, ReadReport()):
            rows = rows.filter(~np.isin(rows["document"].to_numpy(), self.held_out))
            clusters = rows["cluster"].to_pylist()
            shards = np.array([hash64(str(c)) % self.shards for c in clusters], np.int64)
            yield rows.append_column("shard", [shards])

    def group(self, rows: Any) -> tuple[str, Counter[str]]:
        """Group the clusters of a shard, and write its file; its name, and what was made."""
        import pyarrow as pa
        import pyarrow.compute as pc

        name, made = shard_name(rows["shard"][0].as_py(), self.shards), Counter[str]()
        groups = list(self._groups(rows, made))
        names = pc.if_else(pc.equal(rows["title"], ""), rows["id"], rows["title"])
        columns = {"document": rows["document"], "text": rows["text"]}
        members = pa.table({**columns, "query": pa.repeat("", len(rows)), "name": names})
        schema = members.schema.set(1, pa.field("text", pa.string()))
        if not groups:
            return name, made
        with atomic_write(self.folder / name) as path, pa.ipc.new_stream(path, schema) as writer:
            for some in batched(groups, max(1, BLOCK // self.group_size)):
                writer.write_table(members.take(pa.array(np.ravel(some))).cast(schema))
        return name, made

    def _groups(self, rows: Any, made: Counter[str]) -> Iterator[list[int]]:
        """Groups of rows of one cluster each; the same in whatever order the rows come."""
        encode = self.encode
        vectors = encode(rows["text"].to_pylist()) if encode else _matrix(rows[VECTOR])
        clusters, document, chunk = (
            rows[name].to_numpy() for name in ("cluster", "document", CHUNK)
        )
        order = np.lexsort((chunk, document, clusters))
        kinds, starts = np.unique(clusters[order], return_index=True)
        size, seed = self.group_size, self.seed
        for kind, members in zip(kinds.tolist(), np.split(order, starts[1:]), strict=True):
            whole, left_out = divmod(len(members), size)
            made.update(clusters=1, groups=whole, left_out=left_out, small=not whole)
            if not whole:
                continue
            own = kind % 2**63
            similar = order_by_similarity(vectors, None, self.group_size, [seed, own], members)
            similar = np.roll(similar, -random.Random(f"{seed}/{own}").randrange(size))
            for first in range(0, whole * size, size):
                yield np.sort(similar[first : first + size]).tolist()


def shuffled_on_disk(
    items: Iterable[Any],
    read: Callable[[Any], Iterator[Any]],
    key: str,
    work: Callable[[Any], Any],
    parts: int,
) -> Iterator[Any]:
    """As ``on_ray.shuffled``, in this process: by way of a temporary file for each value."""
    import pyarrow as pa
    import pyarrow.compute as pc

    with tempfile.TemporaryDirectory(prefix="revela-") as folder, disk_errors(Path(folder)):
        writers: dict[int, Any] = {}
        with ExitStack() as opened:
            for item in items:
                for table in read(item):
                    for value in pc.unique(table[key]).to_pylist():
                        if value not in writers:
                            stream = pa.ipc.new_stream(f"{folder}/{value}", table.schema)
                            writers[value] = opened.enter_context(stream)
                        writers[value].write_table(table.filter(pc.equal(table[key], value)))
        for value in sorted(writers):
            with pa.memory_map(f"{folder}/{value}") as file:
                yield work(pa.ipc.open_stream(file).read_all())


def groups_of_clusters(
    recipe: Recipe, sources: Sequence[Path], out: Path, column: str, shards: int, ray: bool = False
) -> GroupFolder:
    """Read clustered chunks, group those of each cluster, and store the groups.

    Args:
        out: a folder that does not exist yet.
        column: of the cluster.
        shards: number of files; 0: as many as usual. Some may be missing, for few clusters.
        ray: run the tasks on Ray, which is connected.
    """
    check_out(recipe, out)
    corpus, size = recipe.corpus, recipe.groups.group_size
    run: Run = on_ray.in_tasks if ray else map
    shuffled = on_ray.shuffled if ray else shuffled_on_disk
    report, made, counts = ReadReport(), Counter[str](), dict[str, int]()
    parts = parts_of(sources, report)
    with atomic_write(out) as folder:
        folder.mkdir()
        tasks = Tasks(
            RowReader(column, corpus.text_field, corpus.title_field),
            size,
            recipe.training.seed,
            owners=corpus.held_out_at_most + KEPT,
            folder=folder.resolve(),
            shards=shards or SHARDS,
        )
        found = Survey(report)
        for survey in run(tasks.survey, parts):
            found.add(survey, tasks.owners)
        check_report(report.documents, report, sources, corpus.max_bad_share)
        for line in report.lines("chunks"):
            log.info(line)
        _check_vectors(found.widths, needed=ray)
        held_out = min(corpus.held_out_at_most, int(corpus.held_out * found.documents))
        tasks = replace(tasks, held_out=found.owners[:held_out])
        if 0 in found.widths:
            from revela.groups.order import passage_encoder  # imports torch

            tasks = replace(tasks, encode=passage_encoder(recipe))
        for name, some in shuffled(parts, tasks.partition, "shard", tasks.group, tasks.shards):
            made.update(some)
            if some["groups"]:
                counts[name] = some["groups"]
        log.info(
            f"{report.documents:,} chunks in {made['clusters']:,} clusters -> {made['groups']:,} "
            f"groups; {made['left_out']:,} chunks left out, for which no group of their cluster "
            f"has room ({made['small']:,} clusters have fewer than {size})"
        )
        if not counts:
            raise RevelaError(f"no cluster has {size} chunks: lower --group-size")
        whole = _documents(tasks, run, parts, found.owners[: held_out + KEPT])
        settings = {
            "sources": [str(source) for source in sources],
            "shares": [],
            "documents": found.documents - held_out,
            "corpora": [],
            "groups": ["cells"] * len(sources),
            "cells": column,
            "objective": recipe.objective.name,
            "surrogate": recipe.groups.surrogate,
            "seed": recipe.training.seed,
        }
        finish_folder(folder, counts, size, whole[held_out:], whole[:held_out], settings)
    return GroupFolder(out)


def _check_vectors(widths: Mapping[int, Path], needed: bool) -> None:
    """Refuse vectors of several widths, and missing ones if some are there or all are needed."""
    if 0 in widths and (needed or len(widths) > 1):
        raise RevelaError(
            f'{widths[0]} has no vectors: write a column "{VECTOR}" with revela encode, or leave '
            "away --engine ray and all vectors"
        )
    if len(widths) > 1:
        (one, _), (other, path), *_ = widths.items()
        raise RevelaError(
            f"{path} has vectors of {other} numbers, others of {one}: encode all of the corpus "
            "with one model"
        )


def _documents(
    tasks: Tasks, run: Run, parts: Sequence[Part], chosen: NDArray[np.int64]
) -> list[Document]:
    """These documents joined of their chunks, in the order of their hashes."""
    import pyarrow as pa

    found = run(functools.partial(tasks.documents, chosen=chosen), parts)
    table = pa.concat_tables(itertools.chain.from_iterable(found))
    rows = table.sort_by([("document", "ascending"), (CHUNK, "ascending")]).to_pylist()
    documents = (list(some) for _, some in itertools.groupby(rows, lambda row: row["document"]))
    return [
        Document(chunks[0]["id"], " ".join(c["text"].strip() for c in chunks), chunks[0]["title"])
        for chunks in documents
    ]
