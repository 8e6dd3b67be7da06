"""Ranking metrics by pytrec-eval-terrier, the reference implementation's own code: nDCG@10,
recall@100, MRR@10, MAP.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from revela.types import Vectors

METRICS = ("ndcg@10", "recall@100", "mrr@10", "map")
MAIN = "main"  # the main score of a task of mteb
_MEASURES = {"ndcg_cut.10", "recall.100", "map"}

Qrels = Mapping[str, Mapping[str, int]]
Run = Mapping[str, Mapping[str, float]]


def per_query(qrels: Qrels, run: Run) -> dict[str, dict[str, float]]:
    """Metrics of each judged query: {query: {metric: value}}.

    A judged query that is missing from the run scores 0; an unjudged one is ignored.
    """
    import pytrec_eval

    evaluator = pytrec_eval.RelevanceEvaluator({q: dict(d) for q, d in qrels.items()}, _MEASURES)
    found = evaluator.evaluate({q: {d: float(s) for d, s in run.get(q, {}).items()} for q in qrels})
    scores = {}
    for query, judged in qrels.items():
        values = found.get(query, {})
        scores[query] = {
            "ndcg@10": values.get("ndcg_cut_10", 0.0),
            "recall@100": values.get("recall_100", 0.0),
            "mrr@10": _reciprocal_rank(judged, run.get(query, {}), 10),
            "map": values.get("map", 0.0),
        }
    return scores


def mean_scores(qrels: Qrels, run: Run) -> dict[str, float]:
    """Metrics averaged over the judged queries."""
    return means(per_query(qrels, run))


def means(scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Averages of the metrics that ``per_query`` gives."""
    return {name: sum(s[name] for s in scores.values()) / max(1, len(scores)) for name in METRICS}


def _reciprocal_rank(judged: Mapping[str, int], ranked: Mapping[str, float], depth: int) -> float:
    # trec_eval's recip_rank has no cut-off; ties are broken as it does, by document id, descending.
    best = sorted(ranked.items(), key=lambda pair: (pair[1], pair[0]), reverse=True)[:depth]
    return next(
        (1.0 / rank for rank, (document, _) in enumerate(best, 1) if judged.get(document, 0) > 0),
        0.0,
    )


BLOCK = 1024  # queries per block


def top_k(queries: Vectors, passages: Vectors, k: int) -> tuple[NDArray[np.int64], Vectors]:
    """The k nearest passages of each query, best first; ties go to the lower index.

    Args:
        queries: (Q, D) float32.
        passages: (N, D) float32.
        k: at most N are returned.

    Returns:
        Indices (Q, min(k, N)) and their inner products.
    """
    k = min(k, len(passages))
    indices = np.empty((len(queries), k), dtype=np.int64)
    scores = np.empty((len(queries), k), dtype=np.float32)
    for start in range(0, len(queries), BLOCK):
        block = queries[start : start + BLOCK] @ passages.T
        best = (
            np.argpartition(-block, k - 1, axis=1)[:, :k]
            if k < block.shape[1]
            else np.tile(np.arange(k), (len(block), 1))
        )
        values = np.take_along_axis(block, best, axis=1)
        order = np.lexsort((best, -values), axis=1)
        indices[start : start + BLOCK] = np.take_along_axis(best, order, axis=1)
        scores[start : start + BLOCK] = np.take_along_axis(values, order, axis=1)
    return indices, scores
