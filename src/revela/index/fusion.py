"""Hybrid search: join the ranking by vectors and the ranking by words into one.

By score (``fuse_scores``), the default:

    score(q, d) = (cos(q, d) + w s(q, d)) / (1 + w)             s(q, d) = BM25(q, d) / best(q)

    w = 0.5 max(1, W / V)^2 g_words / g_vectors

``best(q)`` is the theoretical maximum of BM25 (Bruch, Gai & Ingber, An Analysis of Fusion Functions
for Hybrid Retrieval, TOIS 2023). Both cos and s are absolute: 1 is the best that can be, and a
query whose words the corpus lacks is ranked by its vectors.

The weight w of the words needs no labels:

- W / V, of the corpus: how often words find the passage that a sentence was taken from, to how
  often vectors do (calibration.py). Below 1 it says little: a retriever that was trained on a text
  knows its sentences.
- g, of the query: how far a side's first score stands out from the mean of its ten greatest, as a
  share of its first score. Equal scores count once: ten records that all hold the query's words
  are no reason to doubt the words. A cosine counts from the mean of all candidates.

The constants were chosen by leaving out whole collections and languages (docs/results.md).

By rank (``fuse_ranks``): reciprocal rank fusion (Cormack, Clarke & Buettcher, SIGIR 2009), the sum
over rankings of 1 / (k + rank), for comparison.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from heapq import nlargest
from statistics import fmean
from typing import Literal, TypeVar

from revela.errors import RevelaError

Fusion = Literal["score", "rank"]
Item = TypeVar("Item", bound=Hashable)
Found = TypeVar("Found")
Ranking = Mapping[int, tuple[str, float]]
"""A row of an index -> its document and its score, best first."""

WEIGHT = 0.5  # of w
FIRST = 10  # scores that a gap is measured on
LEAST_GAP = 0.01  # of the vectors
TINY = 1e-6
DIGITS = 6  # of scores that are equal
RRF_K = 60  # the constant of the paper, and of Revela's hybrid rows
DEPTH = 200  # candidates taken from each side


def check_weight(weight: float | None) -> None:
    """Refuse a weight of the vectors that is not between 0 and 1."""
    if weight is not None and not 0 <= weight <= 1:
        raise RevelaError(
            f"--weight {weight}: give the vectors' share, from 0 (words alone) to 1 (vectors alone)"
        )


def fuse_scores(
    cosines: Mapping[Item, float],
    shares: Mapping[Item, float],
    odds: float = 1.0,
    weight: float | None = None,
) -> dict[Item, float]:
    """Fuse two rankings by score: the score of every candidate, best first.

    ``shares`` are s(q, d) of those that hold a word of the query; ``odds`` is max(1, W / V)^2
    (``Calibration.odds``). ``weight`` is that of the vectors, 0 to 1, in place of the rule.

    Example:
        >>> fused = fuse_scores({"a": 0.8, "b": 0.6, "c": 0.1}, {"b": 0.5}, odds=4.0)
        >>> {document: round(score, 2) for document, score in fused.items()}
        {'b': 0.54, 'a': 0.34, 'c': 0.04}
    """
    if weight is None:
        weight = weight_of_vectors(cosines, shares, odds)
    scores = {
        item: weight * cosine + (1 - weight) * shares.get(item, 0.0)
        for item, cosine in cosines.items()
    }
    return dict(sorted(scores.items(), key=lambda pair: -pair[1]))


def weight_of_vectors(
    cosines: Mapping[Item, float], shares: Mapping[Item, float], odds: float
) -> float:
    """1 / (1 + w)."""
    return 1 / (1 + WEIGHT * odds * contrast(cosines, shares))


def contrast(cosines: Mapping[Item, float], shares: Mapping[Item, float]) -> float:
    """g_words / g_vectors; 0 if no candidate holds a word."""
    if not shares:
        return 0.0
    mean, count = fmean(cosines.values()), min(FIRST, len(cosines))
    by_vectors = [cosine - mean for cosine in nlargest(FIRST, cosines.values())]
    by_words = nlargest(FIRST, {round(share, DIGITS) for share in shares.values()})
    return _gap(by_words, count) / max(_gap(by_vectors, count), LEAST_GAP)


def _gap(scores: Sequence[float], count: int) -> float:
    """g: how far the first score, the greatest, is above the mean of ``count`` scores, as a share
    of it; missing scores are 0.
    """
    return max(0.0, (scores[0] - sum(scores) / count) / max(scores[0], TINY))


def reciprocal_rank_fusion(rankings: Sequence[Sequence[Item]], k: int = RRF_K) -> dict[Item, float]:
    """Fuse rankings of items by rank: the score of every item, best first.

    Example:
        >>> list(reciprocal_rank_fusion([["a", "b"], ["b", "c"]]))
        ['b', 'a', 'c']
    """
    scores: dict[Item, float] = {}
    for ranking in rankings:
        for rank, item in enumerate(ranking, start=1):
            scores[item] = scores.get(item, 0.0) + 1.0 / (k + rank)
    return dict(sorted(scores.items(), key=lambda pair: -pair[1]))


def joined(first: Ranking, second: Ranking) -> Ranking:
    """Two rankings of different rows, by the same score, as one."""
    return dict(sorted([*first.items(), *second.items()], key=lambda row: -row[1][1]))


def best_chunks(ranking: Ranking) -> Ranking:
    """The best row of each document of a ranking of chunks."""
    best = _first((document, row) for row, (document, _) in ranking.items())
    return {row: ranking[row] for row in best.values()}


def fuse_ranks(rankings: Sequence[Ranking]) -> Ranking:
    """Fuse rankings of chunks by rank: the best row of each document, with the document's score.

    A document's rank in a ranking is that of its first chunk. Its best row is its first one in the
    fusion of the rankings of chunks.
    """
    document_of = {row: document for ranking in rankings for row, (document, _) in ranking.items()}
    rows = reciprocal_rank_fusion([list(ranking) for ranking in rankings])
    best = _first((document_of[row], row) for row in rows)
    scores = reciprocal_rank_fusion([list(_first(ranking.values())) for ranking in rankings])
    return {best[document]: (document, score) for document, score in scores.items()}


def _first(pairs: Iterable[tuple[Item, Found]]) -> dict[Item, Found]:
    """A dict that keeps the first value of each key."""
    found: dict[Item, Found] = {}
    for key, value in pairs:
        found.setdefault(key, value)
    return found
