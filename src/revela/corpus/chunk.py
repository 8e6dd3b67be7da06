"""Documents -> chunks of whole sentences (prose) or whole functions and blocks (code), at most
``max_words`` words each.

Nothing is lost and nothing is moved: the chunks of a document, joined, are its text. A sentence or
a line is cut only when it alone is longer than a chunk, and then between words.

The sentence rule is ours because pysbd reads 0.14 MB/s; it knows closing quotes, initials, numbers
and the common abbreviations, and it would rather miss a boundary than invent one.
"""

from __future__ import annotations

import functools
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from revela.corpus.arrow_list import batches, ordered_map
from revela.corpus.code import joined, split_lines, units
from revela.types import Chunk, Document

BATCH = 2**20  # characters that a worker process takes at a time
_BOUNDARY = re.compile(r"""[.!?\u2026\u3002\uff01\uff1f]+["'\u201d\u2019)\]]*\s+|\n[ \t]*\n\s*""")
_ABBREVIATION = re.compile(
    r"(?:^|[\s(\[])(?:[A-Z]|e\.g|i\.e|etc|cf|vs|al|approx|ca|Mr|Mrs|Ms|Dr|Prof|St|Fig|Figs|Eq|Eqs|No|Nos|Vol|pp|p|Inc|Ltd|Co|Corp|Jr|Sr|"
    r"Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sep|Sept|Oct|Nov|Dec|U\.S|U\.K|Ph\.D)\.$"
)
_WORDS = re.compile(r"\S+\s*")


def chunk(document: Document, index: int, max_words: int) -> list[Chunk]:
    """Cut one document into chunks of at most ``max_words`` whitespace-separated words.

    Args:
        document: prose or code; a title is not part of its chunks.
        index: the document's index in the corpus, kept in each chunk.
        max_words: upper limit; at least 1.
    """
    return list(_cut(document, index, _piece_lengths(document, max_words)))


def chunk_all(documents: Iterable[Document], max_words: int, workers: int = 1) -> Iterator[Chunk]:
    """Chunks of all documents, in order, as the documents come; the same for any number of worker
    processes.
    """
    waiting: deque[list[tuple[int, Document]]] = deque()

    def numbered() -> Iterator[list[tuple[int, Document]]]:
        for some in batches(enumerate(documents), lambda pair: len(pair[1].text), BATCH):
            waiting.append(some)
            yield some

    # Workers say how long each piece is, and send no text back.
    for lengths in ordered_map(
        functools.partial(_measure, max_words=max_words), numbered(), workers
    ):
        for (index, document), pieces in zip(waiting.popleft(), lengths, strict=True):
            yield from _cut(document, index, pieces)


def _measure(numbered: Sequence[tuple[int, Document]], max_words: int) -> list[list[int]]:
    return [_piece_lengths(document, max_words) for _, document in numbered]


def _piece_lengths(document: Document, max_words: int) -> list[int]:
    pieces = (
        units(document.text, document.id) if document.kind == "code" else sentences(document.text)
    )
    return [len(piece) for piece in _pack(_fit(pieces, max_words), max_words)]


def _cut(document: Document, index: int, lengths: Iterable[int]) -> Iterator[Chunk]:
    start = 0
    for length in lengths:
        piece = document.text[start : start + length]
        start += length
        if piece.strip():
            yield Chunk(index, piece)


def sentences(text: str) -> list[str]:
    """Split prose after sentence ends and at blank lines. Joined, the sentences are the text, white
    space included.
    """
    out, start = [], 0
    for match in _BOUNDARY.finditer(text):
        end = match.end()
        detached = text[
            match.start() - 1 : match.start()
        ].isspace()  # " . " of tokenized text, which often has no capitals
        if match.group()[0] != "\n" and text[end : end + 1].islower() and not detached:
            continue
        if match.group()[0] == "." and _ABBREVIATION.search(
            text[max(start, match.start() - 12) : match.start() + 1]
        ):
            continue
        out.append(text[start:end])
        start = end
    if start < len(text):
        out.append(text[start:])
    return out


def _fit(pieces: Iterable[str], max_words: int) -> Iterator[str]:
    """Pass pieces that fit; cut the others at blank lines, then at line ends, then between words."""
    for piece in pieces:
        if len(piece.split()) <= max_words:
            yield piece
            continue
        lines = split_lines(piece)
        blocks = joined(
            lines,
            {i for i in range(1, len(lines)) if not lines[i - 1].strip() and lines[i].strip()},
        )
        if len(blocks) > 1:
            yield from _pack(_fit(blocks, max_words), max_words)
        elif len(lines) > 1:
            yield from _pack(_fit(lines, max_words), max_words)
        else:
            words = _WORDS.findall(piece)
            head = piece[: len(piece) - sum(map(len, words))]  # white space before the first word
            for i in range(0, len(words), max_words):
                yield (head if i == 0 else "") + "".join(words[i : i + max_words])


def _pack(pieces: Iterable[str], max_words: int) -> Iterator[str]:
    """Join neighbours while they fit."""
    current, count = "", 0
    for piece in pieces:
        words = len(piece.split())
        if current and count + words > max_words:
            yield current
            current, count = "", 0
        current, count = current + piece, count + words
    if current:
        yield current
