"""nDCG@10, recall@100, MRR@10 and @100, and MAP, as trec_eval defines them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

METRICS = ("ndcg@10", "recall@100", "mrr@10", "map")  # columns of a table; files add MRR@100
MAIN = "main"  # mteb's main score of a task

Qrels = Mapping[str, Mapping[str, int]]
Run = Mapping[str, Mapping[str, float]]
QueryScores = dict[str, dict[str, float]]
"""Judged query -> metric -> value."""


def per_query(qrels: Qrels, run: Run) -> QueryScores:
    """The scores of a run.

    A document is relevant if its grade is above 0; the grade is its gain. A query scores 0 if it is
    missing from the run or has no relevant document.
    """
    return {query: _scores(judged, run.get(query, {})) for query, judged in qrels.items()}


def _scores(judged: Mapping[str, int], found: Mapping[str, float]) -> dict[str, float]:
    # By score in single precision, then by id; both descending.
    scores = np.fromiter(found.values(), np.float32, len(found)).tolist()
    ranking = sorted(zip(scores, found, strict=True), reverse=True)
    gains = [max(0, judged.get(document, 0)) for _, document in ranking]
    ideal = sorted((gain for gain in judged.values() if gain > 0), reverse=True)
    ranks = [rank for rank, gain in enumerate(gains, 1) if gain]
    relevant = max(1, len(ideal))
    return {
        "ndcg@10": _dcg(gains[:10]) / (_dcg(ideal[:10]) or 1.0),
        "recall@100": sum(rank <= 100 for rank in ranks) / relevant,
        **{f"mrr@{k}": 1 / ranks[0] if ranks and ranks[0] <= k else 0.0 for k in (10, 100)},
        "map": sum(count / rank for count, rank in enumerate(ranks, 1)) / relevant,
    }


def _dcg(gains: list[int]) -> float:
    return sum(gain / math.log2(rank + 1) for rank, gain in enumerate(gains, 1))


def mean_scores(scores: QueryScores) -> dict[str, float]:
    """Averages over the judged queries; 0 without queries."""
    names, count = next(iter(scores.values()), METRICS), max(1, len(scores))
    return {name: sum(s[name] for s in scores.values()) / count for name in names}
