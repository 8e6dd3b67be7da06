"""Plots of results: as SVG elements of a report's page, and as PNG files."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from revela.errors import extra
from revela.evaluation.results import Comparison, Profile, Run
from revela.files import atomic_write

Point = tuple[float, float]

# All can be read on a white page and on a dark one.
COLOURS = ("#2b83d6", "#d9660f", "#1f9d6b", "#c04fa3", "#a88412", "#1a9ba8", "#d8475c", "#7d70dd")
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)))  # once the colours are used up
INK, LEVEL = "#7f8790", "#858d96"
STYLE: Any = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
    "svg.fonttype": "none",
    "svg.hashsalt": "revela",  # the same plot is the same file
    "font.size": 9,
    "text.parse_math": False,
}
SVG_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
MINUTES = "minutes of training"
WIDTH, HEIGHT, COLUMNS = 4.4, 2.9, 2  # inches of a plot, plots in a row of a PNG
UNITS = {"moved passage, MRR@100": "MRR@100", "spans by place": "accuracy"}  # else cosine


@dataclass(frozen=True)
class Line:
    """A curve: ``series`` numbers its colour and dashes, ``band`` is the interval at each point."""

    name: str
    points: Sequence[Point]
    series: int = 0
    band: Sequence[Point] = ()


@dataclass(frozen=True)
class Plot:
    """Curves from back to front, and the score of BM25 as a dashed level."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    level: float | None = None

    def svg(self) -> str:
        """An SVG element without title and legend, so that it holds no text of a user."""
        with extra("report", "the report page"):
            import matplotlib
            from matplotlib.figure import Figure

        with matplotlib.rc_context(STYLE):
            figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
            figure.patch.set_alpha(0.0)
            self.draw(figure.subplots())
            file = io.StringIO()
            figure.savefig(file, format="svg", metadata=SVG_METADATA)
        text = file.getvalue()
        label = f'role="img" aria-label="{self.y_label} against {self.x_label}"'
        return text[text.index("<svg") :].replace("<svg", f"<svg {label}", 1)

    def draw(self, axis: Any) -> None:
        """Draw on an axis of matplotlib."""
        for line in self.lines:
            x, y = [point[0] for point in line.points], [point[1] for point in line.points]
            dashes = DASHES[line.series // len(COLOURS) % len(DASHES)]
            ink, dots = colour(line.series), dict(marker="o", ms=3.5) if len(x) <= 12 else {}
            axis.plot(x, y, color=ink, linestyle=dashes, lw=1.6, label=line.name, **dots)
            if line.band:
                band = zip(*line.band, strict=True)
                axis.fill_between(x, *band, color=ink, alpha=0.18, linewidth=0)
        if self.level is not None:
            axis.axhline(self.level, color=LEVEL, linestyle=(0, (5, 3)), lw=1.2, label="BM25")
        axis.set(xlabel=self.x_label, ylabel=self.y_label)
        axis.grid(color=INK, alpha=0.15, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.patch.set_alpha(0.0)


def colour(series: int) -> str:
    """The colour of a series, as CSS and matplotlib write it."""
    return COLOURS[series % len(COLOURS)]


def save_png(plots: Sequence[Plot], path: Path, title: str = "") -> None:
    """Write plots beside and below each other, with one legend of all their lines."""
    with extra("report", "a plot"):
        import matplotlib
        from matplotlib.figure import Figure

    columns, rows = min(COLUMNS, max(1, len(plots))), max(1, -(-len(plots) // COLUMNS))
    with matplotlib.rc_context({"text.parse_math": False}):
        figure = Figure(figsize=(WIDTH * columns, HEIGHT * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        named: dict[str, Any] = {}
        for plot, axis in zip(plots, axes, strict=False):
            plot.draw(axis)
            axis.set_title(plot.title)
            named |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
        for axis in axes[len(plots) :]:
            axis.set_visible(False)
        figure.suptitle(title, fontsize=10)
        if len(named) > 1:
            figure.legend(named.values(), named, loc="outside lower center", ncols=columns)
        with atomic_write(path) as temporary:
            figure.savefig(temporary, dpi=130)


def comparison_plots(comparison: Comparison) -> list[Plot]:
    """A plot per collection: nDCG@10 of judged queries against time, a colour per kind of run."""
    kinds = list(dict.fromkeys(map(kind_of, comparison.curves)))
    plots = []
    for name, level in comparison.bm25.items():
        lines = []
        for run, curve in comparison.curves.items():
            points = [(point.minutes, point.judged[name]) for point in curve]
            lines.append(Line(kind_of(run), points, kinds.index(kind_of(run))))
        plots.append(Plot(name, MINUTES, "nDCG@10", lines, level))
    return plots


def kind_of(label: str) -> str:
    """The name of a run of a comparison without its seed."""
    return label.rpartition(", seed ")[0] or label


def check_plots(runs: Mapping[str, Run]) -> list[Plot]:
    """A plot per task of the label-free check, with BM25 if all runs have the same."""
    kinds = kinds_of(runs)
    plots = []
    for task in dict.fromkeys(task for run in runs.values() for _, c in run.checks() for task in c):
        lines = []
        for run in runs.values():
            points = [(row.minutes, check[task]) for row, check in run.checks() if task in check]
            lines.append(Line(run.kind, points, kinds.index(run.kind)))
        levels = {run.about.bm25.get(task) for run in runs.values()}
        level = levels.pop() if len(levels) == 1 else None
        plots.append(Plot(task, MINUTES, "nDCG@10", lines, level))
    return plots


def loss_plots(runs: Mapping[str, Run]) -> list[Plot]:
    """A plot per objective, as losses of different objectives do not compare."""
    kinds = kinds_of(runs)
    lines: dict[str, list[Line]] = {}
    for run in runs.values():
        if points := smooth(run.losses()):
            line = Line(run.kind, points, kinds.index(run.kind))
            lines.setdefault(str(run.settings.get("objective", "")), []).append(line)
    return [Plot(f"Loss, objective {name}", MINUTES, "loss", some) for name, some in lines.items()]


def kinds_of(runs: Mapping[str, Run]) -> list[str]:
    """The kinds of the runs; a kind's place is the number of its series."""
    return list(dict.fromkeys(run.kind for run in runs.values()))


def smooth(points: Sequence[Point]) -> list[Point]:
    """The running mean over a tenth of the points."""
    width = max(1, len(points) // 10)
    return [
        (x, fmean(y for _, y in points[max(0, i - width + 1) : i + 1]))
        for i, (x, _) in enumerate(points)
    ]


def profile_plots(models: Mapping[str, Mapping[str, Profile]]) -> list[Plot]:
    """A plot per test of the models' profiles, a line per model with its 95 % intervals."""
    plots = []
    for test in dict.fromkeys(test for profiles in models.values() for test in profiles):
        lines = []
        for series, (name, profiles) in enumerate(models.items()):
            if found := profiles.get(test):
                values = [place.value for place in found.places]
                band = [(place.low, place.high) for place in found.places]
                points = list(zip(found.tenths, values, strict=True))
                lines.append(Line(name, points, series, band=band))
        plots.append(Plot(test, "place, tenths of the text", UNITS.get(test, "cosine"), lines))
    return plots
