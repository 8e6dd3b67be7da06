"""Plots of a report, as SVG that takes its colours from the page around it: one drawing for light
and for dark.

matplotlib draws with colours that stand for names; in its SVG they become CSS variables,
``--series-0`` and so on, and ``currentColor``. No text of a user gets into a drawing: names stand
in the page, which escapes them.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

COLOURS = 8  # series of colours of their own; later ones have dashes
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)))
INK, LEVEL = "#010203", "#010204"  # these stand for the page's own colours


@dataclass(frozen=True)
class Line:
    """A curve: points, the number of its series (colour and dashes), whether it is drawn faint, and
    the interval about each point.
    """

    points: Sequence[tuple[float, float]]
    series: int
    faint: bool = False
    band: Sequence[tuple[float, float]] = ()


def series_colour(series: int) -> str:
    """What stands for a series' colour in a drawing."""
    return f"#0102{0x10 + series % COLOURS:02x}"


def draw(
    lines: Sequence[Line],
    x_label: str,
    y_label: str,
    level: float | None = None,
    from_zero: bool = False,
) -> str:
    """A plot as an SVG element.

    Args:
        lines: from behind to the front; empty ones are left out.
        x_label, y_label: of the axes; never a user's text.
        level: a dashed horizontal line, BM25's score.
        from_zero: the vertical axis begins at 0.
    """
    import matplotlib
    from matplotlib.figure import Figure

    inks = dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK
    )
    style: Any = {
        **inks,
        "svg.fonttype": "none",
        "svg.hashsalt": "revela",
        "font.size": 9,
        "axes.unicode_minus": False,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(4.4, 2.9), layout="constrained")
        axis = figure.subplots()
        for line in lines:
            if line.points:
                marker = "o" if len(line.points) <= 12 and not line.faint else ""
                dashes = DASHES[line.series // COLOURS % len(DASHES)]
                width, alpha = (0.8, 0.35) if line.faint else (1.6, 1.0)
                x, y = zip(*line.points, strict=True)
                axis.plot(
                    x,
                    y,
                    color=series_colour(line.series),
                    marker=marker,
                    markersize=3.5,
                    linestyle=dashes,
                    linewidth=width,
                    alpha=alpha,
                )
                if line.band:
                    low, high = zip(*line.band, strict=True)
                    axis.fill_between(
                        x, low, high, color=series_colour(line.series), alpha=0.18, linewidth=0
                    )
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
        figure.savefig(
            drawing,
            format="svg",
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    return _themed(drawing.getvalue(), f"{y_label} against {x_label}")


def smooth(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The mean of each tenth of the points up to each; of fewer than ten points there is none."""
    if len(points) < 10:
        return []
    width = max(3, len(points) // 10)
    return [
        (x, fmean(y for _, y in points[max(0, i - width + 1) : i + 1]))
        for i, (x, _) in enumerate(points)
    ]


def _themed(svg: str, says: str) -> str:
    """matplotlib's file as an element of a page: no prologue, no fixed size, named colours, ids
    only where something points to them.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'^<svg([^>]*?) width="[^"]*" height="[^"]*"', "<svg", svg)
    svg = re.sub(r"^<svg", rf'<svg role="img" aria-label="{says}"', svg)
    svg = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", svg)
    svg = re.sub(r"font-family: [^;]*;", "", svg)
    svg = svg.replace(INK, "currentColor").replace(LEVEL, "var(--level)")
    return re.sub(r"#0102(1[0-7])", lambda found: f"var(--series-{int(found[1], 16) - 0x10})", svg)
