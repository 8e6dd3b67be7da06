"""Published numbers: the CSV files of research/published."""

from __future__ import annotations

import csv
import functools
from dataclasses import dataclass
from pathlib import Path

from research.reproduce.tables import NDCG
from revela.errors import RevelaError

PUBLISHED = Path(__file__).parents[1] / "published"
METRICS = {"ndcg@10_pct": NDCG, "main score": NDCG}
"""How a file calls a metric -> its name here; others have one name."""
IMPOSSIBLE = "far outside both parts"  # in the note of a cell that cannot be as printed


@dataclass(frozen=True)
class Published:
    """A cell of a table, as printed: in per cent, or from 0 to 1."""

    value: float
    note: str = ""

    @property
    def is_impossible(self) -> bool:
        """Whether it lies far outside what it is made of."""
        return IMPOSSIBLE in self.note


Key = tuple[str, str, str, str]
"""Row, size, column, metric."""


@functools.cache
def read_published(stem: str, folder: Path = PUBLISHED) -> dict[Key, Published]:
    """The cells of a file that have a number.

    Raises:
        RevelaError: the file is missing, or a line of it is not a cell.
    """
    path, cells = folder / f"{stem}.csv", dict[Key, Published]()
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if row["value"]:
                    metric = METRICS.get(row["metric"], row["metric"])
                    key = row["row"], row["size"], row["column"], metric
                    cells[key] = Published(float(row["value"]), row["note"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RevelaError(f"{path} is not a table of published numbers ({error!r})") from error
    return cells


def cell(
    stem: str, row: str, size: str, column: str, metric: str = NDCG, folder: Path = PUBLISHED
) -> Published | None:
    """A published number; None if the paper has none."""
    return read_published(stem, folder).get((row, size, column, metric))


def columns_of(stem: str, folder: Path = PUBLISHED) -> list[str]:
    """The columns of a file."""
    return list(dict.fromkeys(column for _, _, column, _ in read_published(stem, folder)))


@functools.cache
def task_names() -> dict[str, str]:
    """Data set -> mteb's task (names.csv)."""
    with (PUBLISHED / "names.csv").open(newline="", encoding="utf-8") as file:
        return {row["column"]: row["mteb_task"] for row in csv.DictReader(file)}


def published_heads(stem: str, folder: Path = PUBLISHED) -> list[tuple[int, int]]:
    """(layer, head) by rank, of a table of heads."""
    cells = read_published(stem, folder)
    ranks = dict.fromkeys(key[:2] for key in cells)
    heads = [[cells.get((*rank, part, "index")) for part in ("layer", "head")] for rank in ranks]
    if not heads or not all(map(all, heads)):
        raise RevelaError(f"{folder / stem}.csv lacks the layer or the head of a rank")
    return [(int(layer.value), int(head.value)) for layer, head in heads if layer and head]
