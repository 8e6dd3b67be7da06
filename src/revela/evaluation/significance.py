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

import numpy as np
from numpy.typing import NDArray

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
