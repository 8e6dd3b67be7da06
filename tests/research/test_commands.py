"""The `revela` commands that the benchmarks and the demo run parse, flags included."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from conftest import parsed
from research.benchmarks import demo, quality
from revela.training.methods.registry import PRESETS
from revela.types import Document

PLANS = {
    "systems": lambda: quality.plan(20, 10),
    "methods": lambda: quality.plan_methods(8, [0]),
    "groups": lambda: quality.plan_groups(60, [0]),
}


@pytest.mark.parametrize("plan", PLANS)
def test_rows_of_the_quality_tables(plan, monkeypatch):
    rows = list(PLANS[plan]())
    assert len({(collection, label) for collection, label, _ in rows}) == len(rows)
    trained = [how["train"] for *_, how in rows if "train" in how]
    assert trained
    for flags in {tuple(flags) for flags in trained}:
        verb, given = parsed(["train", "corpus.jsonl", "--out", "model", *flags])
        assert verb == "train" and given.get("method", "revela-gated") in PRESETS


@pytest.fixture
def demonstrate(monkeypatch, tmp_path):
    """Runs the demo with commands that do nothing; gives the names of their functions."""

    def begin(*arguments, best="fitted"):
        out, ran = tmp_path / "demo", []

        def run(*command):
            name, given = parsed([*command])
            ran.append(name)
            if name == "eval":
                models = [Path(model).name for model in given["model"]]
                more = ("", " + BM25", " + BM25 + late interaction", " + BM25 (RRF)")
                systems = ["BM25", *(model + system for model in models for system in more)]
                means = {name: {"ndcg@10": 0.5 + 0.1 * (best in name)} for name in systems}
                scores = {name: {"means": each} for name, each in means.items()}
                (out / "scores.json").write_text(json.dumps({"test": scores}))

        monkeypatch.setattr(demo, "run", run)
        monkeypatch.setattr(
            demo, "save_untrained", lambda settings, corpus, out, lm, steps=0: out.mkdir()
        )
        monkeypatch.setattr(sys, "argv", ["demo", "--out", str(out), *arguments])
        demo.main()
        assert (out / "test" / "qrels" / "test.tsv").is_file()
        return ran

    return begin


PACKAGES = ["fit", "train", "train", "eval", "eval", "index", *["search"] * 3]


def test_steps_of_the_demo(demonstrate, capsys):
    ran = demonstrate("--files", "20", "--held-out-files", "5", "--functions", "10")
    assert ran == PACKAGES
    said = capsys.readouterr().out
    assert "| **SmolLM2-135M, fitted** | 0.600 | 0.600 | 0.600 | 0.600 |" in said
    assert "| SmolLM2-135M, table of words | 0.500 | 0.500 |" in said and "| BM25 | 0.500 |" in said


def pages(count):
    title, text = "Blätter Nummer {} ordnen", "Ordnet das Blatt {}. " + "Es liegt im Fach. " * 30
    return [Document(f"/m/b{i}.1.gz", text.format(i), title.format(i)) for i in range(count)]


def test_steps_of_the_demo_in_a_language(demonstrate, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(demo, "translated", lambda language: pages(60))
    ran = demonstrate("--language", "de", "--files", "30", "--lm", "owner/model", best="table")
    assert ran == ["fit", "fit", "eval", "index", *["search"] * 3]
    said = capsys.readouterr().out
    assert "60 documents in de come with this machine: 30 to fit to, 20 held out" in said
    assert "| **model, table of words** | 0.600 | 0.600 |" in said
    assert "| MiniLM | 0.500 | 0.500 |" in said and "| model, fitted | 0.500 | 0.500 |" in said
    rows = {
        name: [json.loads(line) for line in (tmp_path / "demo" / name).open()]
        for name in ("train.jsonl", "held_out.jsonl", "test/queries.jsonl", "test/corpus.jsonl")
    }
    held = rows["held_out.jsonl"]
    assert not {row["_id"] for row in held} & {row["_id"] for row in rows["train.jsonl"]}
    # The queries are in what is fitted to, and not in what they search.
    assert all(re.fullmatch(r"b\d+\.1 Blätter .*", row["title"]) for row in rows["train.jsonl"])
    assert all(re.fullmatch(r"b\d+\.1", row["title"]) for row in held)
    assert len(rows["test/queries.jsonl"]) == 20
    assert "Blätter" not in str(rows["test/corpus.jsonl"])
