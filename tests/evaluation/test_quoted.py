"""Quoted figures: each has a source, belongs to a task that exists, and is shown for a folder only
if it is that task.
"""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import pytest

import revela.evaluation.quoted as quoted
from revela.evaluation.beir import Collection

FILE = tomllib.loads((Path(quoted.__file__).parent / "quoted.toml").read_text())


def test_every_figure_has_a_source_and_every_source_a_figure():
    rows = [*FILE["rows"], *(mean for means in FILE["means"].values() for mean in means)]
    assert {row["source"] for row in rows} == set(FILE["sources"])
    assert all(0 < score < 100 for row in FILE["rows"] for score in row["tasks"].values())


def test_quotes_of_a_task_and_of_a_benchmark():
    scifact = {quote.system: quote.score for quote in quoted.quotes_for_task("SciFact")}
    assert scifact["Revela 135M"] == pytest.approx(0.579) and scifact[
        "Contriever, unsupervised"
    ] == pytest.approx(0.6493)
    assert all(
        "Pyserini" in q.source or "Revela" in q.source for q in quoted.quotes_for_task("SciFact")
    )
    assert (
        quoted.quotes_for_task("no task") == []
        and quoted.quotes_for_benchmark("no benchmark") == []
    )
    assert {quote.over for quote in quoted.quotes_for_benchmark("CoIR")} == {""}
    assert all(quote.over for quote in quoted.quotes_for_benchmark("BEIR"))


def test_a_folder_is_a_task_by_name_and_counts():
    scifact = Collection("scifact", ["d"] * 5183, ["t"] * 5183, ["q"] * 300, ["x"] * 300, {})
    assert quoted.task_of(scifact) == "SciFact"
    assert quoted.task_of(dataclasses.replace(scifact, documents=["t"] * 5182)) is None
    assert quoted.task_of(dataclasses.replace(scifact, name="cosqa")) is None


def test_tasks_have_mtebs_names():
    mteb = pytest.importorskip("mteb")
    for task in {task for row in FILE["rows"] for task in row["tasks"]}:
        assert mteb.get_task(task).metadata.main_score == "ndcg_at_10"
    for benchmark in FILE["means"]:
        assert mteb.get_benchmark(benchmark).name == benchmark
