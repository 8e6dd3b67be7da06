"""Metrics against trec_eval's own code, on random runs."""

from __future__ import annotations

import random

import pytest
import pytrec_eval

from revela.evaluation.metrics import per_query

NAMES = {"ndcg@10": "ndcg_cut_10", "recall@100": "recall_100", "map": "map"}


def draw(rng):
    """Judgements from -1 to 3 and a run of 10 queries. Scores tie, or differ in double precision
    only; a query may be missing, have no relevant document, or find ones that nobody judged.
    """
    ids = [*map(str, range(170)), "é", "Z", "a10", "a9"]
    qrels = {
        f"q{i}": {d: rng.randint(-1, rng.choice([0, 1, 3])) for d in rng.sample(ids, 60)}
        for i in range(10)
    }
    run = {
        query: {
            d: rng.choice([rng.randint(0, 9) / 3, rng.random(), 0.5 + rng.random() * 1e-9])
            for d in rng.sample(ids, rng.choice([1, 9, len(ids)]))
        }
        for query in qrels
        if rng.random() < 0.8
    }
    return qrels, run


def reciprocal_rank(judged, found, k):
    """Of the first relevant document among k; trec_eval's recip_rank has no cut-off."""
    if not found:
        return 0.0
    value = pytrec_eval.RelevanceEvaluator({"q": judged}, {"recip_rank"}).evaluate({"q": found})
    return value["q"]["recip_rank"] if value["q"]["recip_rank"] >= 1 / k else 0.0


@pytest.mark.parametrize("seed", range(8))
def test_metrics_are_those_of_trec_eval(seed):
    qrels, run = draw(random.Random(seed))
    measures = {"ndcg_cut.10", "recall.100", "map"}
    theirs = pytrec_eval.RelevanceEvaluator(qrels, measures).evaluate(run)
    ours = per_query(qrels, run)
    assert list(ours) == list(qrels) and theirs.keys() == run.keys()
    for query, scores in ours.items():
        expected = {name: theirs.get(query, {}).get(of, 0.0) for name, of in NAMES.items()}
        for k in (10, 100):
            expected[f"mrr@{k}"] = reciprocal_rank(qrels[query], run.get(query, {}), k)
        assert scores == pytest.approx(expected, abs=1e-12), query
