"""``revela encode``: the chunks of a corpus and their vectors, for those who have a store of their
own.

Rows have the columns id, chunk, title, text and vector. One process writes a Parquet file, a
cluster a folder of them in any order. A .npy file holds the vectors alone, (N, W) float32; the rows
that they belong to, in the same order, stand in NAME.rows.parquet beside it.
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from revela import on_ray
from revela.corpus.parallel import batches
from revela.errors import RevelaError
from revela.files import atomic_write, hidden_prefix
from revela.index.build_on_ray import Job, SurveyedCorpus
from revela.index.encode_corpus import BATCH, cut_to_fit, table_rows
from revela.index.manifest import Info
from revela.index.store import as_stored
from revela.index.table import arrow_rows
from revela.on_ray import Cluster
from revela.settings import Precision
from revela.types import Document, TokenEncoder, Vectors

TOGETHER = 64  # batches in a file that a cluster writes
READ_ROWS = 2**14  # rows that are copied to a .npy file at once
NPY, PARQUET = ".npy", ".parquet"


def refuse_out(out: Path) -> None:
    """Refuse a name that is taken, or says nothing of the format."""
    if out.suffix not in (NPY, PARQUET):
        raise RevelaError(f"{out}: give --out a name that ends in .parquet or .npy")
    taken = [path for path in (out, _rows_of(out)) if path.exists()]
    if taken and (out.suffix == NPY or out.exists()):
        raise RevelaError(f"{taken[0]} exists: choose another --out")


def encode(
    out: Path,
    documents: Iterable[Document],
    info: Info,
    encoder: TokenEncoder,
    total: int | None = None,
) -> int:
    """Write the chunks of documents and their vectors; how many there are.

    Args:
        out: a file that does not exist yet.
        documents: of a corpus.
        info: how they are cut and encoded.
        encoder: of the model, with its context.
        total: of the documents, for a progress bar; None: no bar.
    """
    import pyarrow.parquet as pq

    with _staged(out) as path:
        writer = None
        with tqdm(total=total, unit="document", disable=total is None) as bar:
            for batch in batches(documents, lambda document: len(document.text) + 1, BATCH):
                columns = table_rows(batch, dict.fromkeys((d.id for d in batch), ""), info, out)
                columns, _ = cut_to_fit(columns, encoder)
                vectors = encoder.encode_passages([str(text) for text in columns["passage"]])
                rows = public(arrow_rows(info, columns, as_stored(vectors, info, out), None))
                writer = writer or pq.ParquetWriter(path, rows.schema)
                writer.write_table(rows)
                bar.update(len(batch))
        if writer is not None:
            writer.close()
        return finish(path, out)


def encode_on_ray(
    out: Path,
    corpus: SurveyedCorpus,
    info: Info,
    context: Vectors | None,
    cluster: Cluster,
    precision: Precision,
) -> int:
    """``encode``, by a cluster that is connected; it writes a folder of Parquet files."""
    with _staged(out) as folder:
        folder.mkdir()
        job = VectorFiles(folder.resolve(), info, context, corpus.reading, precision)
        written = on_ray.stream(corpus.parts, job.read, job.load, job.write, cluster, TOGETHER)
        known = set[str]()
        with tqdm(total=len(corpus), unit="document") as bar:
            for row in written:
                known |= set(row["files"])
                bar.update(row["documents"])
        for file in folder.iterdir():
            if file.name not in known:  # of a worker that was killed
                file.unlink()
        return finish(folder, out)


@dataclass(frozen=True)
class VectorFiles(Job):
    """A ``Job`` that writes Parquet files into ``folder``."""

    def write(self, batches: list[on_ray.Row]) -> on_ray.Row:
        import pyarrow as pa
        import pyarrow.parquet as pq

        tables = [public(batch["table"]) for batch in batches if batch["table"] is not None]
        files = [f"{uuid.uuid4().hex}.parquet"] if tables else []
        if tables:
            pq.write_table(pa.concat_tables(tables), self.folder / files[0])
        return {"files": files, "documents": sum(batch["documents"][1] for batch in batches)}


def public(rows: Any) -> Any:
    """Rows of an index's table with a chunk's own text in place of what was encoded."""
    import pyarrow as pa

    pairs = zip(rows["title"].to_pylist(), rows["passage"].to_pylist(), strict=True)
    texts = [passage[len(title) + 1 :] if title else passage for title, passage in pairs]
    names = ["id", "chunk", "title"]
    return pa.table(
        {**{name: rows[name] for name in names}, "text": texts, "vector": rows["vector"]}
    )


def finish(path: Path, out: Path) -> int:
    """Copy to .npy what was written as Parquet, if that was asked for; the number of rows.

    Args:
        path: the Parquet file or folder, under a temporary name.
        out: what was asked for.
    """
    import pyarrow.dataset as ds
    import pyarrow.parquet as pq

    rows = ds.dataset(path, format="parquet")
    count = int(rows.count_rows())
    if out.suffix == PARQUET:
        return count
    width = rows.schema.field("vector").type.list_size
    kept = [name for name in rows.schema.names if name != "vector"]
    schema = rows.schema.remove(rows.schema.get_field_index("vector"))
    with atomic_write(_rows_of(out)) as beside, atomic_write(out) as temporary:
        vectors = np.lib.format.open_memmap(temporary, "w+", np.float32, (count, width))
        start = 0
        with pq.ParquetWriter(beside, schema) as writer:
            for batch in rows.to_batches(batch_size=READ_ROWS):
                numbers = batch.column("vector").flatten().to_numpy()
                vectors[start : start + len(batch)] = numbers.reshape(-1, width)
                writer.write_batch(batch.select(kept))
                start += len(batch)
        vectors.flush()
    return count


@contextmanager
def _staged(out: Path) -> Iterator[Path]:
    """A path for Parquet, which becomes ``out`` at the end or, for .npy, is removed."""
    if out.suffix == PARQUET:
        with atomic_write(out) as path:
            yield path
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=hidden_prefix(out.name), dir=out.parent) as hidden:
        yield Path(hidden) / "rows.parquet"


def _rows_of(out: Path) -> Path:
    """Where the rows of a .npy file stand."""
    return out.with_suffix(".rows.parquet")
