"""``revela encode``: chunks and their vectors as Parquet, for another store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from revela.encoders.base import TextEncoder
from revela.errors import RevelaError
from revela.files import atomic_write, check_free
from revela.searching.ingest import BATCH, changed_rows, encode_rows
from revela.searching.manifest import Info
from revela.searching.rows import HIT_COLUMNS, About
from revela.text.analyzer import detect
from revela.text.parallel import batches
from revela.text.spool import LazyTexts
from revela.types import Document, without_title

if TYPE_CHECKING:
    from revela.searching.index import Index


def check_out(out: Path) -> None:
    """Raise RevelaError if the file exists or its name does not end in .parquet."""
    if out.suffix != ".parquet":
        raise RevelaError(f"{out}: give --out a name that ends in .parquet")
    check_free(out)


def encode(out: Path, documents: Sequence[Document], info: Info, encoder: TextEncoder) -> int:
    """Write the chunks of documents and their vectors to a new file; returns how many there are."""
    texts = LazyTexts(documents, lambda document: document.full_text)
    info = replace(info, language=detect(texts))

    def tables() -> Iterator[Any]:
        with tqdm(total=len(documents), unit="document") as bar:
            for batch in batches(documents, lambda document: len(document.text) + 1, BATCH):
                _, _, rows = changed_rows(batch, None, info, out)
                yield encode_rows(rows, info, encoder, out, None)[0]
                bar.update(len(batch))

    return _write(out, tables(), info)


def export(out: Path, index: Index) -> int:
    """Write the chunks of an index and their vectors to a new file; returns how many there are."""
    table = index.table
    return _write(out, table.batches([*HIT_COLUMNS, "vector", *table.info.columns]), table.info)


def _write(out: Path, tables: Iterable[Any], info: Info) -> int:
    import pyarrow.parquet as pq

    count, writer = 0, None
    with atomic_write(out) as path:
        for rows in tables:
            public = public_rows(rows, info)
            writer = writer or pq.ParquetWriter(path, public.schema)
            writer.write_table(public)
            count += len(public)
        if writer is None:
            raise RevelaError("there are no passages to write: add documents first")
        writer.close()
    return count


def public_rows(rows: Any, info: Info) -> Any:
    """Rows of an index's table as others read them, with a chunk's own text in place of its
    passage.
    """
    import pyarrow as pa

    texts = [*map(without_title, rows["title"].to_pylist(), rows["passage"].to_pylist())]
    own = {"id": rows["id"], "chunk": rows["chunk"], "title": rows["title"], "text": texts}
    own |= {"line": rows["first_line"], "page": rows["first_page"]}
    own |= {name: rows[name] for name in About._fields}
    metadata = {name: rows[name] for name in info.columns if name not in own}
    return pa.table({**own, **metadata, "vector": rows["vector"]})
