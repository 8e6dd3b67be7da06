"""research/plots.py and plot_run.py: data through the figure's own objects and its CSV."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import make_rows
from research import plot_run
from research.plots import SHAPES, Mark, Panel, draw, write_figure
from test_cli import TINY_FLAGS
from tests.collection_folder import write_judged


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_draws_what_its_csv_has(shape, tmp_path):
    x, y = (("8", "16"), "64") if shape == "map" else ((1, 2), 0.25)
    marks = [Mark("$a$", at, y, value=0.5, low=0.2, high=0.3, note="1B") for at in x]
    marks.append(Mark("$a$", x[0], y, value=0.75, published=True))
    panel = Panel("title", "x", "y", marks, shape, levels={"BM25": 0.4})
    rows = [*csv.DictReader(write_figure([panel], tmp_path / "a.png", "t", "n").open())]
    assert [(row["source"], row["x"]) for row in rows[:3]] == [
        *(("here", str(at)) for at in x), ("published", str(x[0])),
    ]  # fmt: skip
    drawn = draw([panel]).axes[0]
    if shape == "map":
        texts = [text.get_text() for text in drawn.texts]
        assert drawn.images[0].get_array().tolist() == [[0.5, 0.5]] and texts[0] == "0.500\n(0.750)"
    else:
        ours, published, *_ = (line.get_xydata().tolist() for line in drawn.lines if line.get_marker() == "o")
        assert ours == [[1, 0.25], [2, 0.25]] and published == [[1, 0.25]]
