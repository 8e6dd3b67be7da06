"""``revela encode``: the chunks of a corpus and their vectors as Parquet, for another store."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from revela.encoders.base import TextEncoder
from revela.errors import RevelaError
from revela.files import atomic_write
from revela.ranking.bm25 import TermCounts
from revela.searching import on_ray
from revela.searching.build_on_ray import Job, SurveyedCorpus
from revela.searching.ingest import BATCH, Batch, encode_rows
from revela.searching.manifest import Info
from revela.searching.on_ray import Cluster
from revela.text.parallel import batches
from revela.types import Document, Precision

TOGETHER = 64  # batches in a file that a cluster writes


def check_out(out: Path) -> None:
    """Raise RevelaError if the file exists or its name does not end in .parquet."""
    if out.suffix != ".parquet":
        raise RevelaError(f"{out}: give --out a name that ends in .parquet")
    if out.exists():
        raise RevelaError(f"{out} exists: choose another --out")


def encode(
    out: Path,
    documents: Iterable[Document],
    info: Info,
    encoder: TextEncoder,
    total: int | None = None,
) -> int:
    """Write the chunks of documents and their vectors to a new file; returns how many there are.
    ``total`` is the number of documents, for a progress bar.
    """
    import pyarrow.parquet as pq

    count, writer = 0, None
    bar = tqdm(total=total, unit="document", disable=total is None)
    with atomic_write(out) as path, bar:
        for batch in batches(documents, lambda document: len(document.text) + 1, BATCH):
            rows = encode_rows(Batch.of(batch, None, info, out), info, encoder, out, None)
            public = public_rows(rows.encoded)
            writer = writer or pq.ParquetWriter(path, public.schema)
            writer.write_table(public)
            count += len(public)
            bar.update(len(batch))
        if writer is not None:
            writer.close()
    return count


def encode_on_ray(
    out: Path, corpus: SurveyedCorpus, info: Info, cluster: Cluster, precision: Precision
) -> int:
    """``encode`` on a connected cluster; writes a folder of Parquet files."""
    count, known = 0, set[bytes]()
    with atomic_write(out) as folder:
        folder.mkdir()
        job = VectorFiles(folder.resolve(), info, corpus.reading, precision)
        written = on_ray.stream(corpus.parts, job.read, job.load, job.write, cluster, TOGETHER)
        with tqdm(total=len(corpus), unit="document") as bar:
            for part in written:
                known |= set(part.files)
                count += part.counts.chunks
                bar.update(part.counts.documents)
        for file in folder.iterdir():
            if file.name.encode() not in known:  # of a worker that was killed
                file.unlink()
    return count


@dataclass(frozen=True)
class VectorFiles(Job):
    """A ``Job`` that writes Parquet files into ``folder``."""

    finds_terms = False

    def _files(self, rows: Any) -> tuple[list[bytes], list[TermCounts]]:
        import pyarrow.parquet as pq

        name = f"{uuid.uuid4().hex}.parquet"
        pq.write_table(public_rows(rows), self.folder / name)
        return [name.encode()], []


def public_rows(rows: Any) -> Any:
    """Rows of an index's table with a chunk's own text in place of its passage."""
    import pyarrow as pa

    pairs = zip(rows["title"].to_pylist(), rows["passage"].to_pylist(), strict=True)
    texts = [passage[len(title) + 1 :] if title else passage for title, passage in pairs]
    columns = {name: rows[name] for name in ("id", "chunk", "title")}
    return pa.table({**columns, "text": texts, "vector": rows["vector"]})
