"""What others published on the tasks that we score: rows that are quoted, each with its source
(quoted.toml), never measured here.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from revela.evaluation.beir import Collection


@dataclass(frozen=True)
class Quote:
    """Another system's nDCG@10 (0 to 1), where it was read, and what it is a mean of, if of other
    tasks than the benchmark's own.
    """

    system: str
    score: float
    source: str
    over: str = ""


@cache
def _file() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "quoted.toml").read_text(encoding="utf-8"))


def quotes_for_task(task: str) -> list[Quote]:
    """Quoted scores of a task by mteb's name of it; none if there are none."""
    file = _file()
    return [
        Quote(row["system"], row["tasks"][task] / 100, file["sources"][row["source"]])
        for row in file["rows"]
        if task in row["tasks"]
    ]


def quotes_for_benchmark(benchmark: str) -> list[Quote]:
    """Quoted means over a benchmark."""
    file = _file()
    return [
        Quote(
            mean["system"],
            mean["score"] / 100,
            file["sources"][mean["source"]],
            mean.get("over", ""),
        )
        for mean in file["means"].get(benchmark, [])
    ]


def task_of(collection: Collection) -> str | None:
    """The task that this folder is, by its name and its counts; a name alone is not enough."""
    for task, counts in _file()["folders"].items():
        if collection.name.lower() == task.lower() and counts == {
            "documents": len(collection.documents),
            "queries": len(collection.queries),
        }:
            return str(task)
    return None
