"""Find near-duplicate documents, which share most word sequences with an earlier one.

Every run of five words is hashed (a shingle). rensa's R-MinHash turns a document's set of hashes
into a sketch of 64 numbers; the share of equal numbers in two sketches estimates the Jaccard
similarity of the sets. Documents whose sketches agree in a whole band of numbers are compared,
first by sketch, then by their shingles, which decide. So no document below the threshold is
dropped, and at least 95 % of those above it are found. For texts over a megabyte, a sample of
shingles decides, with an error of .001.

Memory: one byte per number and four per band, about 100 bytes per document.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from revela.corpus.parallel import batches
from revela.corpus.spool import ArrowList
from revela.silence import progress_bar
from revela.types import Document

RUN = 5  # words per shingle
# Minimum shingles: short texts, such as lines of code, can share words and differ in meaning.
SHORTEST = 16
SKETCH = 64  # numbers per document
SEED = 42
FOUND = 0.95  # probability that two documents of the given similarity share a band
SLACK = 0.15  # error of a sketch: four standard deviations
MEMBERS = 4  # documents remembered per band; further ones are similar to these
MAX_COMPARED = 3  # exact comparisons per document, the most similar sketches first
PART = 2**20  # bytes whose shingles are found at a time, to bound memory
MOST = 2**18  # maximum shingles compared per text: those with the lowest hashes
BATCH = 2**16  # shingles sketched at a time

Bytes = NDArray[np.uint8]
Hashes = NDArray[np.uint64]

# Words are letters and digits: ASCII is put in lower case, every byte of other scripts is a letter,
# and the rest is space.
_WORD = bytes(
    ord(chr(i).lower()) if i < 128 and chr(i).isalnum() else i if i >= 128 else 32
    for i in range(256)
)
# Scripts without spaces. From U+3000 to U+9FFF every character is a word. In Thai, Lao, Tibetan,
# Myanmar and Khmer a word begins at every character whose code ends in the bits 10.
_SPACELESS = re.compile(
    rb"[\xe3-\xe9]|(?:\xe0[\xb8-\xbf]|\xe1[\x80\x81\x9e\x9f])"
    rb"[\x82\x86\x8a\x8e\x92\x96\x9a\x9e\xa2\xa6\xaa\xae\xb2\xb6\xba\xbe]"
)
_BASE = np.uint64(0x9E3779B97F4A7C15)


def near_duplicates(
    documents: ArrowList[Document], similarity: float, never: Collection[int] = ()
) -> dict[int, int]:
    """Row of each document to drop -> row of an earlier, similar document that is kept. Rows in
    ``never`` count as earlier than the others, and are not dropped.

    ``similarity`` is the minimum Jaccard similarity of two texts' shingles, 0 to 1. Titles are
    ignored; texts with fewer than ``SHORTEST`` shingles are never duplicates.

    >>> from revela.corpus.spool import arrow_list
    >>> text = " ".join(f"word{i}" for i in range(100))
    >>> documents = [Document("a", text), Document("b", "Other words."), Document("c", text + "!")]
    >>> near_duplicates(arrow_list(Document, documents), 0.8)
    {2: 0}
    """
    sketches, bands = _sketches(documents, rows_of_band(similarity))
    rows, groups = _shared(bands)
    del bands
    if never:
        order = np.argsort(~np.isin(rows, list(never)), kind="stable")
        rows, groups = rows[order], groups[order]
    hashed = functools.lru_cache(maxsize=64)(lambda row: shingles(documents.value(row, "text")))
    members = np.full((int(groups.max(initial=-1)) + 1, MEMBERS), -1, dtype=np.int64)
    dropped: dict[int, int] = {}
    pairs = zip(rows.tolist(), groups, strict=True)
    for row, mine in progress_bar("near-duplicates", "document", pairs, len(rows)):
        mine = mine[mine >= 0]
        near = np.unique(members[mine])
        near = near[near >= 0]
        agreement = (sketches[near] == sketches[row]).mean(axis=1)
        count = min(MAX_COMPARED, int((agreement >= similarity - SLACK).sum()))
        likely = near[np.argsort(-agreement, kind="stable")][:count].tolist()
        similar = (other for other in likely if jaccard(hashed(row), hashed(other)) >= similarity)
        if row not in never and (kept := next(similar, None)) is not None:
            dropped[row] = kept
            continue
        free = members[mine] < 0
        has_room = free.any(axis=1)
        members[mine[has_room], free.argmax(axis=1)[has_room]] = row
    return dropped


def shingles(text: str) -> Hashes:
    """The lowest ``MOST`` distinct hashes of a text's runs of five words, sorted."""
    parts = _parts(text)
    return parts[0][:MOST] if len(parts) == 1 else _distinct(np.concatenate(parts))[:MOST]


def _parts(text: str) -> list[Hashes]:
    """Distinct hashes of the runs of five words in each ``PART`` of a text, sorted."""
    raw = text.encode().translate(_WORD)
    parts = list[Hashes]()
    before, start = np.zeros(0, dtype=np.uint64), 0
    while start < len(raw) or not parts:
        end = raw.find(b" ", start + PART) % (len(raw) + 1)  # the end if there is no space
        piece = raw[start:end]
        words = (piece if piece.isascii() else _SPACELESS.sub(rb" \g<0>", piece)).split()
        hashed = np.fromiter(map(zlib.crc32, words), dtype=np.uint64, count=len(words))
        hashed = np.concatenate([before, hashed])
        count = max(0, len(hashed) - RUN + 1)
        runs = np.zeros(count, dtype=np.uint64)
        for i in range(RUN):
            runs = runs * _BASE + hashed[i : count + i]
        parts.append(_distinct(_mix(runs)))
        before, start = hashed[count:], end
    return parts


def _distinct(values: Hashes) -> Hashes:
    values = np.sort(values)
    distinct: Hashes = values[np.diff(values, prepend=values[:1] + 1) != 0]
    return distinct  # np.unique takes five times as long


def jaccard(one: Hashes, other: Hashes) -> float:
    """Size of the intersection divided by size of the union; 0 if both sets are empty.

    If a set was cut to ``MOST``, only the hashes up to which both are complete count (Cohen &
    Kaplan, 2007).
    """
    for cut in (one, other):
        if len(cut) == MOST:
            one, other = one[one <= cut[-1]], other[other <= cut[-1]]
    shared = len(np.intersect1d(one, other, assume_unique=True))
    return shared / max(1, len(one) + len(other) - shared)


def rows_of_band(similarity: float) -> int:
    """The longest band that documents of this similarity share with probability ``FOUND``.

    The probability is 1 - (1 - s^r)^b for b bands of r rows (Broder, 1997; Indyk & Motwani, 1998).
    Longer bands give fewer pairs to compare.
    """

    def probability(rows: int) -> float:
        return 1 - (1 - similarity**rows) ** (SKETCH // rows)

    return max((rows for rows in range(1, SKETCH + 1) if probability(rows) >= FOUND), default=1)


def _sketches(documents: ArrowList[Document], rows: int) -> tuple[Bytes, NDArray[np.uint32]]:
    """Sketches, one byte per number, (N, SKETCH), and hashes of the bands, (N, bands).

    A document with fewer than ``SHORTEST`` shingles has hashes of 0 and is not compared.
    """
    from rensa import RMinHash

    count = SKETCH // rows
    sketches = np.zeros((len(documents), SKETCH), dtype=np.uint8)
    bands = np.zeros((len(documents), count), dtype=np.uint32)
    weights = np.cumprod(np.full(rows, _BASE))
    columns = documents.arrays("text")
    read = (text.as_py() for column in columns for text in column)
    texts = progress_bar("near-duplicates", "document", read, len(documents))
    hashed = ((row, _parts(text)) for row, text in enumerate(texts))
    long = ((row, parts) for row, parts in hashed if max(map(len, parts)) >= SHORTEST)
    for batch in batches(long, lambda pair: sum(map(len, pair[1])), BATCH):
        indices = [row for row, _ in batch]
        sets = [part for _, parts in batch for part in parts]
        firsts = np.cumsum([0, *(len(parts) for _, parts in batch[:-1])])
        offsets = np.cumsum([0, *map(len, sets)]).astype(np.uint64)
        matrix = RMinHash.digest_matrix_from_flat_token_hashes(
            np.concatenate(sets), offsets, SKETCH, SEED
        )
        # The sketch of a set has the minimum of its parts' sketches in each number.
        numbers = np.minimum.reduceat(np.array(matrix.to_rows(), dtype=np.uint64), firsts)
        mixed = _mix((numbers[:, : count * rows].reshape(-1, count, rows) * weights).sum(axis=2))
        sketches[indices] = numbers & np.uint64(255)
        bands[indices] = np.maximum(mixed >> np.uint64(32), 1)
    return sketches, bands


def _mix(values: Hashes) -> Hashes:
    """Mix bits: every bit of the result depends on every bit of the value."""
    for _ in range(2):
        values = (values ^ (values >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return values ^ (values >> np.uint64(32))


def _shared(bands: NDArray[np.uint32]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Rows of documents that share a band, (R,), and the number of each shared band, (R, bands), or
    -1.
    """
    groups = np.full(bands.shape, -1, dtype=np.int32)
    n_groups = 0
    for i in range(bands.shape[1]):
        _, inverse, counts = np.unique(bands[:, i], return_inverse=True, return_counts=True)
        several = counts > 1
        if len(several) and bands[:, i].min() == 0:
            several[0] = False
        numbers = np.where(several, n_groups + np.cumsum(several) - 1, -1)
        groups[:, i] = numbers[inverse]
        n_groups += int(several.sum())
    rows = np.flatnonzero((groups >= 0).any(axis=1))
    return rows, groups[rows]
