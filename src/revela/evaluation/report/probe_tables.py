"""What ``revela probe`` found, for a report: scores by place as curves, their slopes and the
geometry as tables; a column a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from revela.evaluation.report.curves import Line, draw
from revela.evaluation.report.runs import Probe
from revela.evaluation.report.score_tables import Cell, Table

SUMMARIES = {
    "slope": "slope a tenth",
    "drop": "first place less the last",
    "first_wins": "share whose first place beats the last",
}


def place_figures(probes: Sequence[Probe]) -> list[tuple[str, str]]:
    """(caption, drawing) of each test, a line a probe with its 95 % interval."""
    return [
        (
            test,
            draw(
                [
                    Line(
                        list(
                            zip(
                                found["tenths"],
                                [place["value"] for place in found["places"]],
                                strict=True,
                            )
                        ),
                        series,
                        band=[(place["low"], place["high"]) for place in found["places"]],
                    )
                    for series, probe in enumerate(probes)
                    if (found := probe.profiles.get(test))
                ],
                "place, tenths of the text",
                "score",
            ),
        )
        for test in _tests(probes)
    ]


def place_tables(probes: Sequence[Probe]) -> list[Table]:
    """What sums up each test."""
    header = ["with 95 % intervals", *(probe.name for probe in probes)]
    return [
        Table(
            test,
            header,
            [
                (says, [_interval(probe.profiles.get(test, {}).get(key)) for probe in probes])
                for key, says in SUMMARIES.items()
            ],
        )
        for test in _tests(probes)
    ]


def geometry_table(probes: Sequence[Probe]) -> Table:
    """Alignment, uniformity and their like."""
    some = [probe for probe in probes if probe.geometry]
    names = dict.fromkeys(name for probe in some for name in probe.geometry)
    rows = [
        (name.replace("_", " "), [Cell(_short(probe.geometry.get(name))) for probe in some])
        for name in names
    ]
    return Table("Geometry of the vectors", ["", *(probe.name for probe in some)], rows)


def _tests(probes: Sequence[Probe]) -> list[str]:
    return list(dict.fromkeys(test for probe in probes for test in probe.profiles))


def _interval(found: dict[str, Any] | None) -> Cell:
    return (
        Cell(f"{found['value']:.4f}", note=f"{found['low']:.4f} to {found['high']:.4f}")
        if found
        else Cell("")
    )


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value.is_integer() else f"{value:.3f}"
