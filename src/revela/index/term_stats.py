"""Count the chunks with each term, which the fusion needs and LanceDB does not give. Terms are
hashed; the state of an index keeps the counts (state.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from revela.index.language import CORPUS_WORDS
from revela.types import hash64

K1, B = 1.2, 0.75  # of BM25

cached_hash = lru_cache(CORPUS_WORDS)(hash64)


def idf(frequencies_T: NDArray[np.int64], passages: int) -> NDArray[np.float64]:
    """Lucene's idf of terms in N passages, (T,): log(1 + (N - df + 0.5) / (df + 0.5))."""
    odds_T = (passages - frequencies_T + 0.5) / (frequencies_T + 0.5)
    return np.asarray(np.log1p(odds_T), np.float64)


def max_score(frequencies_T: NDArray[np.int64], passages: int) -> float:
    """The maximum BM25 score for a query: sum of idf (k1 + 1), the limit as term frequency grows
    (Bruch, Gai & Ingber, TOIS 2023, section 3).
    """
    return float((K1 + 1) * idf(frequencies_T, passages).sum())


@dataclass(frozen=True)
class TermCounts:
    """The number of chunks that hold each term: sorted hashes of terms, and counts."""

    chunks: int
    hashes: NDArray[np.uint64]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, terms: Iterable[Sequence[str]]) -> TermCounts:
        """Count the terms of each chunk."""
        counts, chunks = Counter[int](), 0
        for chunk in terms:
            chunks += 1
            counts.update(set(map(cached_hash, chunk)))
        hashes = np.fromiter(counts.keys(), np.uint64, len(counts))
        order = np.argsort(hashes)
        numbers = np.fromiter(counts.values(), np.int64, len(counts))
        return cls(chunks, hashes[order], numbers[order])
