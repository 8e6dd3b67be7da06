"""Join the scores s of a listwise re-ranker with those of a search, in the order of

    z(fused(q, d)) + w z(s(q, d))

where z subtracts the mean and divides by the standard deviation over these results. The fused
scores are handed out again, the greatest to the first in the new order, so they keep their meaning.

Shapes: B passages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from revela.types import Reranker

Item = TypeVar("Item")
HEADS_WEIGHT = 0.25  # w


def rerank_listwise(
    query: str,
    scores: Mapping[Item, float],
    passages: Sequence[str],
    reranker: Reranker,
    weight: float = HEADS_WEIGHT,
) -> dict[Item, float]:
    """Reorder the first results, whose passages are given; results and scores stay the same."""
    if not passages:
        return dict(scores)
    items = list(scores)
    fused_B = np.array(list(scores.values())[: len(passages)])
    scores_B = reranker.score(query, passages)
    order_B = np.argsort(-_zscore(fused_B) - weight * _zscore(scores_B), kind="stable")
    ordered = [*(items[i] for i in order_B), *items[len(passages) :]]
    return dict(zip(ordered, scores.values(), strict=True))


def _zscore(scores_B: NDArray[np.float64]) -> NDArray[np.float64]:
    """z; zeros where all are equal."""
    standard_B: NDArray[np.float64] = (scores_B - scores_B.mean()) / max(scores_B.std(), 1e-12)
    return standard_B
