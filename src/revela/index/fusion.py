"""Hybrid search: join the ranking by vectors and the ranking by words into one.

By score (``fuse_scores``), the default:

    score(q, d) = (cos(q, d) + w s(q, d)) / (1 + w)             s(q, d) = BM25(q, d) / best(q)

    w = 1.2 r^2.5 sqrt(min(3, g_words / max(0.01, g_vectors))) min(1, spread / 0.06)

``best(q)`` is the BM25 score of a document that held nothing but the words of the query: the
theoretical maximum of Bruch, Gai & Ingber (An Analysis of Fusion Functions for Hybrid Retrieval,
TOIS 2023). Both cos and s are absolute, so a score can be read: 1 is the best that can be, and a
query whose words the corpus lacks is ranked by its vectors.

The weight w of the words is set for each query, without labels:

- r, agreement: the cosine of the passage that the words rank first, over that of the vectors'
  first, both above the query's mean cosine with all passages. 1 if both find the same, 0 if what
  the words find is no nearer than any passage.
- g, confidence of a side: how far its first score stands out from the mean of its first ten, as a
  share of the first score.
- spread: the standard deviation of the cosine of two passages. Where a model's cosines lie close
  together, a small difference says more, and w is smaller in proportion.

The constants were chosen on nine collections and two models (research/notebook.md, which has what
else was tried).

By rank (``fuse_ranks``): reciprocal rank fusion (Cormack, Clarke & Buettcher, SIGIR 2009), the sum
over rankings of 1 / (k + rank). It gives a weak side an equal weight (docs/results.md), and is kept
for comparison.

Shapes: N vectors, D numbers of a vector.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from statistics import fmean
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from revela.types import Vectors

Fusion = Literal["score", "rank"]
Item = TypeVar("Item", bound=Hashable)
Found = TypeVar("Found")
Ranking = Mapping[int, tuple[str, float]]
"""A row of an index -> its document and its score, best first."""

# Spread below which the words weigh less: MiniLM has .10 to .15, a fitted decoder .06 to .08.
CLOSE = 0.06
WEIGHT, POWER = 1.2, 2.5  # of w
FIRST = 10  # scores that a gap is measured on
LEAST_GAP, MOST_CONFIDENT = 0.01, 3.0  # least g_vectors; greatest g_words / g_vectors
TINY = 1e-6
SAMPLE = 1000  # vectors that the geometry is measured on
RRF_K = 60  # the constant of the paper, and of Revela's hybrid rows
DEPTH = 200  # candidates taken from each side


@dataclass(frozen=True)
class Geometry:
    """The mean of a corpus's vectors, (D,), and the standard deviation of the cosine of two."""

    mean: Vectors
    spread: float

    @classmethod
    def of(cls, vectors_ND: Vectors) -> Geometry:
        """Measured on at most ``SAMPLE`` of these vectors, evenly spaced."""
        some_ND = vectors_ND[evenly(len(vectors_ND))]
        if len(some_ND) < 2:
            return cls(some_ND.sum(axis=0), 0.0)
        cosines = (some_ND @ some_ND.T)[np.triu_indices(len(some_ND), 1)]
        return cls(some_ND.mean(axis=0), float(cosines.std()))


def evenly(count: int, most: int = SAMPLE) -> NDArray[np.int64]:
    """Indices of at most so many of ``count`` things, evenly spaced."""
    return np.unique(np.linspace(0, count - 1, min(most, count)).astype(np.int64))


def fuse_scores(
    cosines: Mapping[Item, float], shares: Mapping[Item, float], background: float, spread: float
) -> dict[Item, float]:
    """Fuse two rankings by score: the score of every candidate, best first.

    Args:
        cosines: cos(q, d) of every candidate.
        shares: s(q, d), 0 to 1, of the candidates that hold a word of the query.
        background: mean cosine of the query with all passages.
        spread: standard deviation of the cosine of two passages.

    Example:
        >>> fused = fuse_scores({"a": 0.8, "b": 0.6}, {"b": 0.5}, background=0.2, spread=0.1)
        >>> {document: round(score, 2) for document, score in fused.items()}
        {'b': 0.56, 'a': 0.46}
    """
    weight = weight_of_words(cosines, shares, background) * min(1.0, spread / CLOSE)
    scores = {
        item: (cosine + weight * shares.get(item, 0.0)) / (1 + weight)
        for item, cosine in cosines.items()
    }
    return dict(sorted(scores.items(), key=lambda pair: -pair[1]))


def weight_of_words(
    cosines: Mapping[Item, float], shares: Mapping[Item, float], background: float
) -> float:
    """w without its last factor, the spread; arguments as above."""
    if not shares:
        return 0.0
    by_vectors = [cosine - background for cosine in nlargest(FIRST, cosines.values())]
    by_words = nlargest(FIRST, shares.values())
    by_words += [0.0] * (len(by_vectors) - len(by_words))
    first_by_words = cosines[max(shares, key=lambda item: shares[item])] - background
    agreement = max(0.0, first_by_words / by_vectors[0]) if by_vectors[0] > 0 else 0.0
    confidence = _gap(by_words) / max(_gap(by_vectors), LEAST_GAP)
    return WEIGHT * math.pow(agreement, POWER) * math.sqrt(min(confidence, MOST_CONFIDENT))


def _gap(scores: Sequence[float]) -> float:
    """g: how far the first score, the greatest, is above the mean of all, as a share of it."""
    return max(0.0, (scores[0] - fmean(scores)) / max(scores[0], TINY))


def reciprocal_rank_fusion(rankings: Sequence[Sequence[Item]], k: int = RRF_K) -> dict[Item, float]:
    """Fuse rankings of items by rank: the score of every item, best first.

    Ranks count from 1; an item that is missing from a ranking gets nothing from it.

    Example:
        >>> list(reciprocal_rank_fusion([["a", "b"], ["b", "c"]]))
        ['b', 'a', 'c']
    """
    scores: dict[Item, float] = {}
    for ranking in rankings:
        for rank, item in enumerate(ranking, start=1):
            scores[item] = scores.get(item, 0.0) + 1.0 / (k + rank)
    return dict(sorted(scores.items(), key=lambda pair: -pair[1]))


def best_chunks(ranking: Ranking) -> tuple[dict[str, int], dict[str, float]]:
    """One ranking of chunks -> each document's best row, and the documents' scores, best first."""
    best = _first((document, row) for row, (document, _) in ranking.items())
    return best, {document: ranking[row][1] for document, row in best.items()}


def fuse_ranks(rankings: Sequence[Ranking]) -> tuple[dict[str, int], dict[str, float]]:
    """Rankings of chunks -> each document's best row, and the documents' scores by rank, best
    first.

    A document's rank in a ranking is that of its first chunk. Its best row is its first one in the
    fusion of the rankings of chunks.
    """
    document_of = {row: document for ranking in rankings for row, (document, _) in ranking.items()}
    rows = reciprocal_rank_fusion([list(ranking) for ranking in rankings])
    best = _first((document_of[row], row) for row in rows)
    return best, reciprocal_rank_fusion([list(_first(ranking.values())) for ranking in rankings])


def _first(pairs: Iterable[tuple[Item, Found]]) -> dict[Item, Found]:
    """A dict that keeps the first value of each key."""
    found: dict[Item, Found] = {}
    for key, value in pairs:
        found.setdefault(key, value)
    return found
