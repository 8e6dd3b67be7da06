"""Plot curves as SVG elements. Titles and legends are in the page, so an SVG has no user text."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from revela.errors import extra
from revela.training.record import Comparison, Run

Point = tuple[float, float]

# Legible on white and on dark pages.
COLOURS = (
    *("#2b83d6", "#d9660f", "#1f9d6b", "#c04fa3", "#a88412", "#1a9ba8", "#d8475c", "#7d70dd"),
    *("#6f8f1c", "#8a6d5a", "#4d6f9c", "#b0722a"),
)
INK, LEVEL = "#7f8790", "#858d96"
STYLE: Any = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
    "svg.fonttype": "none",
    "svg.hashsalt": "revela",  # makes files reproducible
    "font.size": 9,
}
SVG_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
SIZE = (4.4, 2.9)  # inches
LEAST_SPAN = 0.05  # minimum range of an axis, or chance would look like a trend


@dataclass(frozen=True)
class Plot:
    """Curves over minutes of training.

    Attributes:
        lines: (number of the series, which selects the colour; points) of each curve.
        level: BM25's score, a dashed line.
    """

    title: str
    y_label: str
    lines: Sequence[tuple[int, Sequence[Point]]]
    level: float | None = None

    def svg(self) -> str:
        """The plot as an SVG element."""
        with extra("report", "the report page"):
            import matplotlib
            from matplotlib.figure import Figure

        with matplotlib.rc_context(STYLE):
            figure = Figure(figsize=SIZE, layout="constrained")
            figure.patch.set_alpha(0.0)
            self._draw(figure.subplots())
            file = io.StringIO()
            figure.savefig(file, format="svg", metadata=SVG_METADATA)
        text = file.getvalue()
        label = f'role="img" aria-label="{self.y_label} against minutes of training"'
        return text[text.index("<svg") :].replace("<svg", f"<svg {label}", 1)

    def _draw(self, axis: Any) -> None:
        for series, points in self.lines:
            x, y = [point[0] for point in points], [point[1] for point in points]
            marker = "o" if len(x) <= 12 else ""
            axis.plot(x, y, color=colour(series), linewidth=1.6, marker=marker, markersize=3.5)
        if self.level is not None:
            axis.axhline(self.level, color=LEVEL, linestyle=(0, (5, 3)), linewidth=1.2)
        low, high = axis.get_ylim()
        if (missing := LEAST_SPAN - (high - low)) > 0:
            axis.set_ylim(low - missing / 2, high + missing / 2)
        axis.set(xlabel="minutes of training", ylabel=self.y_label)
        axis.grid(color=INK, alpha=0.15, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.patch.set_alpha(0.0)


def colour(series: int) -> str:
    """The colour of a series, for CSS and matplotlib."""
    return COLOURS[series % len(COLOURS)]


def comparison_plots(comparison: Comparison) -> list[Plot]:
    """A plot per collection: nDCG@10 of judged queries, with a colour per kind of run."""
    kinds = kinds_of(comparison.curves)
    plots = []
    for name, level in comparison.bm25.items():
        lines = [
            (kinds.index(kind_of(run)), [(at.minutes, at.judged[name]) for at in curve])
            for run, curve in comparison.curves.items()
        ]
        plots.append(Plot(name, "nDCG@10", lines, level))
    return plots


def kind_of(label: str) -> str:
    """The name of a run without its seed; runs of one kind share a colour."""
    return label.rpartition(", seed ")[0] or label


def check_plots(runs: Mapping[str, Run]) -> list[Plot]:
    """A plot per task of the label-free check, with BM25 if it is the same for all runs."""
    kinds = kinds_of(runs)
    plots = []
    for task in check_tasks(runs):
        lines = []
        for name, run in runs.items():
            points = [(row.minutes, check[task]) for row, check in run.checks() if task in check]
            lines.append((kinds.index(kind_of(name)), points))
        levels = {run.about.bm25.get(task) for run in runs.values()}
        plots.append(Plot(task, "nDCG@10", lines, levels.pop() if len(levels) == 1 else None))
    return plots


def loss_plots(runs: Mapping[str, Run]) -> list[Plot]:
    """A plot per method, as losses of different methods cannot be compared."""
    kinds = kinds_of(runs)
    lines: dict[str, list[tuple[int, Sequence[Point]]]] = {}
    for name, run in runs.items():
        if losses := run.losses():
            line = kinds.index(kind_of(name)), smooth(losses)
            lines.setdefault(str(run.settings.get("method", "")), []).append(line)
    return [Plot(f"Loss, {name}", "loss", own) for name, own in lines.items()]


def kinds_of(labels: Iterable[str]) -> list[str]:
    """The kinds of runs, in the order of their series."""
    return list(dict.fromkeys(map(kind_of, labels)))


def check_tasks(runs: Mapping[str, Run]) -> list[str]:
    """The tasks of the label-free check in any run."""
    return list(
        dict.fromkeys(t for run in runs.values() for _, check in run.checks() for t in check)
    )


def smooth(points: Sequence[Point]) -> list[Point]:
    """The running mean over a tenth of the points."""
    width = max(1, len(points) // 10)
    return [
        (x, fmean(y for _, y in points[max(0, i - width + 1) : i + 1]))
        for i, (x, _) in enumerate(points)
    ]
