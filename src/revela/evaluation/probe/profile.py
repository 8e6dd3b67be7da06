"""A score at each of ten places of a text, and how it falls from the first to the last: means, a
slope and a drop with their intervals.

Intervals hold 95 % of the means of resamples (percentile bootstrap). What is drawn again are
documents, not rows: several rows about one document say much the same. That some rows score more
than others at all places is not what is asked: a place's interval is that of the scores less their
own row's mean.

Shapes: N rows, P places, O documents (owners), R resamples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PLACES = 10
RESAMPLES = 2000
TAILS = (2.5, 97.5)  # percentiles

Scores = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A value, and what 95 % of the resamples lie between."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Profile:
    """How a score depends on the place.

    Attributes:
        tenths: where the places are, in tenths of the text.
        places: mean score at each, with the interval of what it differs from its row's mean.
        slope: least-squares change of the score over a tenth of the text; below 0 the model dwells
            in the beginning.
        drop: score at the first place, less that at the last.
        first_wins: share of the rows whose first place scores more than their last (a tie counts
            half): tells models apart whose scores differ in scale.
        rows: how many scores each mean is of.
        documents: how many documents they are about.
    """

    tenths: list[float]
    places: list[Interval]
    slope: Interval
    drop: Interval
    first_wins: Interval
    rows: int
    documents: int


def profile(
    scores_NP: Scores, tenths: Sequence[float], owners: Sequence[int] | None = None, seed: int = 0
) -> Profile:
    """Summarise a score at each place.

    Args:
        scores_NP: a row a text, or a query.
        tenths: where the places are.
        owners: the document that each row is about; None: each its own.
        seed: of the resamples.
    """
    scores_NP = np.asarray(scores_NP, dtype=np.float64)
    drop_N, mean = scores_NP[:, 0] - scores_NP[:, -1], float(scores_NP.mean())
    within_NP = scores_NP - scores_NP.mean(axis=1, keepdims=True)
    columns_NX = np.column_stack(
        [within_NP, scores_NP @ slope_weights(tenths), drop_N, (np.sign(drop_N) + 1) / 2]
    )
    *differences, slope, drop, first_wins = intervals(columns_NX, owners, seed)
    places = [Interval(mean + d.value, mean + d.low, mean + d.high) for d in differences]
    documents = len(scores_NP) if owners is None else len(set(owners))
    return Profile(list(tenths), places, slope, drop, first_wins, len(scores_NP), documents)


def slope_weights(tenths: Sequence[float]) -> Scores:
    """(P,) weights whose inner product with scores at these places is their least-squares slope."""
    centred_P = np.asarray(tenths, dtype=np.float64) - np.mean(tenths)
    weights_P: Scores = centred_P / (centred_P**2).sum()
    return weights_P


def intervals(columns_NX: Scores, owners: Sequence[int] | None, seed: int) -> list[Interval]:
    """The mean of each column with its interval; whole documents are drawn again."""
    columns_NX = np.asarray(columns_NX, dtype=np.float64)
    _, owner_N = np.unique(
        np.arange(len(columns_NX)) if owners is None else np.asarray(owners), return_inverse=True
    )
    count = int(owner_N.max()) + 1
    sizes_O = np.bincount(owner_N, minlength=count)
    sums_OX = np.zeros((count, columns_NX.shape[1]))
    np.add.at(sums_OX, owner_N, columns_NX)
    drawn_RO = np.random.default_rng(seed).multinomial(
        count, np.full(count, 1 / count), size=RESAMPLES
    )
    means_RX = (drawn_RO @ sums_OX) / (drawn_RO @ sizes_O)[:, None]
    low_X, high_X = np.percentile(means_RX, TAILS, axis=0)
    means_X = columns_NX.mean(axis=0)
    return [Interval(*map(float, values)) for values in zip(means_X, low_X, high_X, strict=True)]
