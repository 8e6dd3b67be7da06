"""The rows of an index's table, one per chunk: their columns, and their stored vectors.

Shapes: N rows, D width of the encoder's vectors, W width of the stored ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from revela.searching.manifest import Info
from revela.types import Value, Vectors

# Columns of a hit, before those of metadata.
HIT_COLUMNS = ("id", "chunk", "title", "passage", "first_line", "first_page")
RESERVED = (*HIT_COLUMNS, "chunks", "terms", "digest", "vector", "tokens")


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
    info: Info,
    columns: Mapping[str, Sequence[Value | None]],
    stored: Sequence[Stored],
) -> Any:
    """Rows in Arrow, at least one, from values by column and each passage's vectors."""
    import pyarrow as pa

    schema = schema_of(info)
    names = [name for name in schema.names if name in columns]
    arrays = {name: pa.array(columns[name], schema.field(name).type) for name in names}
    if "tokens" in schema.names:
        arrays["tokens"] = pa.array([passage.tokens for passage in stored], pa.binary())
    numbers = pa.array(np.concatenate([passage.vector for passage in stored]))
    arrays["vector"] = pa.FixedSizeListArray.from_arrays(numbers, info.width)
    return pa.table(arrays, schema=schema)
