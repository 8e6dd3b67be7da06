"""The score at each of ten places of a text, as a profile with 95 % intervals.

Intervals of slope and drop are the percentiles of means over resamples of the documents. Documents
and not rows are resampled, as rows about one document are alike. The interval of a place is that of
the scores minus their row's mean, as rows differ in level at all places alike.

Shapes: N rows (documents or queries), P places, O documents (owners of rows), R resamples.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from revela.evaluation.results import Interval, Profile

PLACES = 10
SEGMENT_TENTHS = [place + 0.5 for place in range(PLACES)]  # the middle of each of ten parts
RESAMPLES, SEED = 2000, 0
TAILS = (2.5, 97.5)  # percentiles

Scores = NDArray[np.float64]


def profile(
    scores_NP: Scores, tenths: Sequence[float], owners: Sequence[int] | None = None
) -> Profile:
    """Summarise scores at the places ``tenths``; ``owners`` (N,) are the documents that the rows
    are about, by default one each.
    """
    scores_NP = np.asarray(scores_NP, dtype=np.float64)
    drop_N, mean = scores_NP[:, 0] - scores_NP[:, -1], float(scores_NP.mean())
    within_NP = scores_NP - scores_NP.mean(axis=1, keepdims=True)
    columns_NX = np.column_stack(
        [within_NP, scores_NP @ slope_weights(tenths), drop_N, (np.sign(drop_N) + 1) / 2]
    )
    *differences, slope, drop, first_wins = intervals(columns_NX, owners)
    places = [Interval(mean + d.value, mean + d.low, mean + d.high) for d in differences]
    documents = len(scores_NP) if owners is None else len(set(owners))
    return Profile(list(tenths), places, slope, drop, first_wins, len(scores_NP), documents)


def slope_weights(tenths: Sequence[float]) -> Scores:
    """(P,) weights whose inner product with scores at these places is their least-squares slope."""
    centred_P = np.asarray(tenths, dtype=np.float64) - np.mean(tenths)
    weights_P: Scores = centred_P / (centred_P**2).sum()
    return weights_P


def intervals(columns_NX: Scores, owners: Sequence[int] | None) -> list[Interval]:
    """The mean of each column with its percentile bootstrap interval over documents."""
    owned = np.arange(len(columns_NX)) if owners is None else np.asarray(owners)
    _, owner_N = np.unique(owned, return_inverse=True)
    count = int(owner_N.max()) + 1
    sizes_O = np.bincount(owner_N, minlength=count)
    sums_OX = np.zeros((count, columns_NX.shape[1]))
    np.add.at(sums_OX, owner_N, columns_NX)
    rng = np.random.default_rng(SEED)
    drawn_RO = rng.multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    means_RX = (drawn_RO @ sums_OX) / (drawn_RO @ sizes_O)[:, None]
    low_X, high_X = np.percentile(means_RX, TAILS, axis=0)
    means_X = columns_NX.mean(axis=0)
    return [Interval(*map(float, values)) for values in zip(means_X, low_X, high_X, strict=True)]
