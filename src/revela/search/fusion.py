"""Hybrid search: one ranking of what the vectors find and what the words find.

By score, the default (``fuse_scores``):

    score(q, d) = (cos(q, d) + w BM25(q, d) / best(q)) / (1 + w)        w = r ** 3 * g_words / g_vectors

best(q) is the score of a document that held nothing but the words of the query: the theoretical maximum of Bruch, Gai & Ingber (An Analysis
of Fusion Functions for Hybrid Retrieval, TOIS 2023). Both sides are absolute, so a query whose words the corpus lacks leans on its vectors by
itself, and a score can be read: 1 is as good as can be. How much the words weigh is told without labels, for each query, by two questions:
- Do the vectors agree? r is how near the query the words' first three are, in cosines above the background (the mean cosine of the query with
  all passages), beside the vectors' own first three: 1 where both find the same, 0 where the words find what is as far as anything.
- Which side is surer? g is how far its first stands out from its first ten, as a share of its score.
docs/log.md has what else was tried.

By rank (``fuse_ranks``): reciprocal rank fusion (Cormack, Clarke & Buettcher, SIGIR 2009), sum over rankings of 1 / (k + rank). It gives a weak
side an equal say (docs/results.md), and is kept for comparison.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from heapq import nlargest
from statistics import fmean
from typing import Literal, TypeVar

Fusion = Literal["score", "rank"]
Item = TypeVar("Item", bound=Hashable)
Found = TypeVar("Found")
Ranking = Mapping[int, tuple[str, float]]
"""A row of an index -> its document and its score, best first."""

TEN, AGREEING = 10, 3  # first of each side that tell how sure it is, and whether the vectors agree
LEAST_GAP, MOST, TINY = 0.01, 3.0, 1e-6  # of the vectors; the greatest g_words / g_vectors
RRF_K = 60  # the constant of the paper, and of Revela's hybrid rows
DEPTH = 200  # candidates taken from each side


def fuse_scores(cosines: Mapping[Item, float], shares: Mapping[Item, float], background: float) -> dict[Item, float]:
    """Scores of all candidates, best first.

    Args:
        cosines: of every candidate.
        shares: BM25 over the best possible, 0 to 1; a candidate that is missing holds no word of the query.
        background: mean cosine of the query with all passages.
    """
    weight = weight_of_words(cosines, shares, background)
    scores = {item: (cosine + weight * shares.get(item, 0.0)) / (1 + weight) for item, cosine in cosines.items()}
    return dict(sorted(scores.items(), key=lambda pair: -pair[1]))


def weight_of_words(cosines: Mapping[Item, float], shares: Mapping[Item, float], background: float) -> float:
    """w; arguments as above."""
    if not shares:
        return 0.0
    near = [cosine - background for cosine in nlargest(TEN, cosines.values())]
    first = nlargest(TEN, shares, key=lambda item: shares[item])
    worded = fmean(cosines[item] for item in first[:AGREEING]) - background
    agreement = min(1.0, max(0.0, worded / max(fmean(near[:AGREEING]), TINY)))
    lack = [0.0] * (len(near) - len(first))  # so few hold a word of the query
    surer = _gap([shares[item] for item in first] + lack) / max(_gap(near), LEAST_GAP)
    return agreement**3 * min(surer, MOST)


def _gap(scores: Sequence[float]) -> float:
    """How far the first score, the best, stands out from the mean of all, as a share of it; 0 to 1."""
    return min(1.0, max(0.0, (scores[0] - fmean(scores)) / max(scores[0], TINY)))


def reciprocal_rank_fusion(rankings: Sequence[Sequence[Item]], k: int = RRF_K) -> dict[Item, float]:
    """Fuse rankings of items, best first; ranks count from 1. An item missing from a list gets nothing from it."""
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
    """Rankings of chunks -> each document's best row, and the documents' scores by rank, best first.

    A document stands in a ranking where its first chunk does. Its best row is the first of its own in the fusion of all rankings of rows.
    """
    owners = {row: document for ranking in rankings for row, (document, _) in ranking.items()}
    best = _first((owners[row], row) for row in reciprocal_rank_fusion([list(ranking) for ranking in rankings]))
    return best, reciprocal_rank_fusion([list(_first(ranking.values())) for ranking in rankings])


def _first(pairs: Iterable[tuple[Item, Found]]) -> dict[Item, Found]:
    """A dict in which the first of equal keys counts, not the last."""
    found: dict[Item, Found] = {}
    for key, value in pairs:
        found.setdefault(key, value)
    return found
