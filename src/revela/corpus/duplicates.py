"""Near-duplicate documents: which ones share most of their wording with an earlier one.

Every run of five words of a document is hashed; rensa's R-MinHash turns the set of hashes into a
sketch of 64 numbers, two of which agree in about as many places as the sets share of their union
(the Jaccard similarity). Documents whose sketches agree in a whole band of numbers are compared,
first by sketch, then by their actual runs of words, which alone decide. So nothing is dropped that
is not as similar as asked for; of what is, at least 95 % is found.

In memory stay one byte of each number and four bytes a band: about 100 bytes a document. Sequence
of work and number of threads change nothing: the documents are judged in their order.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from revela.corpus.arrow_list import ArrowList
from revela.types import Document

RUN = 5  # words that are hashed together
# words of a text; shorter ones may differ in what matters and still share their words, as lines of
# code do
SHORTEST = 20
SKETCH = 64
SEED = 42
FOUND = 0.95  # chance that two documents as similar as asked for share a band
SLACK = 0.15  # what a sketch may miss by: four standard deviations
KEPT = 4  # documents remembered of one band; more are as like one another as to these
CHECKED = 3  # actual comparisons a document, the likeliest first
LONGEST = 2**20  # bytes of a text that are looked at, and of several texts at a time

Bytes = NDArray[np.uint8]
Hashes = NDArray[np.uint64]
Wording = NDArray[np.int64]

# Letters and digits make words; ASCII is folded to lower case, every byte of other scripts counts
# as a letter, all else is a space.
_WORD = bytes(
    ord(chr(i).lower()) if i < 128 and chr(i).isalnum() else i if i >= 128 else 32
    for i in range(256)
)
_SPACELESS = re.compile(
    rb"[\xe3-\xe9]"
)  # first bytes of U+3000 to U+9FFF: scripts without spaces, where a character is a word
_BASE = 0x9E3779B97F4A7C15


def near_duplicates(documents: ArrowList[Document], similarity: float) -> dict[int, int]:
    """Documents to drop, each with the earlier and kept one that it resembles.

    Args:
        documents: all documents, in a file of their own (no view of one).
        similarity: share of the runs of five words of two texts that both have, 0 to 1. Titles are
            not looked at, nor more of a text than its first megabyte; texts of fewer than
            ``SHORTEST`` words resemble nothing.
    """
    sketches, bands = _sketched(documents, rows_of_band(similarity))
    rows, groups = _shared(bands)
    del bands
    worded = functools.lru_cache(maxsize=64)(lambda row: wording(documents.value(row, "text")))
    members = np.full((int(groups.max(initial=-1)) + 1, KEPT), -1, dtype=np.int64)
    dropped: dict[int, int] = {}
    for row, mine in zip(rows.tolist(), groups, strict=True):
        mine = mine[mine >= 0]
        near = np.unique(members[mine])
        near = near[near >= 0]
        if len(near):
            agreement = (sketches[near] == sketches[row]).mean(axis=1)
            likely = near[np.argsort(-agreement, kind="stable")][
                : int((agreement >= similarity - SLACK).sum())
            ][:CHECKED]
            like = next(
                (
                    other
                    for other in likely.tolist()
                    if jaccard(worded(row), worded(other)) >= similarity
                ),
                None,
            )
            if like is not None:
                dropped[row] = like
                continue
        free = members[mine] < 0
        members[mine[free.any(axis=1)], free.argmax(axis=1)[free.any(axis=1)]] = row
    return dropped


def wording(text: str) -> Wording:
    """Hashes of the runs of five words of a text, each once and sorted; good for this process only.

    The same runs as in ``runs``, whose vector operations take many times as long for one short
    text.
    """
    raw = text.encode()[:LONGEST].translate(_WORD)
    words = (raw if raw.isascii() else _SPACELESS.sub(rb" \g<0>", raw)).split()
    hashes = np.fromiter(
        map(hash, zip(*(words[i:] for i in range(RUN)), strict=False)), dtype=np.int64
    )
    hashes.sort()
    return hashes[np.concatenate([[True], hashes[1:] != hashes[:-1]])] if len(hashes) else hashes


def jaccard(one: Wording, other: Wording) -> float:
    """Share of their runs of words that two wordings both have; 0 for two without any."""
    if not len(one) or not len(other):
        return 0.0
    places = np.minimum(np.searchsorted(other, one), len(other) - 1)
    both = int((other[places] == one).sum())
    return both / (len(one) + len(other) - both)


def rows_of_band(similarity: float) -> int:
    """The longest band that two documents of this similarity still share with a chance of
    ``FOUND``: long ones bring few strangers.
    """
    return max(
        (
            rows
            for rows in range(1, SKETCH + 1)
            if 1 - (1 - similarity**rows) ** (SKETCH // rows) >= FOUND
        ),
        default=1,
    )


def _sketched(documents: ArrowList[Document], rows: int) -> tuple[Bytes, NDArray[np.uint32]]:
    """The sketch of each document, a byte a number, (N, SKETCH), and a hash of each band, (N,
    bands); hash 0: nothing to compare.
    """
    from rensa import RMinHash

    count = SKETCH // rows
    sketches = np.zeros((len(documents), SKETCH), dtype=np.uint8)
    bands = np.zeros((len(documents), count), dtype=np.uint32)
    weights = _powers(_BASE)[:rows]
    done = 0
    for text, bounds in _texts(documents):
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
    return sketches, bands


def _texts(documents: ArrowList[Document]) -> Iterator[tuple[Bytes, NDArray[np.int64]]]:
    """The texts as they lie on disk: the bytes of several, and where each begins and the last one
    ends.
    """
    for column in documents.arrays("text"):
        _, offsets, data = column.buffers()
        ends = np.frombuffer(offsets, dtype=np.int32)[
            column.offset : column.offset + len(column) + 1
        ].astype(np.int64)
        text = (
            np.frombuffer(data, dtype=np.uint8) if data is not None else np.empty(0, dtype=np.uint8)
        )
        first = 0
        while first < len(column):
            last = max(
                first + 1, int(np.searchsorted(ends, ends[first] + LONGEST, side="right")) - 1
            )
            bounds = np.minimum(ends[first : last + 1] - ends[first], LONGEST)
            yield text[ends[first] : ends[first] + bounds[-1]], bounds
            first = last


def runs(text: Bytes, bounds: NDArray[np.int64]) -> tuple[Hashes, NDArray[np.int64]]:
    """Hashes of every run of ``RUN`` words of several texts.

    Args:
        text: their bytes, one after the other, at most ``LONGEST``.
        bounds: where each begins, and where the last one ends.

    Returns:
        The hashes, text after text, and how many are each text's.
    """
    letters = np.frombuffer(_WORD, dtype=np.uint8)[text]
    edge = np.zeros(len(text) + 1, dtype=bool)
    edge[bounds] = True  # no word reaches from one text into the next
    edge[:-1] |= (text >= 0xE3) & (text <= 0xE9)  # as _SPACELESS
    is_letter = np.zeros(len(text) + 2, dtype=bool)
    is_letter[1:-1] = letters != 32
    starts = np.flatnonzero(is_letter[1:-1] & (~is_letter[:-2] | edge[:-1]))
    ends = np.flatnonzero(is_letter[1:-1] & (~is_letter[2:] | edge[1:])) + 1
    # A polynomial of each word's letters: the difference of two prefix sums, brought to the same
    # power.
    sums = np.zeros(len(text) + 1, dtype=np.uint64)
    np.cumsum(letters * _powers(_BASE)[: len(text)], out=sums[1:])
    words = mix((sums[ends] - sums[starts]) * _powers(pow(_BASE, -1, 2**64))[starts])
    of = np.searchsorted(bounds, starts, side="right") - 1
    many = max(0, len(words) - RUN + 1)
    hashes = np.zeros(many, dtype=np.uint64)
    for i in range(RUN):
        hashes = hashes * np.uint64(_BASE) + words[i : many + i]
    whole = of[:many] == of[RUN - 1 :]
    return mix(hashes[whole]), np.bincount(of[:many][whole], minlength=len(bounds) - 1)


@functools.cache
def _powers(base: int) -> Hashes:
    """base ** (0, 1, 2, ...) modulo 2 ** 64."""
    factors = np.full(LONGEST + 1, base, dtype=np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)


def mix(values: Hashes) -> Hashes:
    """Every bit of the result depends on every bit of the value."""
    for _ in range(2):
        values = (values ^ (values >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return values ^ (values >> np.uint64(32))


def _shared(bands: NDArray[np.uint32]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Documents that share a band with another: their rows in order, and the number of each shared
    band, (rows, bands), or -1.
    """
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
