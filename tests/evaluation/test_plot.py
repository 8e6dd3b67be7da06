"""The plot shows a model's scores as they are, and several models' by what they differ from their
own mean.
"""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure

from revela.evaluation.position import plot_profiles, profile

TENTHS = [place + 0.5 for place in range(10)]


@pytest.mark.parametrize("several", [False, True])
def test_a_line_a_model_and_a_box_a_test(tmp_path, monkeypatch, several):
    rng, drawn = np.random.default_rng(0), []
    profiles = {
        test: profile(rng.normal(size=(20, 10)) + 5, TENTHS)
        for test in ("exact match", "moved passage, MRR@100", "next-token loss")
    }
    models = {"a": profiles, **({"b": {"exact match": profiles["exact match"]}} if several else {})}
    save = Figure.savefig
    monkeypatch.setattr(
        Figure,
        "savefig",
        lambda figure, *args, **kwargs: (drawn.append(figure), save(figure, *args, **kwargs))[1],
    )
    plot_profiles(models, tmp_path / "p.png", "title")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG") and len(
        list(tmp_path.iterdir())
    ) == 1
    boxes = [axis for axis in drawn[0].axes if axis.get_visible()]
    assert [axis.get_title() for axis in boxes] == list(profiles)
    assert [len(axis.get_lines()) for axis in boxes] == ([2, 1, 1] if several else [1, 1, 1])
    values = boxes[0].get_lines()[0].get_ydata()
    expected = np.array([place.value for place in profiles["exact match"].places])
    np.testing.assert_allclose(values, expected - expected.mean() if several else expected)
    assert [axis.get_ylabel().split(",")[0] for axis in boxes] == [
        "cosine",
        "MRR@100",
        "nats per token",
    ]
