"""Plots by their CSV and matplotlib's own objects; the curves of a run; figures of the papers."""

from __future__ import annotations

import csv
import warnings

import pytest

from conftest import make_rows
from research import plot_run
from research.plots import SHAPES, Mark, Panel, draw, write_figure
from research.reproduce.__main__ import main
from test_cli import TINY_FLAGS
from tests.collection_folder import write_judged


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_draws_what_its_csv_has(shape, tmp_path):
    x, y = (("8", "16"), "64") if shape == "map" else ((1, 2), 0.25)
    marks = [Mark("$a$", at, y, 0.5, low=0.2, high=0.3) for at in x]
    marks.append(Mark("$a$", x[0], y, 0.75, published=True))
    panel = Panel("title", "x", "y", marks, shape)
    rows = csv.DictReader(write_figure([panel], tmp_path / "a.png", "t", "n").open())
    found = [row["x"] + " " + row["source"] for row in rows]
    assert found == [f"{x[0]} here", f"{x[1]} here", f"{x[0]} published"]
    axes = draw([panel]).axes[0]
    if shape == "map":
        assert axes.images[0].get_array().tolist() == [[0.5, 0.5]]
        assert axes.texts[0].get_text() == "0.500\n(0.750)"
    else:
        lines = [line for line in axes.lines if line.get_marker() == "o"]
        assert [line.get_xydata().tolist() for line in lines] == [[[1, y], [2, y]], [[1, y]]]
        assert [line.get_markerfacecolor() == "none" for line in lines] == [False, True]


def test_a_run_shows_its_curves_and_bm25_in_silence(doing, models, corpus_file, tmp_path, capsys):
    on, run = write_judged(tmp_path / "mine", make_rows(20, seed=5)), tmp_path / "run"
    doing("train", corpus_file, models, "--out", run, *TINY_FLAGS, "--on", on, "--points 1")
    drawn = {axes.get_title(): axes for axes in draw(plot_run.read_folders([run], "tokens")).axes}
    checks = map(plot_run.CHECK.format, ["sibling", "sibling + BM25", "title", "title + BM25"])
    assert [*drawn] == [*plot_run.CURVES.values(), *checks, "judged: mine"]
    assert all(len(axes.lines[0].get_xdata()) for axes in drawn.values())
    assert "BM25" in [line.get_label() for line in drawn["label-free check: title"].lines]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_run.main([str(run), "--out", str(tmp_path / "a.png")])
    assert not capsys.readouterr().err and (tmp_path / "a.csv").is_file()


@pytest.mark.slow
def test_a_figure_is_drawn_beside_published_values(tiny_lm_folder, tmp_path, capsys):
    on = write_judged(tmp_path / "data" / "mine", make_rows(40))
    given = f"--small --data {on.parent} --out {tmp_path} --model {tiny_lm_folder} --max-steps 2"
    more = f"--corpus {on}/corpus.jsonl --processes 1 --lm {tiny_lm_folder} --threads 1"
    main(f"--figure revela-v1-5 {given} {more}".split())
    rows = [*csv.DictReader((tmp_path / "revela-v1-5.csv").open())]
    found = ", ".join(row["x"] + " " + row["source"] for row in rows)
    assert found == "off here, off published, on here, on published"
    assert rows[1]["value"] == "0.3116" and 0 < float(rows[0]["value"]) <= 1
    assert "nothing of the method" in capsys.readouterr().out
