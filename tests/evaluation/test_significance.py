"""Randomisation tests against a loop over all sign patterns, margins against scipy, and systems
compared: p values by reference.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from revela.evaluation.significance import margin, p_values, standings, t_quantile


def naive_p(differences) -> float:
    """The share of all sign patterns whose mean is at least as far from 0 as the observed one."""
    observed = abs(sum(differences))
    patterns = list(itertools.product((-1, 1), repeat=len(differences)))
    return sum(
        abs(sum(s * d for s, d in zip(signs, differences, strict=True))) >= observed - 1e-9
        for signs in patterns
    ) / len(patterns)


@pytest.mark.parametrize("seed", range(3))
def test_few_queries_give_the_exhaustive_p(seed):
    # Differences of nDCG take few values, so sums tie often.
    differences = np.random.default_rng(seed).choice([-0.5, 0.0, 0.37, 0.63, 1.0], size=(9, 4))
    np.testing.assert_allclose(p_values(differences), [naive_p(column) for column in differences.T])


def test_drawn_signs_come_near_the_exhaustive_p():
    differences = np.random.default_rng(3).normal(0.2, 0.5, size=(12, 3))
    drawn = p_values(differences, resamples=4_000)
    np.testing.assert_allclose(drawn, [naive_p(column) for column in differences.T], atol=0.025)
    np.testing.assert_array_equal(drawn, p_values(differences, resamples=4_000))
    assert (drawn != p_values(differences, resamples=4_000, seed=1)).any()


def test_extremes():
    never, always = np.zeros((40, 1)), np.full((40, 1), 0.3)
    assert p_values(never) == 1.0
    assert p_values(always) == pytest.approx(1e-4)  # the observed pattern counts: p is never 0


def test_margin_is_students():
    values = np.random.default_rng(0).uniform(size=25)
    low, high = stats.ttest_1samp(values, 0).confidence_interval()
    half = margin(values)
    assert (values.mean() - half, values.mean() + half) == pytest.approx((low, high))
    assert margin(values[:1]) is None and margin(np.ones(5)) == 0


@pytest.mark.parametrize("p", [0.9, 0.975, 0.9995])
def test_the_quantile_of_students_t_is_that_of_scipy(p):
    for degrees in (*range(1, 200), 999, 1000, 9_999, 10_000, 99_999, 100_000):
        assert t_quantile(p, degrees) == pytest.approx(stats.t.ppf(p, degrees), rel=1e-9)


IDS = [f"q{i}" for i in range(6)]


def scores(values):
    return {query: {"ndcg@10": value} for query, value in zip(IDS, values, strict=True)}


A = np.array([1, 1, 0.6, 0.5, 0, 1])
B = np.array([0.5, 1, 0.2, 0.6, 0, 0])
C = np.array([0, 0, 0, 0, 0, 0.1])
FOUND = {"B": scores(B), "A": scores(A), "C": scores(C)}


def test_each_system_is_tested_against_each_reference():
    rows = standings(FOUND, ["B", "A"])
    assert list(rows) == ["B", "A", "C"]
    assert rows["A"].p == {"B": p_values((A - B)[:, None])[0]}
    assert rows["B"].p == {"A": rows["A"].p["B"]}
    assert rows["C"].p == {"B": p_values((C - B)[:, None])[0], "A": p_values((C - A)[:, None])[0]}
    assert rows["A"].means["ndcg@10"] == pytest.approx(A.mean()) and rows["A"].margin == margin(A)
    assert standings({"A": scores(A)}, ["A"])["A"].p == {}
