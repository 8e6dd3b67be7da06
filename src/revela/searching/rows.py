"""The rows of an index's table, one per chunk: their columns, and their stored vectors.

Shapes: N rows, D width of the encoder's vectors, W width of the stored ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from revela.searching.manifest import Info
from revela.types import Value, Vectors

if TYPE_CHECKING:
    from revela.searching.locations import Start

# Columns of a hit, before those of metadata.
HIT_COLUMNS = ("id", "chunk", "title", "passage", "first_line", "first_page")
RESERVED = (*HIT_COLUMNS, "chunks", "terms", "digest", "vector", "tokens")


class Row(NamedTuple):
    """A chunk of a document, as a row of the table without its vector and its terms."""

    id: str
    chunk: int
    title: str
    text: str
    start: Start
    digest: str
    metadata: Sequence[Value | None]

    @property
    def passage(self) -> str:
        """The text with the title before it."""
        return f"{self.title} {self.text}" if self.title else self.text


class Stored(NamedTuple):
    """A passage's unit vector (W,) and, if the index keeps them, the ``packed_signs`` of tokens."""

    vector: Vectors
    tokens: bytes | None


def schema_of(info: Info) -> Any:
    """The Arrow schema of an index's table."""
    import pyarrow as pa

    columns = {
        "id": pa.string(),
        "chunk": pa.int32(),
        "chunks": pa.int32(),  # of the document
        "title": pa.string(),
        "passage": pa.string(),
        "first_line": pa.int32(),
        "first_page": pa.int32(),
        "digest": pa.string(),
        "vector": pa.list_(pa.float32(), info.width),
        "terms": pa.string(),
    }
    if info.settings.keep_tokens:
        columns["tokens"] = pa.binary()
    metadata = {name: pa.type_for_alias(kind) for name, kind in info.columns.items()}
    return pa.schema(columns | metadata)


def arrow_rows(
    info: Info, rows: Sequence[Row], stored: Sequence[Stored], terms: Sequence[str | None]
) -> Any:
    """Rows in Arrow, at least one; all of a document's rows, as they have their number."""
    import pyarrow as pa

    schema, chunks = schema_of(info), Counter(row.id for row in rows)
    names = ("id", "chunk", "chunks", *HIT_COLUMNS[2:], "digest", *info.columns)
    values = (
        (r.id, r.chunk, chunks[r.id], r.title, r.passage, *r.start, r.digest, *r.metadata)
        for r in rows
    )
    columns = zip(names, zip(*values, strict=True), strict=True)
    arrays = {name: pa.array(column, schema.field(name).type) for name, column in columns}
    arrays["terms"] = pa.array(terms, pa.string())
    if "tokens" in schema.names:
        arrays["tokens"] = pa.array([passage.tokens for passage in stored], pa.binary())
    numbers = pa.array(np.concatenate([passage.vector for passage in stored]))
    arrays["vector"] = pa.FixedSizeListArray.from_arrays(numbers, info.width)
    return pa.table(arrays, schema=schema)
