"""Hybrid search: one ranking of what the vectors find and what the words find.

By score, the default (``fuse_scores``):

    score(q, d) = (cos(q, d) + w BM25(q, d) / best(q)) / (1 + w)        w = 1.2 r ** 2.5
    sqrt(g_words / g_vectors)

best(q) is the score of a document that held nothing but the words of the query: the theoretical
maximum of Bruch, Gai & Ingber (An Analysis of Fusion Functions for Hybrid Retrieval, TOIS 2023).
Both sides are absolute, so a query whose words the corpus lacks leans on its vectors by itself, and
a score can be read: 1 is as good as can be.

How much the words weigh is told without labels, for each query, by two questions:
- Do the vectors agree? r is how near the query the words' first passage is, beside the vectors' own
  first, both in cosines above the query's mean cosine with all passages: 1 where both find the
  same, 0 where the words find what is as far as any.
- Which side is surer? g is how far its first stands out from its first ten, as a share of its
  score.
Where a model has all cosines lie close together (a small spread, the standard deviation of the
cosine of two passages), a small difference says more, and w is smaller in proportion. docs/log.md
has what else was tried.

By rank (``fuse_ranks``): reciprocal rank fusion (Cormack, Clarke & Buettcher, SIGIR 2009), sum over
rankings of 1 / (k + rank). It gives a weak side an equal say (docs/results.md), and is kept for
comparison.
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

# spread below which cosines lie close together: MiniLM has .10 to .15, a fitted decoder .06 to .08
CLOSE = 0.06
WEIGHT, POWER, FIRST = 1.2, 2.5, 10  # chosen on nine collections and two models (docs/log.md)
LEAST_GAP, MOST, TINY = 0.01, 3.0, 1e-6  # of the vectors; the greatest g_words / g_vectors
SAMPLE = 1000  # vectors that tell how all lie
RRF_K = 60  # the constant of the paper, and of Revela's hybrid rows
DEPTH = 200  # candidates taken from each side


@dataclass(frozen=True)
class Geometry:
    """How the vectors of a corpus lie: their mean, (D,), and the standard deviation of the cosine
    of two of them.
    """

    mean: Vectors
    spread: float

    @classmethod
    def of(cls, vectors_ND: Vectors) -> Geometry:
        """Measured on at most ``SAMPLE`` of these vectors, evenly chosen."""
        some = vectors_ND[evenly(len(vectors_ND))]
        if len(some) < 2:
            return cls(some.sum(axis=0), 0.0)
        return cls(some.mean(axis=0), float((some @ some.T)[np.triu_indices(len(some), 1)].std()))


def evenly(count: int) -> NDArray[np.int64]:
    """The places of at most ``SAMPLE`` of so many things, evenly chosen."""
    return np.unique(np.linspace(0, count - 1, min(SAMPLE, count)).astype(np.int64))


def fuse_scores(
    cosines: Mapping[Item, float], shares: Mapping[Item, float], background: float, spread: float
) -> dict[Item, float]:
    """Scores of all candidates, best first.

    Args:
        cosines: of every candidate.
        shares: BM25 over the best possible, 0 to 1; a candidate that is missing holds no word of
            the query.
        background: mean cosine of the query with all passages.
        spread: of the cosines between passages.
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
    """w, before the spread; arguments as above."""
    if not shares:
        return 0.0
    near = [cosine - background for cosine in nlargest(FIRST, cosines.values())]
    worded = cosines[max(shares, key=lambda item: shares[item])] - background
    agreement = max(0.0, worded / near[0]) if near[0] > 0 else 0.0
    held = nlargest(FIRST, shares.values())
    surer = _gap([*held, *[0.0] * (len(near) - len(held))]) / max(_gap(near), LEAST_GAP)
    return WEIGHT * math.pow(agreement, POWER) * math.sqrt(min(surer, MOST))


def _gap(scores: Sequence[float]) -> float:
    """How far the first score, the greatest, stands out from the mean of all, as a share of it."""
    return max(0.0, (scores[0] - fmean(scores)) / max(scores[0], TINY))


def reciprocal_rank_fusion(rankings: Sequence[Sequence[Item]], k: int = RRF_K) -> dict[Item, float]:
    """Fuse rankings of items, best first; ranks count from 1. An item missing from a list gets
    nothing from it.
    """
    scores: dict[Item, float] = {}
    for ranking in rankings:
        for rank, item in enumerate(ranking, start=1):
            scores[item] = scores.get(item, 0.0) + 1.0 / (k + rank)
    return dict(sorted(scores.items(), key=lambda pair: -pair[1]))


def best_chunks(ranking: Ranking) -> tuple[dict[str, int], dict[str, float]]:
    """A ranking of chunks -> each document's best row, and the documents' scores, best first."""
    best = _first((document, row) for row, (document, _) in ranking.items())
    return best, {document: ranking[row][1] for document, row in best.items()}


def fuse_ranks(rankings: Sequence[Ranking]) -> tuple[dict[str, int], dict[str, float]]:
    """Rankings of chunks -> each document's best row, and the documents' scores by rank, best
    first.

    A document stands in a ranking where its first chunk does. Its best row is the first of its own
    in the fusion of all rankings of rows.
    """
    owners = {row: document for ranking in rankings for row, (document, _) in ranking.items()}
    best = _first(
        (owners[row], row)
        for row in reciprocal_rank_fusion([list(ranking) for ranking in rankings])
    )
    return best, reciprocal_rank_fusion([list(_first(ranking.values())) for ranking in rankings])


def _first(pairs: Iterable[tuple[Item, Found]]) -> dict[Item, Found]:
    """A dict in which the first of equal keys counts, not the last."""
    found: dict[Item, Found] = {}
    for key, value in pairs:
        found.setdefault(key, value)
    return found
