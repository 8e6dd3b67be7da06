"""Plot results as SVG elements. Titles and legends are in the page, so an SVG has no user text."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from revela.errors import extra
from revela.evaluation.results import Comparison, ProbeResult, Run

Point = tuple[float, float]

# Legible on white and on dark pages.
COLOURS = ("#2b83d6", "#d9660f", "#1f9d6b", "#c04fa3", "#a88412", "#1a9ba8", "#d8475c", "#7d70dd")
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)))  # the next one when all colours are used
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
LEAST_SPAN = 0.05  # minimum range of an axis of scores or losses
MINUTES = "minutes of training"
UNITS = {"moved passage, MRR@100": "MRR@100", "spans by place": "accuracy"}  # others: cosine


@dataclass(frozen=True)
class Line:
    """A curve. ``series`` selects colour and dashes; ``band`` has the interval at each point."""

    points: Sequence[Point]
    series: int = 0
    band: Sequence[Point] = ()


@dataclass(frozen=True)
class Plot:
    """Curves, from back to front, and BM25's score (``level``) as a dashed line."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
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
        label = f'role="img" aria-label="{self.y_label} against {self.x_label}"'
        return text[text.index("<svg") :].replace("<svg", f"<svg {label}", 1)

    def _draw(self, axis: Any) -> None:
        for line in self.lines:
            x, y = [point[0] for point in line.points], [point[1] for point in line.points]
            ink, dashes = colour(line.series), DASHES[line.series // len(COLOURS) % len(DASHES)]
            marker = "o" if len(x) <= 12 else ""
            axis.plot(x, y, color=ink, linestyle=dashes, linewidth=1.6, marker=marker, ms=3.5)
            if line.band:
                low, high = zip(*line.band, strict=True)
                axis.fill_between(x, low, high, color=ink, alpha=0.18, linewidth=0)
        if self.level is not None:
            axis.axhline(self.level, color=LEVEL, linestyle=(0, (5, 3)), linewidth=1.2)
        low, high = axis.get_ylim()
        if (missing := LEAST_SPAN - (high - low)) > 0:  # or chance would look like a trend
            axis.set_ylim(low - missing / 2, high + missing / 2)
        axis.set(xlabel=self.x_label, ylabel=self.y_label)
        axis.grid(color=INK, alpha=0.15, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.patch.set_alpha(0.0)


def colour(series: int) -> str:
    """The colour of a series, for CSS and matplotlib."""
    return COLOURS[series % len(COLOURS)]


def comparison_plots(comparison: Comparison) -> list[Plot]:
    """A plot per collection: nDCG@10 of judged queries over time, with a colour per kind of run."""
    kinds = list(dict.fromkeys(map(kind_of, comparison.curves)))
    plots = []
    for name, level in comparison.bm25.items():
        lines = [
            Line([(at.minutes, at.judged[name]) for at in curve], kinds.index(kind_of(run)))
            for run, curve in comparison.curves.items()
        ]
        plots.append(Plot(name, MINUTES, "nDCG@10", lines, level))
    return plots


def kind_of(label: str) -> str:
    """The name of a compared run without its seed."""
    return label.rpartition(", seed ")[0] or label


def check_plots(runs: Mapping[str, Run]) -> list[Plot]:
    """A plot per task of the label-free check, with BM25 if it is the same for all runs."""
    kinds = kinds_of(runs)
    plots = []
    for task in check_tasks(runs):
        lines = []
        for run in runs.values():
            points = [(row.minutes, check[task]) for row, check in run.checks() if task in check]
            lines.append(Line(points, kinds.index(run.kind)))
        levels = {run.about.bm25.get(task) for run in runs.values()}
        level = levels.pop() if len(levels) == 1 else None
        plots.append(Plot(task, MINUTES, "nDCG@10", lines, level))
    return plots


def loss_plots(runs: Mapping[str, Run]) -> list[Plot]:
    """A plot per objective, as losses of different objectives cannot be compared."""
    kinds = kinds_of(runs)
    lines: dict[str, list[Line]] = {}
    for run in runs.values():
        if losses := run.losses():
            line = Line(smooth(losses), kinds.index(run.kind))
            lines.setdefault(str(run.settings.get("objective", "")), []).append(line)
    return [Plot(f"Loss, objective {name}", MINUTES, "loss", own) for name, own in lines.items()]


def kinds_of(runs: Mapping[str, Run]) -> list[str]:
    """The kinds of runs, in the order of their series."""
    return list(dict.fromkeys(run.kind for run in runs.values()))


def check_tasks(runs: Mapping[str, Run]) -> list[str]:
    """The tasks of the label-free check in any run."""
    return list(
        dict.fromkeys(t for run in runs.values() for _, check in run.checks() for t in check)
    )


def probe_tests(probes: Mapping[str, ProbeResult]) -> list[str]:
    """The tests by place that any probe has."""
    return list(dict.fromkeys(test for probe in probes.values() for test in probe.profiles))


def smooth(points: Sequence[Point]) -> list[Point]:
    """The running mean over a tenth of the points."""
    width = max(1, len(points) // 10)
    return [
        (x, fmean(y for _, y in points[max(0, i - width + 1) : i + 1]))
        for i, (x, _) in enumerate(points)
    ]


def profile_plots(probes: Mapping[str, ProbeResult]) -> list[Plot]:
    """A plot per test, with a line and 95 % intervals per model."""
    plots = []
    for test in probe_tests(probes):
        lines = []
        for series, probe in enumerate(probes.values()):
            if profile := probe.profiles.get(test):
                values = [place.value for place in profile.places]
                band = [(place.low, place.high) for place in profile.places]
                lines.append(Line(list(zip(profile.tenths, values, strict=True)), series, band))
        plots.append(Plot(test, "place, tenths of the text", UNITS.get(test, "cosine"), lines))
    return plots
