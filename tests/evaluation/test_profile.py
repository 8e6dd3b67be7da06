"""Profiles: means, slopes, drops and intervals against loops, and their plot."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure

from revela.evaluation.position import (
    RESAMPLES,
    intervals,
    plot_profiles,
    profile,
    slope_weights,
)

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
    found = intervals(columns, owners, seed=7)
    drawn = np.random.default_rng(7).multinomial(5, [0.2] * 5, size=RESAMPLES)
    means = []
    for counts in drawn:
        rows = [
            row for row, owner in zip(columns, owners, strict=True) for _ in range(counts[owner])
        ]
        means.append(np.mean(rows, axis=0))
    for x, interval in enumerate(found):
        values = [m[x] for m in means]
        assert interval.value == pytest.approx(columns[:, x].mean())
        assert (interval.low, interval.high) == pytest.approx(
            (np.percentile(values, 2.5), np.percentile(values, 97.5))
        )


def test_rows_about_one_document_are_not_taken_for_independent():
    rng = np.random.default_rng(2)
    documents = rng.normal(size=(10, 10))
    scores, owners = np.repeat(documents, 20, axis=0), np.repeat(np.arange(10), 20).tolist()
    wrong, right = profile(scores, TENTHS).slope, profile(scores, TENTHS, owners).slope
    assert right.high - right.low > 3 * (wrong.high - wrong.low)


def test_that_rows_differ_at_all_places_does_not_widen_a_places_interval():
    scores = np.arange(10.0)[None] + 100 * np.random.default_rng(3).normal(size=(30, 1))
    assert all(p.high - p.low < 1e-9 for p in profile(scores, TENTHS).places)
    ties = profile(np.ones((4, 10)), TENTHS)
    assert ties.first_wins.value == 0.5 and ties.slope.value == pytest.approx(0)


def test_slope_weights_know_nothing_of_a_constant():
    assert slope_weights(TENTHS) @ np.ones(10) == pytest.approx(0)
    assert slope_weights(TENTHS) @ np.array(TENTHS) == pytest.approx(1)


@pytest.mark.parametrize("several", [False, True])
def test_the_plot_has_a_line_per_model_and_a_box_per_test(tmp_path, monkeypatch, several):
    rng, drawn = np.random.default_rng(0), []
    profiles = {
        test: profile(rng.normal(size=(20, 10)) + 5, TENTHS)
        for test in ("exact match", "moved passage, MRR@100", "next-token loss")
    }
    models = {"a": profiles, **({"b": {"exact match": profiles["exact match"]}} if several else {})}
    save = Figure.savefig

    def keep(figure, *args, **kwargs):
        drawn.append(figure)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    plot_profiles(models, tmp_path / "p.png", "title")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.iterdir())) == 1
    boxes = [axis for axis in drawn[0].axes if axis.get_visible()]
    assert [axis.get_title() for axis in boxes] == list(profiles)
    assert [len(axis.get_lines()) for axis in boxes] == ([2, 1, 1] if several else [1, 1, 1])
    values = boxes[0].get_lines()[0].get_ydata()
    expected = np.array([place.value for place in profiles["exact match"].places])
    np.testing.assert_allclose(values, expected - expected.mean() if several else expected)
    units = [axis.get_ylabel().split(",")[0] for axis in boxes]
    assert units == ["cosine", "MRR@100", "nats per token"]
