"""nDCG@10, recall@100, MRR@10 and MAP, by trec_eval's own code (pytrec-eval-terrier)."""

from __future__ import annotations

import math
from collections.abc import Mapping

METRICS = ("ndcg@10", "recall@100", "mrr@10", "map")
MAIN = "main"  # the main score of a task of mteb
_MEASURES = {"ndcg_cut.10", "recall.100", "map"}

Qrels = Mapping[str, Mapping[str, int]]
Run = Mapping[str, Mapping[str, float]]


def per_query(qrels: Qrels, run: Run) -> dict[str, dict[str, float]]:
    """{query: {metric: value}}; a judged query that is missing from the run scores 0."""
    import pytrec_eval

    evaluator = pytrec_eval.RelevanceEvaluator({q: dict(d) for q, d in qrels.items()}, _MEASURES)
    results = evaluator.evaluate(
        {q: {d: float(s) for d, s in run.get(q, {}).items()} for q in qrels}
    )
    scores = {}
    for query, judged in qrels.items():
        values = results.get(query, {})
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
    """Averages over the queries; 0 without queries."""
    names = next(iter(scores.values()), METRICS)
    return {name: sum(s[name] for s in scores.values()) / max(1, len(scores)) for name in names}


def _reciprocal_rank(judged: Mapping[str, int], ranked: Mapping[str, float], depth: int) -> float:
    # trec_eval's recip_rank has no cut-off; ties are broken as it does, by document id, descending.
    best = sorted(ranked, key=lambda document: (ranked[document], document), reverse=True)[:depth]
    ranks = (rank for rank, document in enumerate(best, 1) if judged.get(document, 0) > 0)
    return 1.0 / next(ranks, math.inf)
