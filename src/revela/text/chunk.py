"""Cut documents into chunks of whole sentences (prose) or whole functions and blocks (code).

The chunks of a document, joined, are its text. A sentence or a line is cut only if it is longer
than a chunk, and then between words (text/words.py), at white space if there is any. In Markdown, a
chunk begins at a heading; a long section has several chunks.

This splitter reads 25 to 54 MB/s; pysbd reads 0.14 and semchunk 5.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise

import numpy as np

from revela.text.code import join_at, split_lines, units
from revela.text.endings import MARKDOWN, suffix
from revela.text.headings import Section, sections
from revela.text.parallel import batches, ordered_map
from revela.text.sentences import sentences
from revela.text.words import count_words, words
from revela.types import Chunk, Document

PASSAGE_WORDS = 120  # default maximum of a passage that is searched
SPLIT_WORDS = 5  # minimum words per chunk of a document that is split into a number of chunks
BATCH = 2**20  # characters per task of a worker process
_PAUSES = ",;:\u060c\u061b\u3001\uff0c\uff1a\uff1b"


def chunk(document: Document, index: int, max_words: int) -> list[Chunk]:
    """Cut a document's text into chunks of at most ``max_words`` words (text/words.py).

    >>> text = "Bees dance. The angle gives the direction. It is exact."
    >>> [c.text for c in chunk(Document("bees", text), 0, max_words=8)]
    ['Bees dance. The angle gives the direction. ', 'It is exact.']
    """
    return list(_cut(document, index, _piece_lengths(document, max_words)))


def chunk_all(
    documents: Iterable[Document], max_words: int, workers: int = 1, parts: int = 0
) -> Iterator[Chunk]:
    """Chunks of all documents, in order; the same for any number of worker processes.

    ``parts``: split every document into this many chunks of nearly equal length in place of chunks
    of ``max_words``; documents that are too short have none.
    """
    numbered = batches(enumerate(documents), lambda pair: len(pair[1].text), BATCH)
    measure = functools.partial(_measure, max_words=max_words, parts=parts)
    for batch, lengths in ordered_map(measure, numbered, workers):
        for (index, document), pieces in zip(batch, lengths, strict=True):
            yield from _cut(document, index, pieces)


def _measure(batch: list[tuple[int, Document]], max_words: int, parts: int) -> list[list[int]]:
    """The lengths of each document's pieces, which take less time to send than their text."""
    if parts:
        return [_split_lengths(document, parts) for _, document in batch]
    return [_piece_lengths(document, max_words) for _, document in batch]


def _split_lengths(document: Document, parts: int) -> list[int]:
    """Cut at the end of the sentence (in code, of the function or block) that is nearest to each
    equal part, or of the nearest word if no sentence ends within a third of a chunk. [] if the
    document is too short.
    """
    text, bounds = document.text, [0]
    pieces = units(text, document.id) if document.kind == "code" else sentences(text)
    ends, word_ends = (np.cumsum([*map(len, some)]) for some in (pieces, words(text)))
    if len(word_ends) < SPLIT_WORDS * parts:
        return []
    for left in range(parts, 1, -1):
        size = (len(text) - bounds[-1]) / left
        place = bounds[-1] + size
        end, word_end = (int(some[np.abs(some - place).argmin()]) for some in (ends, word_ends))
        bounds.append(end if abs(end - place) < size / 3 else word_end)
    bounds.append(len(text))
    chunks = [text[start:end] for start, end in pairwise(bounds)]
    return list(map(len, chunks)) if all(map(str.strip, chunks)) else []


def _piece_lengths(document: Document, max_words: int) -> list[int]:
    if document.kind == "code":
        pieces = _fit(units(document.text, document.id), max_words)
        return [len(piece) for piece, _ in packed(pieces, max_words)]
    return list(_section_lengths(document, max_words))


def _section_lengths(document: Document, max_words: int) -> Iterator[int]:
    """Pack each section. Short sections are joined if they all belong to the heading above the
    chunk, so that its title is right.
    """
    length = total = above = 0
    whole, is_markdown = Section(0, 0, "", document.text), suffix(document.id) in MARKDOWN
    for section in sections(document.text) if is_markdown else [whole]:
        pieces = list(packed(_section(section, max_words), max_words))
        for number, (piece, size) in enumerate(pieces):
            fits = len(pieces) == 1 and total + size <= max_words
            if length and not (fits and section.above >= above):
                yield length
                length = total = 0
            if not length:
                above = section.level if number else section.above
            length, total = length + len(piece), total + size
    if length:
        yield length


def _section(section: Section, max_words: int) -> Iterator[tuple[str, int]]:
    """The headings and sentences of a section. If the first sentence must be cut, its first piece
    leaves room for the headings.
    """
    first, *others = sentences(section.text) or [""]
    headings = list(packed(_fit([section.headings], max_words), max_words))
    room = max_words - (headings[-1][1] if headings else 0)
    cut = room if room and count_words(first) > max_words else max_words
    return chain(headings, _fit([first], cut), _fit(others, max_words))


def _cut(document: Document, index: int, lengths: Iterable[int]) -> Iterator[Chunk]:
    start = 0
    for length in lengths:
        piece = document.text[start : start + length]
        start += length
        if piece.strip():
            yield Chunk(index, piece)


def _fit(pieces: Iterable[str], max_words: int) -> Iterator[tuple[str, int]]:
    """Cut pieces that are too long at blank lines, else at line ends, else between words.

    Yields (piece, number of words).
    """
    for piece in pieces:
        size = count_words(piece)
        if size <= max_words:
            yield piece, size
            continue
        lines = split_lines(piece)
        blank = [not line.strip() for line in lines]
        blocks = join_at(lines, {i for i in range(1, len(lines)) if blank[i - 1] and not blank[i]})
        if len(lines) > 1:
            parts = blocks if len(blocks) > 1 else lines
            yield from packed(_fit(parts, max_words), max_words)
        else:
            yield from _runs(words(piece), max_words)


def _runs(units: Sequence[str], max_words: int) -> Iterator[tuple[str, int]]:
    """Cut a sequence of words after white space, else after a comma or the like, else anywhere."""
    start = 0
    while start < len(units):
        end = limit = min(start + max_words, len(units))
        if end < len(units):
            places = range(end, start, -1)
            end = next((i for i in places if units[i - 1][-1].isspace()), None) or next(
                (i for i in places if units[i - 1][-1] in _PAUSES), limit
            )
        yield "".join(units[start:end]), end - start
        start = end


def packed(pieces: Iterable[tuple[str, int]], max_words: int) -> Iterator[tuple[str, int]]:
    """Join neighbouring pieces while they fit into ``max_words``."""
    current, total = "", 0
    for piece, size in pieces:
        if current and total + size > max_words:
            yield current, total
            current, total = "", 0
        current, total = current + piece, total + size
    if current:
        yield current, total
