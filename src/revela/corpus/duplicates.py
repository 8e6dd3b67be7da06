"""Near-duplicate documents: which ones share most of their word sequences with an earlier one.

Every run of five words of a document is hashed (a shingle). rensa's R-MinHash turns the set of
hashes into a sketch of 64 numbers; the share of equal numbers in two sketches estimates the
Jaccard similarity of the sets. Documents whose sketches agree in a whole band of numbers are
compared, first by sketch, then by their actual runs of words, which decide. So no document is
dropped that is less similar than the threshold, and at least 95 % of those above it are found.

Memory: one byte per number and four per band, about 100 bytes per document. Documents are compared
in their order, so the result does not depend on threads.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from revela.corpus.arrow_list import ArrowList
from revela.silence import waiting
from revela.types import Document

RUN = 5  # words that are hashed together
# Words; shorter texts, such as lines of code, can share their words and still differ in meaning.
SHORTEST = 20
SKETCH = 64  # numbers per document
SEED = 42
FOUND = 0.95  # probability that two documents of the given similarity share a band
SLACK = 0.15  # error of a sketch: four standard deviations
KEPT = 4  # documents remembered per band; further ones are about as similar to these
CHECKED = 3  # exact comparisons per document, the most similar sketches first
LONGEST = 2**20  # bytes that are read per text, and of several texts at a time

Bytes = NDArray[np.uint8]
Hashes = NDArray[np.uint64]
Shingles = NDArray[np.int64]

# Words are letters and digits: ASCII in lower case, every byte of other scripts is a letter, the
# rest is space.
_WORD = bytes(
    ord(chr(i).lower()) if i < 128 and chr(i).isalnum() else i if i >= 128 else 32
    for i in range(256)
)
# Scripts without spaces. From U+3000 to U+9FFF every character is a word, by its first byte. In
# Thai, Lao, Tibetan, Myanmar and Khmer (first two bytes) a word begins at every character whose
# code ends in the bits 10, 1.05 for each word of corpus/words.py: text put in moves no other word.
_SPACELESS = re.compile(
    rb"[\xe3-\xe9]|(?:\xe0[\xb8-\xbf]|\xe1[\x80\x81\x9e\x9f])"
    rb"[\x82\x86\x8a\x8e\x92\x96\x9a\x9e\xa2\xa6\xaa\xae\xb2\xb6\xba\xbe]"
)
_BASE = 0x9E3779B97F4A7C15


def near_duplicates(documents: ArrowList[Document], similarity: float) -> dict[int, int]:
    """Rows of the documents to drop -> the row of the earlier, kept document that is similar.

    Args:
        documents: all documents; not a view.
        similarity: Jaccard similarity of the runs of five words of two texts, 0 to 1. Titles are
            ignored, and so is text after the first megabyte; texts of fewer than ``SHORTEST`` words
            are never duplicates.

    >>> from revela.corpus.arrow_list import arrow_list
    >>> text = " ".join(f"word{i}" for i in range(100))
    >>> documents = [Document("a", text), Document("b", "Other words."), Document("c", text + "!")]
    >>> near_duplicates(arrow_list(Document, documents), 0.8)
    {2: 0}
    """
    sketches, bands = _sketches(documents, rows_of_band(similarity))
    rows, groups = _shared(bands)
    del bands
    hashed = functools.lru_cache(maxsize=64)(lambda row: shingles(documents.value(row, "text")))
    members = np.full((int(groups.max(initial=-1)) + 1, KEPT), -1, dtype=np.int64)
    dropped: dict[int, int] = {}
    pairs = zip(rows.tolist(), groups, strict=True)
    for row, mine in waiting("near-duplicates", "document", pairs, len(rows)):
        mine = mine[mine >= 0]
        near = np.unique(members[mine])
        near = near[near >= 0]
        if len(near):
            agreement = (sketches[near] == sketches[row]).mean(axis=1)
            count = min(CHECKED, int((agreement >= similarity - SLACK).sum()))
            likely = near[np.argsort(-agreement, kind="stable")][:count].tolist()
            same = (other for other in likely if jaccard(hashed(row), hashed(other)) >= similarity)
            if (kept := next(same, None)) is not None:
                dropped[row] = kept
                continue
        free = members[mine] < 0
        members[mine[free.any(axis=1)], free.argmax(axis=1)[free.any(axis=1)]] = row
    return dropped


def shingles(text: str) -> Shingles:
    """Distinct hashes of the runs of five words of a text, sorted; valid in this process only.

    The same runs as in ``runs``, whose vector operations are many times slower for one short text.
    """
    raw = text.encode()[:LONGEST].translate(_WORD)
    words = (raw if raw.isascii() else _SPACELESS.sub(rb" \g<0>", raw)).split()
    five = zip(*(words[i:] for i in range(RUN)), strict=False)
    hashes = np.fromiter(map(hash, five), dtype=np.int64)
    hashes.sort()
    return hashes[np.concatenate([[True], hashes[1:] != hashes[:-1]])] if len(hashes) else hashes


def jaccard(one: Shingles, other: Shingles) -> float:
    """Size of the intersection by size of the union; 0 if a set is empty."""
    if not len(one) or not len(other):
        return 0.0
    places = np.minimum(np.searchsorted(other, one), len(other) - 1)
    both = int((other[places] == one).sum())
    return both / (len(one) + len(other) - both)


def rows_of_band(similarity: float) -> int:
    """The longest band that documents of this similarity share with probability ``FOUND``.

    1 - (1 - s^r)^b for b bands of r rows (Broder, 1997; Indyk & Motwani, 1998); longer bands make
    fewer pairs to compare.
    """

    def found(rows: int) -> float:
        return 1 - (1 - similarity**rows) ** (SKETCH // rows)

    return max((rows for rows in range(1, SKETCH + 1) if found(rows) >= FOUND), default=1)


def _sketches(documents: ArrowList[Document], rows: int) -> tuple[Bytes, NDArray[np.uint32]]:
    """Sketches, one byte per number, (N, SKETCH), and hashes of the bands, (N, bands).

    A document of fewer than ``SHORTEST`` words has hashes of 0 and is not compared.
    """
    from rensa import RMinHash

    count = SKETCH // rows
    sketches = np.zeros((len(documents), SKETCH), dtype=np.uint8)
    bands = np.zeros((len(documents), count), dtype=np.uint32)
    weights = _powers(_BASE)[:rows]
    done = 0
    shown = waiting("near-duplicates", "document", total=len(documents))
    for text, bounds in _batches_of_bytes(documents):
        hashes, counts = runs(text, bounds)
        long = counts > SHORTEST - RUN
        hashes, some = hashes[np.repeat(long, counts)], np.flatnonzero(long)
        offsets = np.concatenate([[0], np.cumsum(counts[some])]).astype(np.uint64)
        if len(some):
            matrix = RMinHash.digest_matrix_from_flat_token_hashes(hashes, offsets, SKETCH, SEED)
            numbers = np.array(matrix.to_rows(), dtype=np.uint64)
            mixed = mix((numbers[:, : count * rows].reshape(-1, count, rows) * weights).sum(axis=2))
            sketches[done + some] = (numbers & np.uint64(255)).astype(np.uint8)
            bands[done + some] = np.maximum(mixed >> np.uint64(32), 1).astype(np.uint32)
        done += len(counts)
        shown.update(len(counts))
    shown.close()
    return sketches, bands


def _batches_of_bytes(documents: ArrowList[Document]) -> Iterator[tuple[Bytes, NDArray[np.int64]]]:
    """The bytes of several texts, and the offsets of each and of the end of the last one."""
    for column in documents.arrays("text"):
        _, offsets, data = column.buffers()
        rows = slice(column.offset, column.offset + len(column) + 1)
        ends = np.frombuffer(offsets, dtype=np.int32)[rows].astype(np.int64)
        text = np.frombuffer(b"" if data is None else data, dtype=np.uint8)
        first = 0
        while first < len(column):
            fitting = int(np.searchsorted(ends, ends[first] + LONGEST, side="right")) - 1
            last = max(first + 1, fitting)
            bounds = np.minimum(ends[first : last + 1] - ends[first], LONGEST)
            yield text[ends[first] : ends[first] + bounds[-1]], bounds
            first = last


def runs(text: Bytes, bounds: NDArray[np.int64]) -> tuple[Hashes, NDArray[np.int64]]:
    """Hashes of every run of ``RUN`` words of several texts.

    Args:
        text: their bytes, one text after another, at most ``LONGEST``.
        bounds: the offset of each text, and the end of the last one.

    Returns:
        The hashes, text after text, and the number of each text's.
    """
    letters = np.frombuffer(_WORD, dtype=np.uint8)[text]
    edge = np.zeros(len(text) + 1, dtype=bool)
    edge[bounds] = True  # a word ends where its text ends
    if text.max(initial=0) >= 0xE0:  # as _SPACELESS
        edge[:-1] |= (text >= 0xE3) & (text <= 0xE9)
        pairs = text[:-2].astype(np.uint16) << 8 | text[1:-1]
        south_asian = (pairs >= 0xE0B8) & (pairs <= 0xE181) | (pairs == 0xE19E) | (pairs == 0xE19F)
        edge[:-3] |= south_asian & (text[2:] & 3 == 2)
    is_letter = np.zeros(len(text) + 2, dtype=bool)
    is_letter[1:-1] = letters != 32
    starts = np.flatnonzero(is_letter[1:-1] & (~is_letter[:-2] | edge[:-1]))
    ends = np.flatnonzero(is_letter[1:-1] & (~is_letter[2:] | edge[1:])) + 1
    # A polynomial of each word's letters: the difference of two prefix sums, scaled to one power.
    sums = np.zeros(len(text) + 1, dtype=np.uint64)
    np.cumsum(letters * _powers(_BASE)[: len(text)], out=sums[1:])
    words = mix((sums[ends] - sums[starts]) * _powers(pow(_BASE, -1, 2**64))[starts])
    of = np.searchsorted(bounds, starts, side="right") - 1
    many = max(0, len(words) - RUN + 1)
    hashes = np.zeros(many, dtype=np.uint64)
    for i in range(RUN):
        hashes = hashes * np.uint64(_BASE) + words[i : many + i]
    within = of[:many] == of[RUN - 1 :]
    return mix(hashes[within]), np.bincount(of[:many][within], minlength=len(bounds) - 1)


@functools.cache
def _powers(base: int) -> Hashes:
    """base ** (0, 1, 2, ...) modulo 2 ** 64."""
    factors = np.full(LONGEST + 1, base, dtype=np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)


def mix(values: Hashes) -> Hashes:
    """Scramble: every bit of the result depends on every bit of the value."""
    for _ in range(2):
        values = (values ^ (values >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return values ^ (values >> np.uint64(32))


def _shared(bands: NDArray[np.uint32]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Rows of documents that share a band, and the number of each such band or -1, (R, bands)."""
    groups = np.full(bands.shape, -1, dtype=np.int32)
    known = 0
    for i in range(bands.shape[1]):
        _, inverse, counts = np.unique(bands[:, i], return_inverse=True, return_counts=True)
        several = counts > 1
        if len(several) and bands[:, i].min() == 0:
            several[0] = False
        numbers = np.where(several, known + np.cumsum(several) - 1, -1)
        groups[:, i] = numbers[inverse]
        known += int(several.sum())
    rows = np.flatnonzero((groups >= 0).any(axis=1))
    return rows, groups[rows]
