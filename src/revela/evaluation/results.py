"""The scores of a system on a collection, and a writer of results as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from revela.files import atomic_write


@dataclass(frozen=True)
class SystemScores:
    """Scores of one system on one collection.

    Attributes:
        means: metrics averaged over the queries; ``main`` is mteb's main score of a task.
        margin: half the 95 % interval of nDCG@10; None for a single query.
        p: other system -> p value of the difference in nDCG@10.
        queries: query id -> metrics.
        settings: prompts, truncation and precision, for benchmarks.
    """

    means: dict[str, float]
    margin: float | None = None
    p: dict[str, float] = field(default_factory=dict)
    queries: dict[str, dict[str, float]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


def write_json(content: Any, path: Path) -> None:
    """Write a dataclass, or a dict of dataclasses, as JSON, atomically."""
    with atomic_write(path) as temporary:
        temporary.write_bytes(to_json(content, indent=1, inf_nan_mode="null") + b"\n")
