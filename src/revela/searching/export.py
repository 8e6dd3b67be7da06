"""``revela encode``: the chunks of a corpus and their vectors as Parquet, for another store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from revela.encoders.base import TextEncoder
from revela.errors import RevelaError
from revela.files import atomic_write, check_free
from revela.searching.ingest import BATCH, Batch, encode_rows
from revela.searching.manifest import Info
from revela.text.parallel import batches
from revela.types import Document


def check_out(out: Path) -> None:
    """Raise RevelaError if the file exists or its name does not end in .parquet."""
    if out.suffix != ".parquet":
        raise RevelaError(f"{out}: give --out a name that ends in .parquet")
    check_free(out)


def encode(out: Path, documents: Sequence[Document], info: Info, encoder: TextEncoder) -> int:
    """Write the chunks of documents and their vectors to a new file; returns how many there are."""
    import pyarrow.parquet as pq

    count, writer = 0, None
    with atomic_write(out) as path, tqdm(total=len(documents), unit="document") as bar:
        for batch in batches(documents, lambda document: len(document.text) + 1, BATCH):
            rows, _ = encode_rows(Batch.of(batch, None, info, out).rows, info, encoder, out, None)
            public = public_rows(rows)
            writer = writer or pq.ParquetWriter(path, public.schema)
            writer.write_table(public)
            count += len(public)
            bar.update(len(batch))
        if writer is not None:
            writer.close()
    return count


def public_rows(rows: Any) -> Any:
    """Rows of an index's table with a chunk's own text in place of its passage."""
    import pyarrow as pa

    pairs = zip(rows["title"].to_pylist(), rows["passage"].to_pylist(), strict=True)
    texts = [passage[len(title) + 1 :] if title else passage for title, passage in pairs]
    columns = {name: rows[name] for name in ("id", "chunk", "title")}
    return pa.table({**columns, "text": texts, "vector": rows["vector"]})
