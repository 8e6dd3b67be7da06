"""The `revela` commands that the benchmarks and the demo run parse, flags included."""

from __future__ import annotations

import json
import sys
from itertools import chain
from pathlib import Path

import pytest

from research.benchmarks import demo, quality
from revela.cli import app
from revela.cli.main import add_settings

PLANS = {
    "systems": lambda: quality.plan(20, 10),
    "objectives": lambda: quality.plan_objectives(8, [0]),
    "groups": lambda: quality.plan_groups(60, [0]),
}


def parse(*command: str):
    add_settings(list(command))
    function, bound, _ = app.parse_args(command, exit_on_error=False)
    return function.__name__, bound.arguments


@pytest.mark.parametrize("plan", PLANS)
def test_rows_of_the_quality_tables(plan, monkeypatch):
    rows = list(PLANS[plan]())
    assert len({(collection, label) for collection, label, _ in rows}) == len(rows)
    trained = [how["train"] for *_, how in rows if "train" in how]
    assert trained
    for flags in {tuple(flags) for flags in trained}:
        assert parse("train", "corpus.jsonl", "--out", "model", *flags)[0] == "train"


def test_steps_of_the_demo(monkeypatch, tmp_path, capsys):
    ran = []

    def run(*command):
        ran.append(parse(*command)[0])
        if command[0] == "eval":
            models = ["untrained", "fitted", "trained", demo.MINILM, "adapted"]
            more = ("", " + BM25", " + BM25 + tokens", " + BM25 (RRF)")
            systems = chain(["BM25"], (model + system for model in models for system in more))
            scores = {name: {"ndcg@10": 0.5 + 0.1 * ("fitted" in name)} for name in systems}
            (tmp_path / "demo" / "scores.json").write_text(json.dumps({"docstrings": scores}))

    monkeypatch.setattr(demo, "run", run)
    monkeypatch.setattr(demo, "save_untrained", lambda settings, corpus, out: out.mkdir())
    out = tmp_path / "demo"
    sizes = ["--files", "20", "--held-out-files", "5", "--functions", "10"]
    monkeypatch.setattr(sys, "argv", ["demo", "--out", str(out), *sizes])
    demo.main()
    assert ran == ["train", "train", "evaluate", "index", *["search"] * len(demo.QUESTIONS)]
    assert Path(out, "docstrings", "qrels", "test.tsv").is_file()
    assert "| **SmolLM2-135M, fitted** | 0.600 | 0.600 | 0.600 | 0.600 |" in capsys.readouterr().out
