"""A plot of scores by place: a line a model with its 95 % intervals, a box a test."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from revela.evaluation.probe.profile import Profile
from revela.files import atomic_write

COLUMNS, WIDTH, HEIGHT = 2, 4.6, 3.2  # boxes in a row, and inches of a box
UNITS = {
    "next-token loss": "nats a token",
    "moved passage, MRR@100": "MRR@100",
}  # of the others, the cosine


def plot_profiles(models: Mapping[str, Mapping[str, Profile]], path: Path, title: str = "") -> None:
    """Draw the tests of some models; of several, what each place differs from the model's own mean,
    as their scores differ in scale.

    Args:
        models: profiles by test, by model.
        path: the PNG.
        title: a line above all.
    """
    from matplotlib.figure import Figure

    tests = list(dict.fromkeys(test for profiles in models.values() for test in profiles))
    columns, several = min(COLUMNS, len(tests)), len(models) > 1
    rows, legend = -(-len(tests) // columns), 0.25 * -(-len(models) // columns) if several else 0.0
    figure = Figure(figsize=(WIDTH * columns, HEIGHT * rows + legend), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for test, axis in zip(tests, axes, strict=False):
        for i, (name, profiles) in enumerate(models.items()):
            if test in profiles:
                _draw(axis, profiles[test], name, f"C{i}", several)
        unit = UNITS.get(test, "cosine")
        axis.set(
            title=test,
            xlabel="place, tenths of the text",
            ylabel=f"{unit}, less its mean" if several else unit,
            xlim=(-0.3, 10.3),
        )
        axis.set_xticks(range(0, 11, 2))
        axis.grid(alpha=0.3)
    for axis in axes[len(tests) :]:
        axis.set_visible(False)
    if title:
        figure.suptitle(title, fontsize=10, color="0.3")
    if several:
        lines = {line.get_label(): line for axis in axes for line in axis.get_lines()}
        figure.legend(
            lines.values(),
            lines,
            loc="outside lower center",
            ncols=columns,
            frameon=False,
            fontsize=9,
        )
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=130)


def _draw(axis: Any, profile: Profile, name: str, colour: str, centred: bool) -> None:
    middle = fmean(place.value for place in profile.places) if centred else 0.0
    value, low, high = (
        [getattr(place, name) - middle for place in profile.places]
        for name in ("value", "low", "high")
    )
    axis.plot(profile.tenths, value, marker="o", markersize=4, color=colour, label=name)
    axis.fill_between(profile.tenths, low, high, color=colour, alpha=0.2, linewidth=0)
