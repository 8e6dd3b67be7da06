"""Group chunks that another program has clustered: faiss, cuVS or NeMo Curator.

A row of Parquet is a chunk: the id of its document, its text, its cluster (an integer) and
optionally its title, its number in the document (``chunk``) and its vector. ``revela encode``
writes all of them except the cluster. Each cluster is ordered by similarity (similarity.py) and cut
into groups; the remainder is left out, and counted.

Tasks run in this process or on Ray: ``survey`` counts, ``partition`` assigns whole clusters to
shards, ``group`` orders and cuts the clusters of a shard.
"""

from __future__ import annotations

import functools
import itertools
import logging
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
from revela.corpus.endings import suffix
from revela.corpus.load import check_report
from revela.corpus.parts import Part, parts_of
from revela.corpus.readers import File
from revela.corpus.readers.common import ReadReport
from revela.corpus.readers.rows import ID_FIELDS
from revela.corpus.readers.tables import parquet_batches, refuse_damage
from revela.corpus.words import count_words
from revela.errors import RevelaError
from revela.files import atomic_write, disk_errors
from revela.groups.similarity import order_by_similarity
from revela.groups.store import (
    BLOCK,
    SAMPLE_SIZE,
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

READ_ROWS = 4096  # rows decoded at a time
VECTOR, CHUNK = "vector", "chunk"

Run = Callable[[Callable[[Part], Any], Sequence[Part]], Iterable[Any]]
"""Runs a task on each part, in order."""


@dataclass(frozen=True)
class RowReader:
    """Reads rows of Parquet; ``cluster``, ``text`` and ``title`` are column names."""

    cluster: str
    text: str = "text"
    title: str = "title"

    def tables(self, part: Part, report: ReadReport) -> Iterator[Any]:
        """The valid rows of a part as Arrow tables.

        Columns: document (a 63-bit hash of the id), id, title, chunk, text, cluster; and vector if
        the file has it.
        """
        for piece in part:
            path = piece.file.path
            if suffix(path) != ".parquet":
                raise RevelaError(f"{path}: clusters are read from Parquet; give files of it")
            columns = functools.partial(self._columns, path)
            with refuse_damage(path):
                for before, batch in parquet_batches(path, columns, READ_ROWS, piece.row_groups):
                    if len(rows := self._valid_rows(batch, piece.file, before, report)):
                        yield rows

    def _columns(self, path: Path, schema: Any) -> list[str]:
        """The columns to read, the id first."""
        names = schema.names
        missing = [name for name in (self.text, self.cluster) if name not in names]
        id_columns = [name for name in ID_FIELDS if name in names]
        if missing or not id_columns:
            raise RevelaError(
                f'{path} has no column "{(missing or ["id"])[0]}", but {", ".join(names)}: name '
                "others with --cluster-column and --text-field, or write it"
            )
        columns = (id_columns[0], self.text, self.title, CHUNK, self.cluster, VECTOR)
        return [name for name in dict.fromkeys(columns) if name in names]

    def _valid_rows(self, batch: Any, file: File, before: int, report: ReadReport) -> Any:
        """The rows with an id, a text and a cluster; others are reported."""
        import pyarrow as pa
        import pyarrow.compute as pc

        names, empty = batch.schema.names, pa.repeat("", len(batch))
        ids = batch.column(0).cast(pa.string())
        texts = batch.column(self.text).cast(pa.large_string())
        titles = batch.column(self.title).cast(pa.string()) if self.title in names else empty
        clusters = _whole_numbers(batch.column(self.cluster), file.path, self.cluster)
        columns = {
            "document": np.array([hash64(str(id_)) >> 1 for id_ in ids.to_pylist()], np.int64),
            "id": ids,
            "title": pc.fill_null(titles, ""),
            CHUNK: batch.column(CHUNK).cast(pa.int64()) if CHUNK in names else [0] * len(batch),
            "text": texts,
            "cluster": clusters,
        }
        if VECTOR in names:
            columns[VECTOR] = _fixed_width(batch.column(VECTOR), file.path)
        has_text = pc.fill_null(pc.not_equal(pc.utf8_trim_whitespace(texts), ""), False)
        valid = pc.and_(has_text, pc.and_(pc.is_valid(ids), pc.is_valid(clusters)))
        for i in np.flatnonzero(~valid.to_numpy(zero_copy_only=False)):
            report.skip("no id, text or cluster", f"{file.name}:{before + i + 1}", bad=True)
        rows = pa.table(columns).filter(valid)
        report.documents += len(rows)
        report.words += sum(map(count_words, rows["text"].to_pylist()))
        return rows


def _whole_numbers(column: Any, path: Path, name: str) -> Any:
    """A column as int64 with nulls; pandas writes integers with nulls as floats."""
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


def _fixed_width(column: Any, path: Path) -> Any:
    """A column of lists of one width, in float32."""
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


@dataclass
class Survey:
    """Counts of a part of a corpus."""

    report: ReadReport = field(default_factory=ReadReport)
    documents: int = 0
    lowest_hashes: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    "The lowest hashes of documents, sorted."
    files_of_width: dict[int, Path] = field(default_factory=dict)
    "Width of vectors -> a file that has it; 0: without vectors."

    def add(self, other: Survey, n_hashes: int) -> None:
        """Add another part's counts, and keep the ``n_hashes`` lowest hashes."""
        self.report.add(other.report)
        self.documents += other.documents
        self.lowest_hashes = np.union1d(self.lowest_hashes, other.lowest_hashes)[:n_hashes]
        self.files_of_width |= other.files_of_width


@dataclass(frozen=True)
class Tasks:
    """The tasks, with the settings that workers need. (Not a recipe, which imports torch.)"""

    reader: RowReader
    group_size: int
    seed: int
    n_hashes: int  # hashes that a survey keeps
    folder: Path
    shards: int
    held_out: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    encode: Callable[[Sequence[str]], Vectors] | None = None  # for rows without vectors

    def survey(self, part: Part) -> Survey:
        total = Survey()
        for piece in part:
            for rows in self.reader.tables((piece,), total.report):
                width = rows[VECTOR].type.list_size if VECTOR in rows.column_names else 0
                survey = Survey(
                    documents=int((rows[CHUNK].to_numpy() == 0).sum()),
                    lowest_hashes=np.unique(rows["document"].to_numpy()),
                    files_of_width={width: piece.file.path},
                )
                total.add(survey, self.n_hashes)
        return total

    def documents(self, part: Part, hashes: NDArray[np.int64]) -> list[Any]:
        """The rows of these documents, without vectors."""
        columns = ["document", CHUNK, "id", "title", "text"]
        return [
            rows.filter(np.isin(rows["document"].to_numpy(), hashes)).select(columns)
            for rows in self.reader.tables(part, ReadReport())
        ]

    def partition(self, part: Part) -> Iterator[Any]:
        """The rows that are not held out, with a column "shard"."""
        for rows in self.reader.tables(part, ReadReport()):
            rows = rows.filter(~np.isin(rows["document"].to_numpy(), self.held_out))
            clusters = rows["cluster"].to_pylist()
            shards = np.array([hash64(str(c)) % self.shards for c in clusters], np.int64)
            yield rows.append_column("shard", [shards])

    def group(self, rows: Any) -> tuple[str, Counter[str]]:
        """Write the groups of a shard's clusters; returns the file's name and counts."""
        import pyarrow as pa
        import pyarrow.compute as pc

        name, counts = shard_name(rows["shard"][0].as_py(), self.shards), Counter[str]()
        groups = list(self._groups(rows, counts))
        if not groups:
            return name, counts
        names = pc.if_else(pc.equal(rows["title"], ""), rows["id"], rows["title"])
        columns = {"document": rows["document"], "text": rows["text"]}
        members = pa.table({**columns, "query": pa.repeat("", len(rows)), "name": names})
        schema = members.schema.set(1, pa.field("text", pa.string()))
        with atomic_write(self.folder / name) as path, pa.ipc.new_stream(path, schema) as writer:
            for batch in batched(groups, max(1, BLOCK // self.group_size)):
                writer.write_table(members.take(pa.array(np.ravel(batch))).cast(schema))
        return name, counts

    def _groups(self, rows: Any, counts: Counter[str]) -> Iterator[list[int]]:
        """Groups of row indices, each within one cluster; they do not depend on the rows' order."""
        if self.encode:
            vectors_RD = self.encode(rows["text"].to_pylist())
        else:
            lists = rows[VECTOR].combine_chunks()
            vectors_RD = lists.flatten().to_numpy().reshape(-1, lists.type.list_size)
        clusters, document, chunk = (
            rows[name].to_numpy() for name in ("cluster", "document", CHUNK)
        )
        order = np.lexsort((chunk, document, clusters))
        labels, starts = np.unique(clusters[order], return_index=True)
        size, seed = self.group_size, self.seed
        for label, members in zip(labels.tolist(), np.split(order, starts[1:]), strict=True):
            n_groups, left_out = divmod(len(members), size)
            counts.update(clusters=1, groups=n_groups, left_out=left_out, small=not n_groups)
            if not n_groups:
                continue
            own_seed = label % 2**63
            similar = order_by_similarity(vectors_RD, None, size, [seed, own_seed], members)
            similar = np.roll(similar, -random.Random(f"{seed}/{own_seed}").randrange(size))
            for start in range(0, n_groups * size, size):
                yield np.sort(similar[start : start + size]).tolist()


def shuffled_on_disk(
    items: Iterable[Any],
    read: Callable[[Any], Iterator[Any]],
    key: str,
    work: Callable[[Any], Any],
    parts: int,
) -> Iterator[Any]:
    """``on_ray.shuffled`` in this process, with a temporary file for each value of ``key``."""
    import pyarrow as pa
    import pyarrow.compute as pc

    with tempfile.TemporaryDirectory(prefix="revela-") as folder, disk_errors(Path(folder)):
        writers: dict[int, Any] = {}
        with ExitStack() as stack:
            for item in items:
                for table in read(item):
                    for value in pc.unique(table[key]).to_pylist():
                        if value not in writers:
                            stream = pa.ipc.new_stream(f"{folder}/{value}", table.schema)
                            writers[value] = stack.enter_context(stream)
                        writers[value].write_table(table.filter(pc.equal(table[key], value)))
        for value in sorted(writers):
            with pa.memory_map(f"{folder}/{value}") as file:
                yield work(pa.ipc.open_stream(file).read_all())


def groups_of_clusters(
    recipe: Recipe, sources: Sequence[Path], out: Path, column: str, shards: int, ray: bool = False
) -> GroupFolder:
    """Read clustered chunks, group those of each cluster, and store the groups.

    Args:
        out: a new folder.
        column: name of the column of clusters.
        shards: maximum number of files, 0: ``SHARDS``. Few clusters may give fewer.
        ray: run the tasks on Ray, which must be connected.
    """
    check_out(recipe, out)
    corpus, size = recipe.corpus, recipe.groups.group_size
    run: Run = on_ray.in_tasks if ray else map
    shuffled = on_ray.shuffled if ray else shuffled_on_disk
    report, totals, groups_of_file = ReadReport(), Counter[str](), dict[str, int]()
    parts = parts_of(sources, report)
    with atomic_write(out) as folder:
        folder.mkdir()
        tasks = Tasks(
            RowReader(column, corpus.text_field, corpus.title_field),
            size,
            recipe.training.seed,
            n_hashes=corpus.held_out_at_most + SAMPLE_SIZE,
            folder=folder.resolve(),
            shards=shards or SHARDS,
        )
        survey = Survey(report)
        for part_survey in run(tasks.survey, parts):
            survey.add(part_survey, tasks.n_hashes)
        check_report(report.documents, report, sources, corpus.max_bad_share)
        for line in report.lines("chunk"):
            log.info(line)
        _check_vectors(survey.files_of_width, required=ray)
        n_held_out = min(corpus.held_out_at_most, int(corpus.held_out * survey.documents))
        tasks = replace(tasks, held_out=survey.lowest_hashes[:n_held_out])
        if 0 in survey.files_of_width:
            from revela.groups.order import passage_encoder  # imports torch

            tasks = replace(tasks, encode=passage_encoder(recipe))
        for name, counts in shuffled(parts, tasks.partition, "shard", tasks.group, tasks.shards):
            totals.update(counts)
            if counts["groups"]:
                groups_of_file[name] = counts["groups"]
        log.info(
            f"{report.documents:,} chunks in {totals['clusters']:,} clusters -> "
            f"{totals['groups']:,} groups; {totals['left_out']:,} chunks left out, the remainders "
            f"of their clusters ({totals['small']:,} clusters have fewer than {size} chunks)"
        )
        if not groups_of_file:
            raise RevelaError(f"no cluster has {size} chunks: lower --group-size")
        documents = _documents(tasks, run, parts, survey.lowest_hashes[: n_held_out + SAMPLE_SIZE])
        settings = {
            "sources": [str(source) for source in sources],
            "shares": [],
            "documents": survey.documents - n_held_out,
            "corpora": [],
            "groups": ["cells"] * len(sources),
            "cells": column,
            "objective": recipe.objective.name,
            "surrogate": recipe.groups.surrogate,
            "seed": recipe.training.seed,
        }
        held_out, sample = documents[:n_held_out], documents[n_held_out:]
        finish_folder(folder, groups_of_file, size, sample, held_out, settings)
    return GroupFolder(out)


def _check_vectors(files_of_width: Mapping[int, Path], required: bool) -> None:
    """Raise RevelaError for vectors of several widths; also for missing ones, if ``required`` or if
    other files have vectors.
    """
    if 0 in files_of_width and (required or len(files_of_width) > 1):
        raise RevelaError(
            f'{files_of_width[0]} has no vectors: write a column "{VECTOR}" with revela encode, or '
            "leave away --engine ray and all vectors"
        )
    if len(files_of_width) > 1:
        (one, _), (other, path), *_ = files_of_width.items()
        raise RevelaError(
            f"{path} has vectors of {other} numbers, others of {one}: encode all of the corpus "
            "with one model"
        )


def _documents(
    tasks: Tasks, run: Run, parts: Sequence[Part], hashes: NDArray[np.int64]
) -> list[Document]:
    """The documents with these hashes, in this order, their chunks joined."""
    import pyarrow as pa

    tables = run(functools.partial(tasks.documents, hashes=hashes), parts)
    table = pa.concat_tables(itertools.chain.from_iterable(tables))
    rows = table.sort_by([("document", "ascending"), (CHUNK, "ascending")]).to_pylist()
    documents = (list(group) for _, group in itertools.groupby(rows, lambda row: row["document"]))
    return [
        Document(chunks[0]["id"], " ".join(c["text"].strip() for c in chunks), chunks[0]["title"])
        for chunks in documents
    ]
