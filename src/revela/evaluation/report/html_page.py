"""One HTML page about runs: what was trained on, curves, scores, probes, and how to repeat it.

The page stands alone: styles, drawings and pictures are inside, nothing is fetched and no script
runs. The template (page.html) escapes whatever comes from a corpus, a file name or a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from revela.errors import RevelaError
from revela.evaluation.report import descriptions, probe_tables
from revela.evaluation.report import score_tables as tables
from revela.evaluation.report.curves import COLOURS, Line, draw, smooth
from revela.evaluation.report.runs import Comparison, Found, Run, find
from revela.files import atomic_write

Point = tuple[float, float]
IN_TITLE = 4


def report(paths: Sequence[Path], out: Path) -> Found:
    """Write the page about what lies at ``paths`` (``runs.find``) to ``out``, whole or not at all.

    Raises:
        RevelaError: a path holds nothing to report, a file is damaged, or ``out`` is a folder.
    """
    if out.is_dir():
        raise RevelaError(
            f"{out} is a folder: give the page a file name, such as --out {out / 'report.html'}"
        )
    found = find(paths)
    page = render(found, [path.resolve().name for path in paths])
    with atomic_write(out) as temporary:
        temporary.write_bytes(
            page.encode("utf-8", errors="replace")
        )  # half a surrogate pair can be no byte
    return found


def render(found: Found, names: Sequence[str]) -> str:
    """The page.

    Args:
        found: what it is about.
        names: of the things that were asked for, for the title.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    kinds = list(dict.fromkeys([run.kind for run in found.runs]))
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    changed, others = descriptions.settings(found.runs)
    return environment.get_template("page.html").render(
        title=", ".join(names[:IN_TITLE])
        + (f" and {len(names) - IN_TITLE} more" if len(names) > IN_TITLE else ""),
        runs=found.runs,
        legend=[(kind, number % COLOURS) for number, kind in enumerate(kinds)],
        facts=descriptions.facts(found.runs),
        label_free=tables.label_free(found.runs),
        checks=list(_check_figures(found.runs, kinds)),
        training=list(_training_figures(found.runs, kinds)),
        comparisons=[(tables.compared(c), *_comparison_figures(c)) for c in found.comparisons],
        judged=tables.judged(found.scores),
        worst=tables.worst(found.scores),
        probes=[(probe.name, number % COLOURS) for number, probe in enumerate(found.probes)],
        places=probe_tables.place_figures(found.probes),
        place_tables=probe_tables.place_tables(found.probes),
        geometry=probe_tables.geometry_table(found.probes),
        changed=changed,
        others=others,
        environment=descriptions.environment(found.runs),
        commands=_commands(found.runs),
    )


def _commands(runs: Sequence[Run]) -> dict[str, str]:
    """Each command once, and the names of the runs that it made."""
    commands: dict[str, list[str]] = {}
    for run in runs:
        if run.about.get("command"):
            commands.setdefault(str(run.about["command"]), []).append(run.name)
    return {command: ", ".join(names) for command, names in commands.items()}


def _training_figures(runs: Sequence[Run], kinds: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(caption, drawing): the loss, a plot an objective as their losses do not compare, and the
    seconds of an update.
    """
    for objective in dict.fromkeys(
        str(run.settings.get("objective", "")) for run in runs if run.losses()
    ):
        some = [run for run in runs if run.settings.get("objective", "") == objective]
        curves = [
            ([(r["minutes"], r["loss"]) for r in run.losses()], kinds.index(run.kind))
            for run in some
        ]
        lines = [Line(points, series, faint=bool(smooth(points))) for points, series in curves]
        lines += [Line(smooth(points), series) for points, series in curves]
        yield f"Loss, objective {objective}", draw(lines, "minutes of training", "loss")
    if any(run.losses() for run in runs):
        lines = [Line(_seconds(run), kinds.index(run.kind)) for run in runs]
        yield "Seconds an update", draw(lines, "updates", "seconds", from_zero=True)


def _seconds(run: Run) -> list[Point]:
    rows = [(0, 0.0), *((row["step"], row["minutes"]) for row in run.losses())]
    return [
        (b, 60 * (after - before) / (b - a)) for (a, before), (b, after) in pairwise(rows) if b > a
    ]


def _check_figures(runs: Sequence[Run], kinds: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(caption, drawing) of each task of the label-free check; BM25 where all runs had the same."""
    for task in dict.fromkeys(
        task for run in runs for row in run.checks() for task in row["check"]
    ):
        lines = [
            Line(
                [(r["minutes"], r["check"][task]) for r in run.checks() if task in r["check"]],
                kinds.index(run.kind),
            )
            for run in runs
        ]
        levels = {run.about.get("bm25", {}).get(task) for run in runs}
        yield (
            task,
            draw(
                lines,
                "minutes of training",
                "nDCG@10",
                level=levels.pop() if len(levels) == 1 else None,
            ),
        )


def _comparison_figures(
    comparison: Comparison,
) -> tuple[list[tuple[str, int]], list[tuple[str, str]]]:
    """A legend, and (caption, drawing) of each collection: nDCG@10 of judged queries against time,
    or tokens where time stood still.
    """
    kind = {label: label.rpartition(", seed ")[0] or label for label in comparison.curves}
    kinds = list(dict.fromkeys(kind.values()))
    timed = any(row["minutes"] > 0 for curve in comparison.curves.values() for row in curve)
    against, label = ("minutes", "minutes of training") if timed else ("tokens_read", "tokens read")
    figures = [
        (
            name,
            draw(
                [
                    Line([(r[against], r["judged"][name]) for r in c], kinds.index(kind[run]))
                    for run, c in comparison.curves.items()
                ],
                label,
                "nDCG@10",
                level=level,
            ),
        )
        for name, level in comparison.bm25.items()
    ]
    return [(name, number % COLOURS) for number, name in enumerate(kinds)], figures
