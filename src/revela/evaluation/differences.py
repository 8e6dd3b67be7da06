"""Systems on the same queries, beside one another: means with their margins, p of the differences,
the queries they differ on most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from revela.evaluation.beir import Collection, Outcome
from revela.evaluation.significance import margin, p_values

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
