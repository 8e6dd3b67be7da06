"""Exact nearest neighbours by inner product, of vectors in memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from revela.types import Vectors

QUERIES, SCORES = 1024, 2**26  # held at a time


def top_k(queries: Vectors, passages: Vectors, k: int) -> tuple[NDArray[np.int64], Vectors]:
    """The k nearest passages (N, D) of each query (Q, D), best first: indices (Q, min(k, N)) and
    inner products. Ties go to the lower index. The passages may lie on disk.
    """
    k = min(k, len(passages))
    indices = np.empty((len(queries), k), dtype=np.int64)
    scores = np.empty((len(queries), k), dtype=np.float32)
    size = max(1, min(QUERIES, SCORES // max(1, len(passages))))
    for start in range(0, len(queries), size):
        block = queries[start : start + size] @ passages.T
        best = (
            np.argpartition(-block, k - 1, axis=1)[:, :k]
            if k < block.shape[1]
            else np.tile(np.arange(k), (len(block), 1))
        )
        values = np.take_along_axis(block, best, axis=1)
        # A partition may pick any of the ties for the last place.
        least = values.min(axis=1, keepdims=True, initial=np.inf)
        tied = (block == least).sum(axis=1) > (values == least).sum(axis=1)
        for row in np.flatnonzero(tied):
            best[row] = np.argsort(-block[row], kind="stable")[:k]
            values[row] = block[row, best[row]]
        order = np.lexsort((best, -values), axis=1)
        indices[start : start + size] = np.take_along_axis(best, order, axis=1)
        scores[start : start + size] = np.take_along_axis(values, order, axis=1)
    return indices, scores


def rankings_of(indices_QK: NDArray[np.int64], scores_QK: Vectors) -> list[dict[int, float]]:
    """{passage: score} of each query, best first, from the result of ``top_k``."""
    rows = zip(indices_QK.tolist(), scores_QK.tolist(), strict=True)
    return [dict(zip(indices, scores, strict=True)) for indices, scores in rows]


def ranking_of(rows: Sequence[int], scores: Vectors) -> dict[int, float]:
    """{row: score}, best first, of the scores of some rows. Ties keep the order of the rows."""
    best = np.argsort(-scores, kind="stable").tolist()
    return {rows[i]: float(scores[i]) for i in best}
