"""How sure a mean over queries is, and a difference of two: 95 % intervals, and paired
randomisation tests.

The test is Fisher's, recommended for retrieval by Smucker, Allan & Carterette (CIKM 2007): were two
systems equally good, each query's difference could as well have the other sign. The interval is
Student's t over the queries. Both speak of queries like these on this collection, not of other
collections, and several comparisons are not corrected for one another.

scipy's permutation_test gives the same numbers, for one pair at a time; here all pairs share the
signs, which is thirty times faster.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from revela.evaluation.beir import Collection, Outcome

RESAMPLES, SEED, BLOCK = (
    9_999,
    0,
    1_000,
)  # sign patterns drawn, all of them where there are no more than that; patterns held at a time
CONFIDENCE = 0.95


def p_values(
    differences_QP: NDArray[np.float64], resamples: int = RESAMPLES, seed: int = SEED
) -> NDArray[np.float64]:
    """Two-sided p of each column's mean being 0, by random signs of the rows.

    Args:
        differences_QP: for each query, system minus reference; a column a pair.
        resamples: sign patterns to draw. Where the queries have no more patterns than that, each is
            taken once and p is exact.
        seed: of the signs.

    Returns:
        (P,): the share of patterns whose mean is at least as far from 0; drawn patterns count the
        observed one as well.
    """
    queries = len(differences_QP)
    exact = queries <= math.log2(resamples + 1)
    count = 2**queries if exact else resamples
    observed_P = (
        np.abs(differences_QP.sum(axis=0)) - 1e-9
    )  # sums that are equal but for rounding are as far
    rng = np.random.default_rng(seed)
    reached_P = np.zeros(differences_QP.shape[1])
    for start in range(0, count, BLOCK):
        size = min(BLOCK, count - start)
        if exact:
            signs_RQ = (
                np.arange(start, start + size)[:, None] >> np.arange(queries) & 1
            ) * 2.0 - 1.0
        else:
            drawn_RB = rng.integers(256, size=(size, -(-queries // 8)), dtype=np.uint8)
            signs_RQ = np.unpackbits(drawn_RB, axis=1, count=queries) * 2.0 - 1.0
        reached_P += (np.abs(signs_RQ @ differences_QP) >= observed_P).sum(axis=0)
    return reached_P / count if exact else (reached_P + 1) / (count + 1)


def margin(values: NDArray[np.float64]) -> float | None:
    """Half the width of the 95 % interval of the mean of (Q,) values; None for a single one."""
    from scipy import stats

    if len(values) < 2:
        return None
    return float(
        stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)
        * values.std(ddof=1)
        / math.sqrt(len(values))
    )


MEASURE = "ndcg@10"  # what margins, tests and differences are about


@dataclass(frozen=True)
class Standing:
    """One system among others: its means, half the 95 % interval of nDCG@10, and p of its nDCG@10
    against each reference.
    """

    system: str
    means: dict[str, float]
    margin: float | None
    p: dict[str, float]


@dataclass(frozen=True)
class Gain:
    """A query that one system answers better than another: nDCG@10 of both, and what each puts
    first: its text, and if it is relevant.
    """

    query: str
    scores: tuple[float, float]
    first: tuple[tuple[str, bool], tuple[str, bool]]


def standings(outcomes: Mapping[str, Outcome], references: Sequence[str]) -> list[Standing]:
    """Every system, in the order given; ``references`` are the systems that the others are tested
    against.
    """
    values = {name: _values(outcome) for name, outcome in outcomes.items()}
    pairs = [
        (name, reference) for name in outcomes for reference in references if name != reference
    ]
    p = (
        dict(
            zip(
                pairs,
                p_values(np.stack([values[a] - values[b] for a, b in pairs], axis=1)),
                strict=True,
            )
        )
        if pairs
        else {}
    )
    return [
        Standing(
            name,
            outcome.means(),
            margin(values[name]),
            {b: float(p[name, b]) for b in references if b != name},
        )
        for name, outcome in outcomes.items()
    ]


def greatest_gains(
    collection: Collection, better: Outcome, worse: Outcome, count: int
) -> list[Gain]:
    """The queries on which ``better`` beats ``worse`` most, at most ``count``, greatest gain first."""
    texts = dict(zip(collection.document_ids, collection.documents, strict=True))
    queries = dict(zip(collection.query_ids, collection.queries, strict=True))

    def first(outcome: Outcome, query: str) -> tuple[str, bool]:
        found = outcome.first[query]
        return texts[found], collection.qrels[query].get(found, 0) > 0

    gains = {q: better.scores[q][MEASURE] - worse.scores[q][MEASURE] for q in collection.query_ids}
    most = sorted((q for q in gains if gains[q] > 0), key=lambda q: -gains[q])[:count]
    return [
        Gain(
            queries[q],
            (better.scores[q][MEASURE], worse.scores[q][MEASURE]),
            (first(better, q), first(worse, q)),
        )
        for q in most
    ]


def as_json(outcomes: Mapping[str, Outcome], rows: Sequence[Standing]) -> dict[str, dict[str, Any]]:
    """By system: the metrics' means, the 95 % interval of nDCG@10, p against the references, and
    every query's metrics.
    """
    return {
        row.system: {
            **row.means,
            "interval": None
            if row.margin is None
            else [row.means[MEASURE] - row.margin, row.means[MEASURE] + row.margin],
            "p": row.p,
            "queries": {
                q: {m: round(v, 5) for m, v in metrics.items()}
                for q, metrics in outcomes[row.system].scores.items()
            },
        }
        for row in rows
    }


def _values(outcome: Outcome) -> NDArray[np.float64]:
    return np.array([metrics[MEASURE] for metrics in outcome.scores.values()])
