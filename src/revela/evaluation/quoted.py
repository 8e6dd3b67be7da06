"""Scores that others published on the tasks scored here, each with its source (quoted.toml)."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from revela.evaluation.beir import Collection


@dataclass(frozen=True)
class Quote:
    """Another system's nDCG@10 (0 to 1), its source, and the tasks that it is a mean of, if these
    are not the benchmark's own.
    """

    system: str
    score: float
    source: str
    over: str = ""


@cache
def _file() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "quoted.toml").read_text(encoding="utf-8"))


def quotes_for_task(task: str) -> list[Quote]:
    """Quoted scores of a task by its name in mteb; empty if there are none."""
    file = _file()
    return [
        Quote(row["system"], row["tasks"][task] / 100, file["sources"][row["source"]])
        for row in file["rows"]
        if task in row["tasks"]
    ]


def quotes_for_benchmark(benchmark: str) -> list[Quote]:
    """Quoted means over a benchmark."""
    file = _file()
    sources, rows = file["sources"], file["means"].get(benchmark, [])
    return [
        Quote(row["system"], row["score"] / 100, sources[row["source"]], row.get("over", ""))
        for row in rows
    ]


def task_of(collection: Collection) -> str | None:
    """The name in mteb of the task that a collection is, or None; both its name and its sizes must
    match.
    """
    sizes = {"documents": len(collection.documents), "queries": len(collection.queries)}
    for task, counts in _file()["folders"].items():
        if collection.name.lower() == task.lower() and counts == sizes:
            return str(task)
    return None
