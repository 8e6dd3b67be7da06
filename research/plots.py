"""The plots of research/, from plain data: lines, a map of two settings, a scatter, and a score by
position. Each is a PNG of 1,000 pixels, with a CSV of the same data next to it.

Values as published are hollow markers. A series has the same colour in every panel of a figure.
"""

from __future__ import annotations

import csv
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from revela.errors import RevelaError, extra
from revela.files import atomic_write
from revela.quiet_libraries import silence_warnings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Shape = Literal["lines", "map", "scatter", "positions"]
SHAPES: tuple[Shape, ...] = ("lines", "map", "scatter", "positions")
HERE, PUBLISHED, LEVEL = "here", "published", "level"
COLUMNS = ("panel", "series", "x", "y", "value", "low", "high", "source", "note")
WIDTH, PANEL_HEIGHT, DPI = 10.0, 3.4, 100  # inches
WRAP = 118  # characters of a note per line
COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#5f5f5f"),
    *("#7b3fb5", "#a3a300"),
)  # of Okabe and Ito, which colour-blind readers can tell apart, and some more
DASHES = ("-", "--", "-.", ":")


@dataclass(frozen=True)
class Mark:
    """A value of a plot.

    Attributes:
        series: of a map, nothing.
        x: a number; or a setting, which is placed at equal distances in the order of the marks.
        y: the value; of a map, the second setting.
        value: of a map: its colour.
        low, high: bounds of the 95 % interval of the value.
        published: whether it is the paper's.
        note: text next to a mark of a scatter.
    """

    series: str
    x: float | str
    y: float | str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    published: bool = False
    note: str = ""


@dataclass(frozen=True)
class Panel:
    """One plot of a figure.

    Attributes:
        levels, verticals: name -> a value that is drawn as a horizontal (vertical) line.
        value_label: of a map: what its colours are.
        diagonal: draw the line of equal values of a scatter.
        markers: draw each value; False for the curve of a run.
    """

    title: str
    x_label: str
    y_label: str
    marks: Sequence[Mark]
    shape: Shape = "lines"
    levels: Mapping[str, float] = field(default_factory=dict)
    verticals: Mapping[str, float] = field(default_factory=dict)
    value_label: str = ""
    diagonal: bool = False
    markers: bool = True


def write_figure(panels: Sequence[Panel], out: Path, title: str = "", note: str = "") -> Path:
    """Write ``out``, a PNG, and a CSV of the same name; gives the CSV's path.

    Args:
        note: sentences below the plots.

    Raises:
        RevelaError: matplotlib is missing, or there is nothing to draw.
    """
    if not any(panel.marks for panel in panels):
        raise RevelaError(f"{out} would be empty: no value is known yet")
    figure = draw(panels, title, note)
    table = out.with_suffix(".csv")
    out.parent.mkdir(parents=True, exist_ok=True)
    with _quiet_matplotlib(), atomic_write(out) as temporary:
        figure.savefig(temporary, format="png", dpi=DPI)
    with atomic_write(table) as temporary, temporary.open("w", newline="") as handle:
        writer = csv.writer(handle, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in (row for panel in panels for row in _rows(panel)):
            writer.writerow(round(v, 6) if isinstance(v, float) else v for v in row)
    return table


def draw(panels: Sequence[Panel], title: str = "", note: str = "") -> Figure:
    """The figure of some panels: at most two in a row, or three if there are more than four."""
    with _quiet_matplotlib():
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        panels = [panel for panel in panels if panel.marks]
        columns = min(len(panels), 3 if len(panels) > 4 else 2)
        rows = -(-len(panels) // columns)
        text = "\n".join(textwrap.fill(line, WRAP) for line in note.splitlines())
        size = WIDTH, PANEL_HEIGHT * rows + 0.2 * text.count("\n") + 1.4
        with rc_context({"font.size": 11, "text.parse_math": False, "axes.titlesize": 12}):
            figure = Figure(size, layout="constrained")
            grid = figure.subplots(rows, columns, squeeze=False)
            look = _look(panels)
            for axes, panel in zip(grid.flat, panels, strict=False):
                _DRAWN[panel.shape](axes, panel, look)
                axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
            for axes in [*grid.flat][len(panels) :]:
                axes.remove()
            _add_legend(figure, title)
            if text:
                figure.supxlabel(text, fontsize=10, ha="left", x=0.01)
            figure.draw_without_rendering()  # what matplotlib says of fonts, it says now
        return figure


def _lines(axes: Axes, panel: Panel, look: Look) -> None:
    """A line for each series; settings stand at equal distances."""
    ticks = _ordinals(mark.x for mark in panel.marks)
    for (series, published), marks in _by_series(panel.marks).items():
        at = [ticks[mark.x] if ticks else mark.x for mark in marks]
        style = {**look.series[series], **(_HOLLOW if published else {"markersize": 6})}
        label = f"{series}, {PUBLISHED}" if published else series
        if not panel.markers:
            style |= {"marker": ""}
        axes.errorbar(at, [m.y for m in marks], _errors(marks), label=label, capsize=3, **style)
    if ticks:
        axes.set_xticks([*ticks.values()], [*ticks])
        axes.set_xlim(-0.4, len(ticks) - 0.6)
    else:
        axes.locator_params(axis="x", nbins=5)
    _add_levels(axes, panel, look)


def _by_position(axes: Axes, panel: Panel, look: Look) -> None:
    """A line for each series with its interval as a band, over the places of a text."""
    for (series, published), marks in _by_series(panel.marks).items():
        style = {**look.series[series], **(_HOLLOW if published else {"markersize": 5})}
        label = f"{series}, {PUBLISHED}" if published else series
        at = [mark.x for mark in marks]
        axes.plot(at, [mark.y for mark in marks], label=label, **style)
        if all(mark.low is not None for mark in marks):
            low, high = [m.low for m in marks], [m.high for m in marks]
            axes.fill_between(at, low, high, color=style["color"], alpha=0.15, linewidth=0)
    places = sorted({mark.x for mark in panel.marks})
    axes.set_xticks(places if len(places) <= 12 else places[::5])
    _add_levels(axes, panel, look)


def _scatter(axes: Axes, panel: Panel, look: Look) -> None:
    """A marker for each value, with its note next to it."""
    for (series, published), marks in _by_series(panel.marks).items():
        label = f"{series}, {PUBLISHED}" if published else series
        style = {**look.series[series], **(_HOLLOW if published else {"markersize": 7})}
        style |= {"linestyle": ""}
        axes.plot([m.x for m in marks], [m.y for m in marks], label=label, **style)
        for mark in marks:
            axes.annotate(mark.note, (mark.x, mark.y), (5, 4), textcoords="offset points", size=9)
    axes.margins(0.12)
    if panel.diagonal:
        numbers = [value for mark in panel.marks for value in (mark.x, mark.y)]
        ends = min(numbers), max(numbers)
        axes.plot(ends, ends, color="0.6", linewidth=1, linestyle="--", label="equal")
    _add_levels(axes, panel, look)


def _map(axes: Axes, panel: Panel, look: Look) -> None:
    """A cell for each pair of settings, coloured and labelled by its value; published values, if
    any, in brackets below ours.
    """
    columns = _ordinals((mark.x for mark in panel.marks), always=True)
    rows = _ordinals((mark.y for mark in panel.marks), always=True)
    cells = [[float("nan")] * len(columns) for _ in rows]
    texts = dict[tuple[int, int], str]()
    for mark in sorted(panel.marks, key=lambda mark: mark.published):
        if mark.value is None:
            continue
        row, column = rows[mark.y], columns[mark.x]
        if not mark.published:
            cells[row][column] = mark.value
        texts[row, column] = texts.get((row, column), "") + (
            f"\n({mark.value:.3f})" if mark.published else f"{mark.value:.3f}"
        )
    low, high = look.limits
    image = axes.imshow(cells, aspect="auto", origin="lower", cmap="viridis", vmin=low, vmax=high)
    for (row, column), text in texts.items():
        value = cells[row][column]
        colour = "black" if value != value or value > (low + high) / 2 else "white"
        axes.text(column, row, text.strip(), ha="center", va="center", color=colour, fontsize=9)
    axes.set_xticks([*columns.values()], [*columns], rotation=30 if len(columns) > 5 else 0)
    axes.set_yticks([*rows.values()], [*rows])
    axes.figure.colorbar(image, ax=axes, label=panel.value_label)


_DRAWN = {"lines": _lines, "map": _map, "scatter": _scatter, "positions": _by_position}
_HOLLOW = {"markerfacecolor": "none", "linestyle": ":", "markersize": 9, "markeredgewidth": 1.6}


def _add_levels(axes: Axes, panel: Panel, look: Look) -> None:
    """The horizontal and vertical lines; a line "SERIES: ..." has the colour of that series."""
    for lines, draw_line in ((panel.levels, axes.axhline), (panel.verticals, axes.axvline)):
        for number, (name, value) in enumerate(lines.items()):
            colour = look.series.get(name.partition(": ")[0], {"color": "0.35"})["color"]
            dash = DASHES[1 + number % 3]
            draw_line(value, color=colour, linestyle=dash, linewidth=1.3, label=name)


def _add_legend(figure: Figure, title: str) -> None:
    """The title, and one legend for all panels, above them."""
    entries = dict[str, Any]()
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if not entries:
        figure.suptitle(title, fontsize=13)
        return
    # With the title in the legend, as matplotlib places them on top of each other.
    columns = max(1, min(len(entries), 110 // (max(map(len, entries)) + 8)))
    figure.legend(
        *(entries.values(), entries),
        **{"loc": "outside upper center", "ncols": columns, "fontsize": 10, "frameon": False},
        **{"title": title or None, "title_fontsize": 13},
    )


@dataclass(frozen=True)
class Look:
    """What all panels of a figure share.

    Attributes:
        series: its name -> colour, line and marker.
        limits: of the colours of maps.
    """

    series: Mapping[str, Mapping[str, Any]]
    limits: tuple[float, float]


def _look(panels: Sequence[Panel]) -> Look:
    names = dict.fromkeys(mark.series for panel in panels for mark in panel.marks)
    series = {
        name: {
            "color": COLOURS[i % len(COLOURS)],
            "linestyle": DASHES[i // len(COLOURS) % len(DASHES)],
            "marker": "osD^v<>P"[i % 8],
            "linewidth": 1.6,
        }
        for i, name in enumerate(names)
    }
    values = [mark.value for panel in panels for mark in panel.marks if mark.value is not None]
    return Look(series, (min(values, default=0.0), max(values, default=1.0)))


def _by_series(marks: Sequence[Mark]) -> dict[tuple[str, bool], list[Mark]]:
    """(series, published) -> its marks."""
    found = dict[tuple[str, bool], list[Mark]]()
    for mark in marks:
        found.setdefault((mark.series, mark.published), []).append(mark)
    return found


def _ordinals(values: Any, always: bool = False) -> dict[Any, int]:
    """Setting -> its place; {} if all are numbers."""
    distinct = dict.fromkeys(values)
    if not always and all(isinstance(value, int | float) for value in distinct):
        return {}
    return {value: place for place, value in enumerate(distinct)}


def _errors(marks: Sequence[Mark]) -> list[list[float]] | None:
    """The two rows of matplotlib's error bars; None if no value has an interval."""
    if all(mark.low is None for mark in marks):
        return None
    low = [0.0 if m.low is None else max(0.0, float(m.y) - m.low) for m in marks]
    high = [0.0 if m.high is None else max(0.0, m.high - float(m.y)) for m in marks]
    return [low, high]


def _rows(panel: Panel) -> list[list[Any]]:
    """The rows of a panel in the CSV: its marks, then its horizontal and vertical lines."""
    has_y = panel.shape in ("map", "scatter")
    rows = list[list[Any]]()
    for m in panel.marks:
        y, value = (m.y, m.value) if has_y else (None, m.y)
        source = PUBLISHED if m.published else HERE
        rows.append([panel.title, m.series, m.x, y, value, m.low, m.high, source, m.note])
    rows += [[panel.title, n, None, None, v, None, None, LEVEL] for n, v in panel.levels.items()]
    rows += [[panel.title, n, v, None, None, None, None, LEVEL] for n, v in panel.verticals.items()]
    return rows


@contextmanager
def _quiet_matplotlib() -> Iterator[None]:
    """Import and use matplotlib without its messages: of the font cache, of letters that a font
    does not have, of its settings.
    """
    with silence_warnings():
        with extra("dev", "a plot"):
            import matplotlib.figure  # noqa: F401
        yield
