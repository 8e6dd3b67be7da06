"""Reciprocal rank fusion (Cormack, Clarke & Buettcher, SIGIR 2009): score(d) = sum over rankings of 1 / (k + rank(d))."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

Item = TypeVar("Item", bound=Hashable)
Found = TypeVar("Found")
Ranking = Mapping[int, tuple[str, float]]
"""A row of an index -> its document and its score, best first."""

RRF_K = 60  # the constant of the paper, and of Revela's hybrid rows
RRF_DEPTH = 200  # ranks taken from each list


def reciprocal_rank_fusion(rankings: Sequence[Sequence[Item]], k: int = RRF_K) -> dict[Item, float]:
    """Fuse rankings of items, best first; ranks count from 1. An item missing from a list gets nothing from it."""
    scores: dict[Item, float] = {}
    for ranking in rankings:
        for rank, item in enumerate(ranking, start=1):
            scores[item] = scores.get(item, 0.0) + 1.0 / (k + rank)
    return dict(sorted(scores.items(), key=lambda pair: -pair[1]))


def fuse_documents(rankings: Sequence[Ranking]) -> tuple[dict[str, int], dict[str, float]]:
    """Rankings of chunks -> each document's best row, and the documents' scores, best first.

    A document stands in a ranking where its first chunk does. Its best row is the first of its own in the fusion of all rankings of rows.
    """
    owners = {row: document for ranking in rankings for row, (document, _) in ranking.items()}
    best = _first((owners[row], row) for row in reciprocal_rank_fusion([list(ranking) for ranking in rankings]))
    scores = [_first(ranking.values()) for ranking in rankings]
    return best, scores[0] if len(scores) == 1 else reciprocal_rank_fusion([list(documents) for documents in scores])


def _first(pairs: Iterable[tuple[Item, Found]]) -> dict[Item, Found]:
    """A dict in which the first of equal keys counts, not the last."""
    found: dict[Item, Found] = {}
    for key, value in pairs:
        found.setdefault(key, value)
    return found
