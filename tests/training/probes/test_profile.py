"""Profiles: means, slopes, drops and intervals against loops."""

from __future__ import annotations

import numpy as np
import pytest

from revela.training.probes.places import RESAMPLES, SEED, intervals, profile

TENTHS = [place + 0.5 for place in range(10)]


def test_slope_and_drop_are_those_of_a_least_squares_line():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(40, 10)) - 0.3 * np.arange(10)
    found = profile(scores, TENTHS)
    assert found.slope.value == pytest.approx(np.polyfit(TENTHS, scores.mean(axis=0), 1)[0])
    assert found.drop.value == pytest.approx(np.mean([row[0] - row[-1] for row in scores]))
    np.testing.assert_allclose([p.value for p in found.places], scores.mean(axis=0))
    assert found.slope.low < -0.3 < found.slope.high < 0 < found.drop.low
    assert found.first_wins.value == np.mean([row[0] > row[-1] for row in scores])
    assert (found.rows, found.documents) == (40, 40)


def test_intervals_are_those_of_a_loop_over_resamples():
    rng = np.random.default_rng(1)
    columns, owners = rng.normal(size=(12, 2)), [0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 4, 4]
    found = intervals(columns, owners)
    drawn = np.random.default_rng(SEED).multinomial(5, [0.2] * 5, size=RESAMPLES)
    means = np.array([np.repeat(columns, counts[owners], axis=0).mean(axis=0) for counts in drawn])
    for x, interval in enumerate(found):
        assert interval.value == pytest.approx(columns[:, x].mean())
        bounds = np.percentile(means[:, x], [2.5, 97.5])
        assert (interval.low, interval.high) == pytest.approx(tuple(bounds))


def test_rows_about_one_document_are_not_taken_for_independent():
    rng = np.random.default_rng(2)
    documents = rng.normal(size=(10, 10))
    scores, owners = np.repeat(documents, 20, axis=0), np.repeat(np.arange(10), 20).tolist()
    wrong, right = profile(scores, TENTHS).slope, profile(scores, TENTHS, owners).slope
    assert right.high - right.low > 3 * (wrong.high - wrong.low)


def test_scores_about_one_document_have_no_interval_and_a_line_says_so(caplog):
    scores = np.random.default_rng(4).normal(size=(20, 10))
    found, alone = profile(scores, TENTHS, [7] * 20), profile(scores, TENTHS)
    assert found.drop.value == pytest.approx(alone.drop.value) and found.documents == 1
    assert np.isnan([(p.low, p.high) for p in (*found.places, found.slope, found.drop)]).all()
    assert caplog.messages == ["all scores are about one document: they have no intervals"]


def test_that_rows_differ_at_all_places_does_not_widen_a_places_interval():
    scores = np.arange(10.0)[None] + 100 * np.random.default_rng(3).normal(size=(30, 1))
    assert all(p.high - p.low < 1e-9 for p in profile(scores, TENTHS).places)
    ties = profile(np.ones((4, 10)), TENTHS)
    assert ties.first_wins.value == 0.5 and ties.slope.value == pytest.approx(0)
