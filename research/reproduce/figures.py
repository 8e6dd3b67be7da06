"""Draw a figure of a paper: run its rows, read what it shows of them, and write a PNG and a CSV.

Published values are hollow markers. Where the paper has none, its direction is printed below.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from research.plots import Mark, Panel, write_figure
from research.reproduce.measures import Session
from research.reproduce.papers.figures import FIGURES, NOT_DRAWN
from research.reproduce.run import Options
from revela.errors import RevelaError

SMALL = "Made by --small: these numbers show that it runs, and nothing of the method."

__all__ = ["FIGURES", "NOT_DRAWN", "draw"]


def draw(name: str, options: Options) -> list[Path]:
    """Run what is not finished of a figure, and write it below ``options.out``; in a dry run,
    print the commands.

    Raises:
        RevelaError: there is no such figure, the options lack something, or a command fails.
    """
    if name not in FIGURES:
        known = "; ".join(f"{figure}: {why}" for figure, why in NOT_DRAWN.items())
        raise RevelaError(f"--figure {name} is unknown: --list prints all ({known})")
    figure, session = FIGURES[name], Session(options)
    panels = [session.panel(plot) for plot in figure.plots(options.small)]
    expected = f"Expected: {figure.expected}."
    if options.dry_run:
        print(expected)
        return []
    notes = [expected, *(correlations(panels) if figure.correlation else ()), *session.notes]
    text = "\n".join([*notes, SMALL] if options.small else notes)
    out = options.out / f"{name}.png"
    table = write_figure(panels, out, figure.shows, text)
    print(f"{figure.shows}\n{text}", flush=True)
    return [out, table]


def correlations(panels: Sequence[Panel]) -> list[str]:
    """Pearson's r of x and y in each series of three dots or more."""
    found = dict[str, list[Mark]]()
    for panel in panels:
        for mark in panel.marks:
            found.setdefault(mark.series, []).append(mark)
    named = {
        series: float(np.corrcoef([m.x for m in marks], [m.y for m in marks])[0, 1])
        for series, marks in found.items()
        if len(marks) > 2
    }
    return ["Pearson: " + ", ".join(f"{s} {r:+.2f}" for s, r in named.items())] if named else []
