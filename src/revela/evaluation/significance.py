"""95 % intervals (Student's t) of a mean over queries, and paired randomisation tests of two means.

The test is Fisher's, recommended for retrieval by Smucker, Allan & Carterette (CIKM 2007): if two
systems are equally good, the difference on each query has either sign with equal probability. p
values are not corrected for multiple comparisons.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from revela.evaluation.metrics import QueryScores, mean_scores
from revela.evaluation.results import SystemScores

RESAMPLES, SEED = 9_999, 0  # random sign patterns
BLOCK = 1_000  # patterns in memory at a time
CONFIDENCE = 0.95
MEASURE = "ndcg@10"  # the metric of margins and tests
POOLED = "all queries"
Queries = Mapping[str, Mapping[str, float]]
"""Collection -> query -> nDCG@10."""


def p_values(
    differences_QP: NDArray[np.float64], resamples: int = RESAMPLES, seed: int = SEED
) -> NDArray[np.float64]:
    """Two-sided p values, (P,), for the mean of each column being 0, by random signs of the rows.

    p is the share of sign patterns, the observed one included, whose mean is at least as far from 0
    as the observed mean. Columns are pairs of systems, rows are queries. All patterns are tried if
    there are no more than ``resamples``. scipy's permutation_test takes one pair at a time (30
    times slower).
    """
    queries = len(differences_QP)
    exact = queries <= math.log2(resamples + 1)
    count = 2**queries if exact else resamples
    observed_P = np.abs(differences_QP.sum(axis=0)) - 1e-9  # equal sums may differ by rounding
    rng = np.random.default_rng(seed)
    reached_P = np.zeros(differences_QP.shape[1])
    for start in range(0, count, BLOCK):
        size = min(BLOCK, count - start)
        if exact:
            bits_RQ = np.arange(start, start + size)[:, None] >> np.arange(queries) & 1
            signs_RQ = bits_RQ * 2.0 - 1.0
        else:
            drawn_RB = rng.integers(256, size=(size, -(-queries // 8)), dtype=np.uint8)
            signs_RQ = np.unpackbits(drawn_RB, axis=1, count=queries) * 2.0 - 1.0
        reached_P += (np.abs(signs_RQ @ differences_QP) >= observed_P).sum(axis=0)
    return reached_P / count if exact else (reached_P + 1) / (count + 1)


def margin(values: NDArray[np.float64]) -> float | None:
    """Half the width of the 95 % interval of the mean of (Q,) values; None for a single value."""
    if len(values) < 2:
        return None
    quantile = t_quantile((1 + CONFIDENCE) / 2, len(values) - 1)
    return float(quantile * values.std(ddof=1) / math.sqrt(len(values)))


@functools.cache
def t_quantile(p: float, degrees: int) -> float:
    """The quantile of Student's t distribution at p > 0.5, by Newton's method.

    The distribution function is a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4). It is
    concave above 0, so steps from the normal quantile, which is lower, never overshoot.
    """
    n = degrees
    odd = n % 2
    log_peak = math.lgamma((n + 1) / 2) - math.lgamma(n / 2) - math.log(n * math.pi) / 2
    k = np.arange(1 + odd, n - 1, 2)
    t = statistics.NormalDist().inv_cdf(p)
    for _ in range(100):
        angle = math.atan(t / math.sqrt(n))
        cosine = math.cos(angle)
        terms = float(np.cumprod(k / (k + 1) * cosine**2).sum()) + (n > 1)
        inside = math.sin(angle) * terms  # probability of -t to t
        if odd:
            inside = 2 / math.pi * (angle + inside * cosine)
        density = math.exp(log_peak - (n + 1) / 2 * math.log1p(t * t / n))
        step = (2 * p - 1 - inside) / 2 / density
        t += step
        if abs(step) < 1e-12 * t:
            break
    return t


def standings(
    scores: Mapping[str, QueryScores], references: Sequence[str]
) -> dict[str, SystemScores]:
    """The means, margin, p values against ``references``, and scores per query of each system."""
    values = {
        name: np.array([metrics[MEASURE] for metrics in queries.values()])
        for name, queries in scores.items()
    }
    pairs = [(name, other) for name in scores for other in references if name != other]
    p: dict[tuple[str, str], float] = {}
    if pairs:
        differences_QP = np.stack([values[a] - values[b] for a, b in pairs], axis=1)
        p = dict(zip(pairs, p_values(differences_QP).tolist(), strict=True))
    return {
        name: SystemScores(
            means=mean_scores(queries),
            margin=margin(values[name]),
            p={other: p[name, other] for other in references if other != name},
            queries=queries,
        )
        for name, queries in scores.items()
    }


@dataclass(frozen=True)
class Difference:
    """``first`` - ``second`` in mean nDCG@10.

    Attributes:
        on: the collection, or ``POOLED``: the queries of all collections.
        margin: half the 95 % interval of the difference; None for a single query.
        p: of the paired randomisation test.
    """

    first: str
    second: str
    on: str
    mean: float
    margin: float | None
    p: float


def differences(rows: Mapping[str, Queries]) -> list[Difference]:
    """The difference of each pair of rows on each collection, and over all queries if there are
    several collections. All rows have the same queries.
    """
    pairs, found = list(combinations(rows, 2)), list[Difference]()
    collections = list(next(iter(rows.values()), {}))
    values = {
        on: {row: np.array(list(queries[on].values())) for row, queries in rows.items()}
        for on in collections
    }
    if len(collections) > 1:
        joined = {row: np.concatenate([values[on][row] for on in collections]) for row in rows}
        values[POOLED] = joined
    for on, of_row in values.items() if pairs else ():
        differences_QP = np.stack([of_row[a] - of_row[b] for a, b in pairs], axis=1)
        columns = zip(pairs, differences_QP.T, p_values(differences_QP).tolist(), strict=True)
        for (a, b), difference_Q, p in columns:
            mean = float(difference_Q.mean())
            found.append(Difference(a, b, on, mean, margin(difference_Q), p))
    return found
