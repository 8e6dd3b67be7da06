"""The rows of an index's table, one per chunk: their columns, those of metadata and the types of
these, and their stored vectors.

Shapes: N rows, D width of the encoder's vectors, W width of the stored ones.
"""

from __future__ import annotations

import json
import reprlib
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from revela.errors import RevelaError
from revela.searching.manifest import Info
from revela.text.analyzer import language_of
from revela.text.dates import iso_date
from revela.types import Document, Value, Vectors, check_unicode, is_missing, with_title

if TYPE_CHECKING:
    from revela.searching.locations import Start

# Columns of a hit, before those of metadata; the last ones are in every index, for filters.
HIT_COLUMNS = (
    *("id", "chunk", "title", "passage", "first_line", "first_page"),
    *("date", "type", "language"),
)
RESERVED = (*HIT_COLUMNS[:6], "chunks", "terms", "digest", "vector", "tokens")


class About(NamedTuple):
    """What every document can be filtered by: its date in ISO 8601, the ending of its file, and
    its language; None where they are not known.
    """

    date: str | None
    type: str | None
    language: str | None

    @classmethod
    def of(cls, document: Document, languages: str) -> About:
        """The document's values; its metadata override what is detected, in these languages."""
        given = document.metadata
        language = str(given.get("language") or "")
        if not language and document.kind == "prose":
            language = language_of(document.full_text, languages)
        kind = str(given.get("type") or "")
        return cls(iso_date(given.get("date")) or None, kind or None, language or None)


class Row(NamedTuple):
    """A chunk of a document, as a row of the table without its vector and its terms."""

    id: str
    chunk: int
    title: str
    text: str
    start: Start
    about: About
    digest: str
    metadata: Sequence[Value | None]

    @property
    def passage(self) -> str:
        """The text with the title before it."""
        return with_title(self.title, self.text)


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
        "date": pa.string(),
        "type": pa.string(),
        "language": pa.string(),
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
        (r.id, r.chunk, chunks[r.id], r.title, r.passage, *r.start, *r.about, r.digest, *r.metadata)
        for r in rows
    )
    columns: dict[str, Any] = dict(zip(names, zip(*values, strict=True), strict=True))
    columns["terms"] = terms
    if "tokens" in schema.names:
        columns["tokens"] = [passage.tokens for passage in stored]
    numbers = pa.array(np.concatenate([passage.vector for passage in stored]))
    columns["vector"] = pa.FixedSizeListArray.from_arrays(numbers, info.width)
    return pa.table(columns, schema=schema)


# Columns of metadata


def metadata_columns(documents: Iterable[Document], fields: Sequence[str]) -> dict[str, str]:
    """The Arrow type of each metadata field: of numbers if all its values are, else of text.

    Example:
        >>> from revela import Document
        >>> metadata_columns([Document("a", "text", metadata={"year": 2020})], ["year"])
        {'year': 'int64'}
    """
    kinds: dict[str, set[str]] = {name: set() for name in fields if name not in About._fields}
    for document in documents if fields else ():
        for name, found in kinds.items():
            if (value := document.metadata.get(name)) is not None:
                found.add(_kind_of(value))
    check_columns(kinds)
    if missing := [name for name, found in kinds.items() if not found]:
        raise RevelaError(
            f'no document has a field "{missing[0]}": name others with --metadata, or omit it'
        )
    number = {"int64", "double"}
    return {
        name: "double" if found == number else found.pop() if len(found) == 1 else "string"
        for name, found in kinds.items()
    }


def _kind_of(value: Value) -> str:
    """The Arrow type that holds a value."""
    if isinstance(value, bool | float):
        return "bool" if isinstance(value, bool) else "double"
    return "int64" if isinstance(value, int) and -(2**63) <= value < 2**63 else "string"


def check_columns(names: Iterable[str]) -> None:
    """Raise RevelaError for names of metadata that the table cannot have."""
    for name in names:
        why = "a column name must not contain . or `" if {".", "`"} & {*name} else ""
        if name in RESERVED or name.startswith("_"):
            why = "columns of this name are reserved"
        if why:
            raise RevelaError(f"--metadata {name}: {why}; rename the field")


def as_column(document: Document, name: str, kind: str, folder: Path) -> Value | None:
    """A metadata value as its column holds it."""
    value = document.metadata.get(name)
    if isinstance(value, str):
        check_unicode(value, f"{name} of document {document.id}")
    if value is None or is_missing(value):  # NaN, which SQL takes for the greatest number
        return None
    if kind == "string":
        return value if isinstance(value, str) else json.dumps(value)
    if kind == _kind_of(value):
        return value
    if kind == "double" and type(value) is int and abs(value) <= sys.float_info.max:
        return float(value)
    raise RevelaError(
        f"{name} of document {document.id} is {reprlib.repr(value)}, where {folder} holds {kind}: "
        "fix the field, or index everything again"
    )
