"""Turn documents into rows of an index's table: cut them into chunks and encode these.

Documents whose digest is in the table are skipped: a killed run resumes where it stopped, and
adding a corpus again costs only its changes.

Shapes: N chunks, D width of the encoder's vectors, W width of the stored ones.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from revela.encoders.base import TextEncoder
from revela.errors import RevelaError
from revela.ranking.late_interaction import encode_packed
from revela.searching.locations import Start, starts
from revela.searching.manifest import Info
from revela.searching.rows import About, Row, Stored, arrow_rows, as_column
from revela.searching.table import Table, as_stored
from revela.terminal import counted
from revela.text.analyzer import Analyzer, searched
from revela.text.chunk import chunk
from revela.text.headings import titles
from revela.text.words import has_words
from revela.types import Document

BATCH = 2**19  # characters of the first commits: some hundred chunks, so that a kill costs seconds
GROWTH, MAX_BATCH = 256, 2**25  # later commits hold 1/256 of the text before, at most MAX_BATCH
BATCH_DOCUMENTS = 1000  # maximum documents for each ``BATCH`` of a commit


@dataclass(frozen=True)
class Counts:
    """Numbers of documents, of chunks written, and of chunks cut to the model's limit."""

    new: int = 0
    replaced: int = 0
    gone: int = 0
    unchanged: int = 0
    chunks: int = field(default=0, compare=False)
    cut: int = field(default=0, compare=False)

    @property
    def documents(self) -> int:
        """The number of those that the index holds."""
        return self.new + self.replaced + self.unchanged

    @property
    def any(self) -> bool:
        """Whether the index was changed."""
        return self.new + self.replaced + self.gone > 0

    def describe(self, synced: bool = True) -> str:
        """The numbers of documents, for messages; with those that are gone if it was synced."""
        new = counted(self.new, "document is", "documents are")
        others = f"changed, {self.gone:,} deleted" if synced else "replaced"
        return f"{new} new, {self.replaced:,} {others}, {self.unchanged:,} unchanged"

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(sum(pair) for pair in zip(astuple(self), astuple(other), strict=True)))


def batches_of(documents: Iterable[Document]) -> Iterator[list[Document]]:
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


def changed_rows(
    documents: Sequence[Document], table: Table | None, info: Info, folder: Path
) -> tuple[Counts, list[str], list[Row]]:
    """Cut documents into rows, except those that are in a table already (None: an empty one).

    Returns:
        The counts of the documents, the ids of those whose former rows must be deleted, and the
        rows.
    """
    digests = {d.id: digest_of(d, info.settings.chunk_words) for d in documents}
    present = table.digests(list(digests)) if table else {}
    changed = [d for d in documents if present.get(d.id) != digests[d.id]]
    replaced = [d.id for d in changed if d.id in present]
    rows = list[Row]()
    for document in changed:
        metadata = [as_column(document, *column, folder) for column in info.columns.items()]
        rest = About.of(document, info.language), digests[document.id], metadata
        passages = passages_of(document, info.settings.chunk_words)
        rows += (Row(document.id, i, *passage, *rest) for i, passage in enumerate(passages))
    new, unchanged = len(changed) - len(replaced), len(documents) - len(changed)
    return Counts(new, len(replaced), unchanged=unchanged), replaced, rows


def encode_rows(
    rows: list[Row],
    info: Info,
    encoder: TextEncoder,
    folder: Path,
    analyze: Analyzer | None,
    known: Mapping[str, Stored] | None = None,
) -> tuple[Any, int]:
    """Encode rows; returns them in Arrow, and the number of chunks that were cut to the window.

    Args:
        analyze: gives their terms.
        known: passages that are not encoded again.
    """
    rows, cut = cut_to_fit(rows, encoder)
    passages, stored = [row.passage for row in rows], dict(known or {})
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
    named = (searched(row.id, row.passage) for row in rows)
    terms = [" ".join(analyze(text)) if analyze else None for text in named]
    return arrow_rows(info, rows, [stored[passage] for passage in passages], terms), cut


def passages_of(document: Document, chunk_words: int) -> Iterator[tuple[str, str, Start]]:
    """The title, the text and the start of each of a document's chunks; an empty one has one."""
    pieces = [piece.text for piece in chunk(document, 0, chunk_words)] or [""]
    return zip(titles(document, pieces), pieces, starts(document, pieces), strict=True)


def cut_to_fit(rows: list[Row], encoder: TextEncoder) -> tuple[list[Row], int]:
    """Cut chunks that exceed the encoder's window; returns the rows, and the number of chunks cut.

    A title may fill half of the window; the rest of it is put before the document's text.
    """
    titles = list(dict.fromkeys(row.title for row in rows))
    cut_titles = dict(zip(titles, encoder.cut_to_fit([""] * len(titles), titles, 2), strict=True))
    heads, texts = [], []
    for row in rows:
        head, *rest = cut_titles[row.title]
        heads.append(f"{head.strip()} " if head else "")
        texts.append(f"{''.join(rest)} {row.text}" if rest and not row.chunk else row.text)
    pieces = encoder.cut_to_fit(heads, texts)
    cut = sum(len(parts) > 1 for parts in pieces)
    if not cut and all(len(parts) == 1 for parts in cut_titles.values()):
        return rows, 0
    fitting, numbers = list[Row](), Counter[str]()
    for row, head, parts in zip(rows, heads, pieces, strict=True):
        start = row.start
        for text in parts:
            number = numbers[row.id]
            fitting.append(row._replace(chunk=number, title=head[:-1], text=text, start=start))
            numbers[row.id], start = number + 1, start.after(text.lstrip())
    return fitting, cut


def digest_of(document: Document, chunk_words: int) -> str:
    """A hash that changes when a document's rows change, 16 hex digits."""
    metadata = dict(document.metadata)
    content = [chunk_words, document.title, document.text, document.kind, metadata]
    text = json.dumps(content, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def check_repeated(ids: Iterable[str]) -> None:
    """Raise RevelaError for a repeated id."""
    repeated = (name for name, count in Counter(ids).items() if count > 1)
    if (name := next(repeated, None)) is not None:
        raise RevelaError(
            f'two documents have the id "{name}": give each its own, '
            "or index the folder that holds both files"
        )
