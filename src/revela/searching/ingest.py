"""Turn documents into rows of an index's table: cut them into chunks and encode these.

Documents whose digest is in the table are skipped: a killed run resumes where it stopped, and
adding a corpus again costs only its changes.

Shapes: N chunks, D width of the encoder's vectors, W width of the stored ones.
"""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from revela.encoders.base import TextEncoder
from revela.encoders.model_files import fingerprint
from revela.encoders.prompts import OWN, Given, prompts_of
from revela.errors import RevelaError
from revela.ranking.late_interaction import encode_packed
from revela.searching.locations import Start, starts
from revela.searching.manifest import Indexing, Info
from revela.searching.rows import HIT_COLUMNS, RESERVED, Stored, arrow_rows
from revela.searching.table import Table, as_stored
from revela.terminal import counted
from revela.text.analyzer import Analyzer, searched
from revela.text.chunk import chunk
from revela.text.headings import titles
from revela.types import Document, Value, check_unicode, is_missing

BATCH = 2**19  # characters of the first commits: some hundred chunks, so that a kill costs seconds
GROWTH, MAX_BATCH = 256, 2**25  # later commits hold 1/256 of the text before, at most MAX_BATCH
BATCH_DOCUMENTS = 1000  # maximum documents for each ``BATCH`` of a commit
# A letter that is not ASCII, or a word, maybe with a number, that is no part of encoded data.
_WORDS = re.compile(r"[^\W\d_\x00-\x7f]|(?<![\w+/=])[A-Za-z]+(?:(?<=\w{3})\d+)?(?![\w+/=])")
FEW_LETTERS = 0.05  # of a text's characters
NUMBERS = {bool: "bool", int: "int64", float: "double"}
COLUMN_TYPES = {frozenset({kind}): name for kind, name in NUMBERS.items()} | {
    frozenset({int, float}): "double"
}
Rows = dict[str, list[Value | None]]


@dataclass(frozen=True)
class Added:
    """Numbers of documents, of chunks written, and of chunks cut to the model's limit."""

    new: int = 0
    replaced: int = 0
    unchanged: int = 0
    chunks: int = 0
    cut: int = 0

    @property
    def documents(self) -> int:
        return self.new + self.replaced + self.unchanged

    def describe(self) -> str:
        """The numbers of documents, for messages."""
        return (
            f"{counted(self.new, 'document is', 'documents are')} new, {self.replaced:,} replaced, "
            f"{self.unchanged:,} unchanged"
        )

    def __add__(self, other: Added) -> Added:
        return Added(*(sum(pair) for pair in zip(astuple(self), astuple(other), strict=True)))


def new_info(
    model: Path,
    encoder: TextEncoder,
    settings: Indexing,
    metadata: Mapping[str, str],
    prompts: Given = OWN,
) -> Info:
    """The manifest of a new index; ``prompts`` as given when the encoder was loaded."""
    check_columns(metadata)
    width = encoder.encode_passages(["."]).shape[1]
    width = min(width, settings.dimensions or width)
    made = str(model.resolve()), fingerprint(model), width, settings, metadata
    return Info(*made, prompts=prompts_of(model, prompts), precision=encoder.precision)


def commits(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """The documents of each commit, in order. Every commit lists all files of the table, so later
    commits hold more documents.
    """
    batch, size, read = list[Document](), 0, 0
    for document in documents:
        batch.append(document)
        size += max(len(document.text), BATCH // BATCH_DOCUMENTS)
        if size >= min(MAX_BATCH, max(BATCH, read // GROWTH)):
            yield batch
            batch, size, read = [], 0, read + size
    if batch:
        yield batch


@dataclass(frozen=True)
class Batch:
    """Documents of a batch that are new or differ from the table's, and ids of the latter."""

    documents: list[Document]
    digests: Mapping[str, str]
    replaced: list[str]

    @classmethod
    def of(cls, batch: Sequence[Document], table: Table | None, info: Info) -> Batch:
        """Compare documents with a table; None: an empty one."""
        digests = {d.id: digest_of(d, info.settings.chunk_words) for d in batch}
        present = table.digests(list(digests)) if table else {}
        changed = [d for d in batch if present.get(d.id) != digests[d.id]]
        return cls(changed, digests, [d.id for d in changed if d.id in present])


@dataclass(frozen=True)
class Encoded:
    """Chunks as rows in Arrow, the terms of each, and how many chunks were truncated."""

    rows: Any
    terms: list[list[str]]
    cut: int


def encode_rows(
    rows: Rows,
    info: Info,
    encoder: TextEncoder,
    folder: Path,
    analyze: Analyzer | None,
    known: Mapping[str, Stored] | None = None,
) -> Encoded:
    """Encode the chunks of ``table_rows``, at least one.

    Args:
        analyze: gives their terms.
        known: passages that are not encoded again.
    """
    rows, cut = cut_to_fit(rows, encoder)
    passages, stored = [str(passage) for passage in rows["passage"]], dict(known or {})
    blank = Stored(np.zeros(info.width, np.float32), b"" if info.settings.keep_tokens else None)
    stored |= {passage: blank for passage in passages if not has_words(passage)}
    if fresh := [passage for passage in dict.fromkeys(passages) if passage not in stored]:
        tokens: Sequence[bytes | None] = [None] * len(fresh)
        if info.settings.keep_tokens:
            vectors, tokens = encode_packed(encoder, fresh)
        else:
            vectors = encoder.encode_passages(fresh)
        made = map(Stored, as_stored(vectors, info, folder), tokens)
        stored |= zip(fresh, made, strict=True)
    of_document = Counter(rows["id"])
    rows["chunks"] = [of_document[name] for name in rows["id"]]
    named = map(searched, map(str, rows["id"]), passages)
    terms = [analyze(text) for text in named] if analyze else []
    rows["terms"] = [" ".join(found) for found in terms] or [None] * len(passages)
    return Encoded(arrow_rows(info, rows, [stored[passage] for passage in passages]), terms, cut)


def has_words(text: str) -> bool:
    """Whether words are more than a few of a text's characters. Others, of encoded data or bare
    numbers, have no vector, as encoders take them for near to anything.

    >>> has_words("It melts at 63 °C."), has_words("iVBORw0KGgoAAAANSUhEUgAAAAUA/AAAF+CAYAAACN")
    (True, False)
    """
    return sum(map(len, _WORDS.findall(text))) > FEW_LETTERS * len("".join(text.split()))


def table_rows(
    documents: Iterable[Document], digests: Mapping[str, str], info: Info, folder: Path
) -> Rows:
    """Cut documents into chunks: rows as values by column, without what ``encode_rows`` adds."""
    columns = info.columns
    rows: Rows = {name: [] for name in (*HIT_COLUMNS, "digest", *columns)}
    for document in documents:
        metadata = [_as_column(document, name, kind, folder) for name, kind in columns.items()]
        digest = digests[document.id]
        passages = passages_of(document, info.settings.chunk_words)
        for number, (title, text, start) in enumerate(passages):
            passage = f"{title} {text}" if title else text
            row = (document.id, number, title, passage, *start, digest, *metadata)
            for column, value in zip(rows.values(), row, strict=True):
                column.append(value)
    return rows


def passages_of(document: Document, chunk_words: int) -> Iterator[tuple[str, str, Start]]:
    """The title, the text and the start of each of a document's chunks; an empty one has one."""
    pieces = [piece.text for piece in chunk(document, 0, chunk_words)] or [""]
    return zip(titles(document, pieces), pieces, starts(document, pieces), strict=True)


def cut_to_fit(rows: Rows, encoder: TextEncoder) -> tuple[Rows, int]:
    """Cut chunks that exceed the encoder's window; returns the rows, and the number of chunks cut.

    A title may fill half of the window; the rest of it is put before the document's text.
    """
    titles = [str(title) for title in dict.fromkeys(rows["title"])]
    cut_titles = dict(zip(titles, encoder.fitted([""] * len(titles), titles, 2), strict=True))
    heads, texts = [], []
    for number, title, passage in zip(rows["chunk"], rows["title"], rows["passage"], strict=True):
        title, text = str(title), str(passage)
        head, *rest = cut_titles[title]
        heads.append(f"{head.strip()} " if head else "")
        text = text[len(title) + 1 :] if title else text
        texts.append(f"{''.join(rest)} {text}" if rest and not number else text)
    pieces = encoder.fitted(heads, texts)
    cut = sum(len(parts) > 1 for parts in pieces)
    if not cut and all(len(parts) == 1 for parts in cut_titles.values()):
        return rows, 0
    fitting: Rows = {name: [] for name in rows}
    numbers = Counter[Value | None]()
    for i, (head, parts) in enumerate(zip(heads, pieces, strict=True)):
        name = rows["id"][i]
        start: Any = Start(rows["first_line"][i], rows["first_page"][i])  # type: ignore[arg-type]
        for piece in parts:
            row = {column: values[i] for column, values in rows.items()}
            row |= {"chunk": numbers[name], "title": head[:-1], "passage": head + piece}
            row |= {"first_line": start.line, "first_page": start.page}
            numbers[name], start = numbers[name] + 1, start.after(piece.lstrip())
            for column, value in row.items():
                fitting[column].append(value)
    return fitting, cut


def digest_of(document: Document, chunk_words: int) -> str:
    """A hash that changes when a document's rows change, 16 hex digits."""
    metadata = dict(document.metadata)
    content = [chunk_words, document.title, document.text, document.kind, metadata]
    text = json.dumps(content, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def check_repeated(ids: Iterable[str]) -> None:
    """Raise RevelaError for a repeated id."""
    seen = set[str]()
    for name in ids:
        if name in seen:
            raise repeated_id(name)
        seen.add(name)


def repeated_id(name: str) -> RevelaError:
    return RevelaError(
        f'two documents have the id "{name}": give each its own, '
        "or index the folder that holds both files"
    )


def metadata_columns(documents: Iterable[Document], fields: Sequence[str]) -> dict[str, str]:
    """The Arrow type of each metadata field: of numbers if all its values are, else of text.

    Example:
        >>> from revela import Document
        >>> metadata_columns([Document("a", "text", metadata={"year": 2020})], ["year"])
        {'year': 'int64'}
    """
    types: dict[str, set[type]] = {name: set() for name in fields}
    for document in documents if fields else ():
        note_types(types, document)
    return columns_of_types(types)


def note_types(types: Mapping[str, set[type]], document: Document) -> None:
    """Add the types of a document's metadata to those of each field."""
    for name, found in types.items():
        if (value := document.metadata.get(name)) is not None:
            found.add(str if _is_beyond_int64(value) else type(value))


def _is_beyond_int64(value: Value) -> bool:
    return isinstance(value, int) and not -(2**63) <= value < 2**63


def columns_of_types(types: Mapping[str, set[type]]) -> dict[str, str]:
    """``metadata_columns`` for fields with known types."""
    check_columns(types)
    if missing := [name for name, found in types.items() if not found]:
        raise RevelaError(
            f'no document has a field "{missing[0]}": name others with --metadata, or omit it'
        )
    return {name: COLUMN_TYPES.get(frozenset(found), "string") for name, found in types.items()}


def check_columns(names: Iterable[str]) -> None:
    """Raise RevelaError for names of metadata that the table cannot have."""
    for name in names:
        if name in RESERVED or name.startswith("_"):
            raise RevelaError(
                f"--metadata {name}: columns of this name are the index's own; rename the field"
            )
        if "." in name or "`" in name:
            raise RevelaError(
                f"--metadata {name}: a column has neither . nor ` in its name; rename the field"
            )


def _as_column(document: Document, name: str, kind: str, folder: Path) -> Value | None:
    """A metadata value as its column holds it."""
    value = document.metadata.get(name)
    if isinstance(value, str):
        check_unicode(value, f"{name} of document {document.id}")
    if is_missing(value):  # NaN, which SQL takes for the greatest number
        return None
    if kind == "string":
        return value if isinstance(value, str | None) else json.dumps(value)
    if value is None or (kind == NUMBERS.get(type(value)) and not _is_beyond_int64(value)):
        return value
    if kind == "double" and type(value) is int and abs(value) <= sys.float_info.max:
        return float(value)
    raise RevelaError(
        f"{name} of document {document.id} is {reprlib.repr(value)}, where {folder} holds {kind}: "
        "mend the field, or index all of it again"
    )
