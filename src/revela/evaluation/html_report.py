"""One HTML page about runs: corpora, curves, scores, probes, settings, and how to repeat them.

The page is self-contained: styles, drawings and pictures are inline, nothing is fetched, no script
runs. The template (report.html) escapes all text of a corpus, a file name or a model.

matplotlib draws with placeholder colours; in its SVG they become ``currentColor`` and CSS variables
(``--series-0`` and so on), so that one drawing serves light and dark. Drawings hold no text of a
user: names are in the page, which escapes them.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from revela.errors import RevelaError, extra
from revela.evaluation import report_tables as tables
from revela.evaluation.report_tables import Runs, kind_of
from revela.evaluation.results import (
    Comparison,
    CurvePoint,
    ProbeResult,
    Results,
    Run,
    read_results,
)
from revela.files import atomic_write

Points = list[tuple[float, float]]
Plot = tuple[str, str]
"""A caption, and a drawing as an SVG element."""
Legend = list[tuple[str, int]]
"""Names, each with the number of its colour."""

IN_TITLE = 4  # names in the page's title
COLOURS = 8  # series with their own colours; later ones have dashes
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)))
INK, LEVEL = "#010203", "#010204"  # placeholders of the page's own colours
SVG_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
STYLE: Any = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
    "svg.fonttype": "none",
    "svg.hashsalt": "revela",
    "font.size": 9,
    "axes.unicode_minus": False,
}


def report(paths: Sequence[Path], out: Path) -> Results:
    """Write the page about ``paths`` (see ``read_results``) to ``out``, atomically.

    Raises:
        RevelaError: a path has no results, a file is damaged, or ``out`` is a folder.
    """
    if out.is_dir():
        raise RevelaError(
            f"{out} is a folder: give the page a file name, such as --out {out / 'report.html'}"
        )
    results = read_results(paths)
    page = render(results, [path.resolve().name for path in paths])
    with atomic_write(out) as temporary:
        # A file name that is no UTF-8 is shown with a ? in place of each such byte.
        temporary.write_bytes(page.encode("utf-8", errors="replace"))
    return results


def render(results: Results, names: Sequence[str]) -> str:
    """The page.

    Args:
        results: what it is about.
        names: of the paths that were given, for the title.
    """
    with extra("report", "the report page"):
        from jinja2 import Environment, FileSystemLoader, StrictUndefined

    runs = results.runs
    kinds = list(dict.fromkeys(run.kind for run in runs.values()))
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    more = f" and {len(names) - IN_TITLE} more" if len(names) > IN_TITLE else ""
    changed, others = tables.settings(runs)
    return environment.get_template("report.html").render(
        title=", ".join(names[:IN_TITLE]) + more,
        runs=runs,
        legend=_legend(kinds),
        facts=tables.facts(runs),
        label_free=tables.label_free(runs),
        checks=list(_check_figures(runs, kinds)),
        training=list(_training_figures(runs, kinds)),
        comparisons=[
            (tables.compared(name, comparison), *_comparison_figures(comparison))
            for name, comparison in results.comparisons.items()
        ],
        judged=tables.judged(results.scores),
        worst=tables.worst(results.scores),
        probes=_legend(results.probes),
        places=_place_figures(results.probes),
        place_tables=tables.profiles(results.probes),
        geometry=tables.geometry(results.probes),
        changed=changed,
        others=others,
        environment=tables.environment(runs),
        commands=_commands(runs),
    )


def _legend(names: Sequence[str] | Mapping[str, Any]) -> Legend:
    return [(name, number % COLOURS) for number, name in enumerate(names)]


def _commands(runs: Runs) -> dict[str, str]:
    """Each command once, and the names of the runs that it made."""
    commands: dict[str, list[str]] = {}
    for name, run in runs.items():
        if run.about.command:
            commands.setdefault(run.about.command, []).append(name)
    return {command: ", ".join(names) for command, names in commands.items()}


def _training_figures(runs: Runs, kinds: Sequence[str]) -> Iterator[Plot]:
    """The loss, a plot per objective as losses of different objectives do not compare, and the
    seconds per step.
    """
    trained = [run for run in runs.values() if run.losses()]
    for objective in dict.fromkeys(str(run.settings.get("objective", "")) for run in trained):
        raw, smoothed = [], []
        for run in trained:
            if str(run.settings.get("objective", "")) == objective:
                points = [(row.minutes, loss) for row, loss in run.losses()]
                series, mean = kinds.index(run.kind), smooth(points)
                raw.append(Line(points, series, faint=bool(mean)))
                smoothed.append(Line(mean, series))
        drawing = draw([*raw, *smoothed], "minutes of training", "loss")
        yield f"Loss, objective {objective}", drawing
    if trained:
        lines = [Line(_seconds(run), kinds.index(run.kind)) for run in trained]
        yield "Seconds per step", draw(lines, "steps", "seconds", from_zero=True)


def _seconds(run: Run) -> Points:
    rows = [(0, 0.0), *((row.step, row.minutes) for row, _ in run.losses())]
    return [
        (b, 60 * (after - before) / (b - a)) for (a, before), (b, after) in pairwise(rows) if b > a
    ]


def _check_figures(runs: Runs, kinds: Sequence[str]) -> Iterator[Plot]:
    """A plot per task of the label-free check, with BM25 if all runs have the same."""
    for task in dict.fromkeys(task for run in runs.values() for _, c in run.checks() for task in c):
        lines = []
        for run in runs.values():
            points = [(row.minutes, check[task]) for row, check in run.checks() if task in check]
            lines.append(Line(points, kinds.index(run.kind)))
        levels = {run.about.bm25.get(task) for run in runs.values()}
        level = levels.pop() if len(levels) == 1 else None
        yield task, draw(lines, "minutes of training", "nDCG@10", level=level)


def _comparison_figures(comparison: Comparison) -> tuple[Legend, list[Plot]]:
    """A legend, and a plot per collection: nDCG@10 of judged queries against time, or against
    tokens where no time was recorded.
    """
    kinds = list(dict.fromkeys(map(kind_of, comparison.curves)))
    timed = any(point.minutes > 0 for curve in comparison.curves.values() for point in curve)
    label = "minutes of training" if timed else "tokens read"

    def at(point: CurvePoint) -> float:
        return point.minutes if timed else point.tokens_read

    figures = []
    for name, level in comparison.bm25.items():
        lines = [
            Line([(at(point), point.judged[name]) for point in curve], kinds.index(kind_of(run)))
            for run, curve in comparison.curves.items()
        ]
        figures.append((name, draw(lines, label, "nDCG@10", level=level)))
    return _legend(kinds), figures


def _place_figures(probes: Mapping[str, ProbeResult]) -> list[Plot]:
    """A plot per test of a probe, a line per probe with its 95 % intervals."""
    figures = []
    for test in dict.fromkeys(test for probe in probes.values() for test in probe.profiles):
        lines = []
        for series, probe in enumerate(probes.values()):
            if found := probe.profiles.get(test):
                values = [place.value for place in found.places]
                band = [(place.low, place.high) for place in found.places]
                points = list(zip(found.tenths, values, strict=True))
                lines.append(Line(points, series, band=band))
        figures.append((test, draw(lines, "place, tenths of the text", "score")))
    return figures


@dataclass(frozen=True)
class Line:
    """A curve: points, the number of its series (colour and dashes), whether it is drawn faintly,
    and the interval at each point.
    """

    points: Sequence[tuple[float, float]]
    series: int
    faint: bool = False
    band: Sequence[tuple[float, float]] = ()


def draw(
    lines: Sequence[Line],
    x_label: str,
    y_label: str,
    level: float | None = None,
    from_zero: bool = False,
) -> str:
    """A plot as an SVG element.

    Args:
        lines: from back to front; empty ones are skipped.
        x_label, y_label: of the axes; never a user's text.
        level: a dashed horizontal line, the score of BM25.
        from_zero: start the vertical axis at 0.
    """
    with extra("report", "the report page"):
        import matplotlib
        from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.4, 2.9), layout="constrained")
        axis = figure.subplots()
        for line in lines:
            if line.points:
                _draw_line(axis, line)
        if level is not None:
            axis.axhline(level, color=LEVEL, linestyle=(0, (5, 3)), linewidth=1.2)
        axis.set(xlabel=x_label, ylabel=y_label)
        if from_zero:
            axis.set_ylim(bottom=0)
        axis.grid(color=INK, alpha=0.12, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        figure.patch.set_alpha(0.0)
        axis.patch.set_alpha(0.0)
        drawing = io.StringIO()
        figure.savefig(drawing, format="svg", metadata=SVG_METADATA)
    return _themed(drawing.getvalue(), f"{y_label} against {x_label}")


def _draw_line(axis: Any, line: Line) -> None:
    style: dict[str, Any] = {
        "color": f"#0102{0x10 + line.series % COLOURS:02x}",  # a placeholder
        "linestyle": DASHES[line.series // COLOURS % len(DASHES)],
        "marker": "o" if len(line.points) <= 12 and not line.faint else "",
        "linewidth": 0.8 if line.faint else 1.6,
        "alpha": 0.35 if line.faint else 1.0,
    }
    x, y = zip(*line.points, strict=True)
    axis.plot(x, y, markersize=3.5, **style)
    if line.band:
        low, high = zip(*line.band, strict=True)
        axis.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)


def smooth(points: Sequence[tuple[float, float]]) -> Points:
    """The running mean over a tenth of the points; empty for fewer than ten points."""
    if len(points) < 10:
        return []
    width = max(3, len(points) // 10)
    return [
        (x, fmean(y for _, y in points[max(0, i - width + 1) : i + 1]))
        for i, (x, _) in enumerate(points)
    ]


def _themed(svg: str, label: str) -> str:
    """matplotlib's file as an element of a page: without prologue and size, with the page's
    colours, and with ids only where something refers to them.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'^<svg([^>]*?) width="[^"]*" height="[^"]*"', "<svg", svg)
    svg = re.sub(r"^<svg", rf'<svg role="img" aria-label="{label}"', svg)
    svg = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", svg)
    svg = re.sub(r"font-family: [^;]*;", "", svg)
    svg = svg.replace(INK, "currentColor").replace(LEVEL, "var(--level)")
    return re.sub(r"#0102(1[0-7])", lambda found: f"var(--series-{int(found[1], 16) - 0x10})", svg)
