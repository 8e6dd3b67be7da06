"""Plot the curves of one or several runs: loss, learning rate, gradient norm, the label-free check
with BM25's level, and scores on judged queries.

    python -m research.plot_run runs/a runs/b --out curves.png

A folder of `revela compare` gives the judged scores of its runs. A CSV of the same data is written
next to the PNG.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from research.benchmarks.options import parser_of
from research.plots import Mark, Panel, write_figure
from revela.errors import RevelaError
from revela.training.compare import COMPARISON, Comparison
from revela.training.record import METRICS, RUN_FILE, About, Metrics, MetricsRow, RunFile

CURVES = {
    "loss": "loss, nats",
    "learning_rate": "learning rate",
    "grad_norm": "norm of the gradient",
}
CHECK, JUDGED = "label-free check: {}", "judged: {}"
AGAINST = {"tokens": "million tokens read", "minutes": "minutes of training"}


@dataclass(frozen=True)
class Run:
    """What a run recorded."""

    about: About
    metrics: list[MetricsRow]

    @classmethod
    def read(cls, folder: Path) -> Run:
        return cls(RunFile.read(folder).about, [*Metrics(folder / METRICS).written()])


def panels_of_runs(runs: Mapping[str, Run], against: str) -> list[Panel]:
    """The panels of some runs by name: a curve for each run in each panel."""
    panels = []
    for field, title in CURVES.items():
        marks = _curves(runs, against, lambda row, field=field: getattr(row, field))
        panels.append(Panel(title, AGAINST[against], "", marks, markers=False))
    checks = {name: [row.check for row in run.metrics if row.check] for name, run in runs.items()}
    for task in _names(checks.values()):
        marks = _curves(runs, against, lambda row, task=task: (row.check or {}).get(task))
        levels = _levels(  # BM25's own level for fusions with it, too
            {name: run.about.bm25.get(task.removesuffix(" + BM25")) for name, run in runs.items()}
        )
        panels.append(Panel(CHECK.format(task), AGAINST[against], "nDCG@10", marks, levels=levels))
    judged = {name: [r.judged for r in run.metrics if r.judged] for name, run in runs.items()}
    for collection in _names(judged.values()):
        marks = _curves(runs, against, lambda row, c=collection: (row.judged or {}).get(c))
        panels.append(Panel(JUDGED.format(collection), AGAINST[against], "nDCG@10", marks))
    return panels


def panels_of_comparison(comparison: Comparison, against: str) -> list[Panel]:
    """A panel for each collection: a curve for each run, and BM25's level."""
    panels = []
    for collection, bm25 in comparison.scores.get("BM25", {}).items():
        marks = [
            Mark(run, point.tokens_read / 1e6 if against == "tokens" else point.minutes, score)
            for run, points in comparison.curves.items()
            for point in points
            if (score := point.judged.get(collection)) is not None
        ]
        title, levels = JUDGED.format(collection), {"BM25": bm25}
        panels.append(Panel(title, AGAINST[against], "nDCG@10", marks, levels=levels))
    return panels


def _curves(
    runs: Mapping[str, Run], against: str, value: Callable[[MetricsRow], float | None]
) -> list[Mark]:
    """The known values of each run's rows."""
    found = []
    for name, run in runs.items():
        for row in run.metrics:
            x = row.minutes if against == "minutes" else row.tokens_read
            if x is not None and (y := value(row)) is not None:
                found.append(Mark(name, x if against == "minutes" else x / 1e6, y))
    return found


def _names(scores: Sequence[Sequence[Mapping[str, float]]]) -> list[str]:
    """All names in the order of their first appearance."""
    return [*dict.fromkeys(name for run in scores for found in run for name in found)]


def _levels(bm25: Mapping[str, float | None]) -> dict[str, float]:
    """BM25's level, or one for each run, whose held-out documents may differ."""
    known = {name: value for name, value in bm25.items() if value is not None}
    if len({*known.values()}) == 1:
        return {"BM25": next(iter(known.values()))}
    return {f"{name}: BM25": value for name, value in known.items()}


def read_folders(folders: Sequence[Path], against: str) -> list[Panel]:
    """The panels of run folders, or of one folder of `revela compare`.

    Raises:
        RevelaError: a folder has neither.
    """
    compared = [folder for folder in folders if (folder / COMPARISON).is_file()]
    if compared and len(folders) > 1:
        raise RevelaError(f"{compared[0]} is a whole comparison: plot it alone, or name its runs")
    if compared:
        text = (compared[0] / COMPARISON).read_bytes()
        return panels_of_comparison(TypeAdapter(Comparison).validate_json(text), against)
    for folder in folders:
        if not (folder / RUN_FILE).is_file():
            raise RevelaError(
                f"{folder} has no {RUN_FILE} and no {COMPARISON}: give a folder of revela train "
                "or of revela compare"
            )
    names = [folder.name for folder in folders]
    if len({*names}) < len(names):
        names = [str(folder) for folder in folders]
    return panels_of_runs(dict(zip(names, map(Run.read, folders), strict=True)), against)


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--out", type=Path, help="PNG; default: curves.png in the first folder")
    parser.add_argument("--against", choices=AGAINST, default="tokens")
    given = parser.parse_args(argv)
    out = given.out or given.runs[0] / "curves.png"
    try:
        title = " and ".join(map(str, given.runs))
        table = write_figure(read_folders(given.runs, given.against), out, title)
    except RevelaError as error:
        sys.exit(str(error))
    print(f"wrote {out} and {table}")


if __name__ == "__main__":
    main()
