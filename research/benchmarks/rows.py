"""Rows of results: print them, and plot the steps among them.

A row has ``what`` was done in which ``form``, with numbers under other names, or a ``note`` in
their place. Rows of steps on the CPU carry ``preset``, ``lm_layers`` and ``chunks``, which the plot
shows.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from research.benchmarks.forms import BOUND, LEAN, NAIVE, OURS, PLAIN

Row = dict[str, Any]

COLOURS = {OURS: "C0", BOUND: "0.45", PLAIN: "C2", NAIVE: "C3", LEAN: "C1"}
STYLES = {"gated": ("-", "o"), "paper": ("--", "s")}
MEASURES = {"seconds": "seconds per step", "peak_gb": "peak memory of a step, GB"}
SWEEPS = {"chunks": "chunks per group", "lm_layers": "layers of the LM"}


def ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """Median of the ratios of runs of the same turn."""
    return statistics.median(a / b for a, b in zip(times, others, strict=True))


def print_row(row: Row) -> None:
    numbers = (f"{k} {v:.3g}" for k, v in row.items() if isinstance(v, float))
    print(
        f"{row['what']:<48} {row['form']:<38} {', '.join(numbers)}{row.get('note', '')}", flush=True
    )


def plot(rows: Iterable[Row], path: Path) -> None:
    """Time and memory of a step: a row of axes against the chunks per group, and one against the
    LM's depth, as far as they vary.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [r for r in rows if r.get("seconds") is not None and "chunks" in r]
    if not rows:
        return
    sweeps = [x for x in SWEEPS if len({r[x] for r in rows}) > 1] or ["chunks"]
    measures = [m for m in MEASURES if any(r.get(m) is not None for r in rows)]
    shape, size = (len(sweeps), len(measures)), (max(9, 5 * len(measures)), 0.8 + 3.4 * len(sweeps))
    figure, axes = plt.subplots(*shape, figsize=size, squeeze=False, layout="constrained")
    lines: dict[tuple[str, str], Any] = {}
    for x, across in zip(sweeps, axes, strict=True):
        for measure, axis in zip(measures, across, strict=True):
            for key, line in _plot_sweep(axis, rows, x, measure).items():
                lines.setdefault(key, line)
    # In the legend: a column per form, a row per preset.
    keys = sorted(lines, key=lambda key: (list(COLOURS).index(key[0]), key[1]))
    names = [f"{preset}, {form}" for form, preset in keys]
    columns = len({form for form, _ in keys})
    style = dict(loc="outside lower center", frameon=False, fontsize=9, handlelength=3)
    figure.legend([lines[k] for k in keys], names, ncols=columns, **style)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _plot_sweep(axis: Any, rows: Sequence[Row], x: str, measure: str) -> dict[Any, Any]:
    """Draw one measure against ``x``; the lines by (form, preset)."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    lines, fixed = {}, {}
    for preset in sorted({r["preset"] for r in rows}):
        mine, fixed[preset] = _sweep([r for r in rows if r["preset"] == preset], x)
        mine = [r for r in mine if r.get(measure) is not None]
        for form in (f for f in COLOURS if any(r["form"] == f for r in mine)):
            points = zip(
                *sorted((r[x], r[measure]) for r in mine if r["form"] == form), strict=True
            )
            line, marker = STYLES.get(preset, (":", "^"))
            (lines[form, preset],) = axis.plot(*points, line, marker=marker, color=COLOURS[form])
    labels = dict(xlabel=SWEEPS[x], ylabel=MEASURES[measure], title=_title(x, fixed))
    axis.set(xscale="log", yscale="log", **labels)
    axis.set_xticks(sorted({r[x] for r in rows}))
    axis.minorticks_off()
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axis.grid(alpha=0.3)
    return lines


def _sweep(rows: Sequence[Row], x: str) -> tuple[list[Row], int]:
    """Rows of one preset along ``x``, at the value of the other quantity with the most points."""
    (other,) = (s for s in SWEEPS if s != x)

    def along(value: int) -> list[Row]:
        return [r for r in rows if r[other] == value]

    best = max(
        {r[other] for r in rows}, key=lambda v: (len({r[x] for r in along(v)}), len(along(v)), v)
    )
    return along(best), best


def _title(x: str, fixed: dict[str, int]) -> str:
    """The quantity that does not vary."""
    what = "an LM of {} layers" if x == "chunks" else "{} chunks per group"
    if len(set(fixed.values())) == 1:
        return what.format(next(iter(fixed.values())))
    return ", ".join(f"{preset}: {what.format(value)}" for preset, value in fixed.items())
