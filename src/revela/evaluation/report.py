"""One HTML page about runs: corpora, curves, scores, probes, settings and commands.

Styles and plots are inline; the page loads nothing and runs no script. The template (report.html)
escapes all text, such as names of corpora, files and models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from revela.errors import RevelaError, extra
from revela.evaluation.metrics import MAIN, METRICS
from revela.evaluation.plots import (
    Plot,
    check_plots,
    check_tasks,
    colour,
    comparison_plots,
    kind_of,
    kinds_of,
    loss_plots,
    probe_tests,
    profile_plots,
)
from revela.evaluation.results import (
    NOISE,
    Comparison,
    CurvePoint,
    Interval,
    ProbeResult,
    Results,
    Run,
    Scores,
    SystemScores,
    read_results,
)
from revela.files import atomic_write
from revela.settings import Recipe
from revela.silence import duration

SHOWN = ("nDCG@10", "recall@100", "MRR@10", "MAP", "main score")
METRIC_NAMES = dict(zip((*METRICS, MAIN), SHOWN, strict=True))
SUMMARIES = {
    "slope": "slope per tenth",
    "drop": "first place minus the last",
    "first_wins": "share whose first place beats the last",
}
Runs = Mapping[str, Run]
Probes = Mapping[str, ProbeResult]


@dataclass(frozen=True)
class Cell:
    """A text, whether it is marked as the best of its row or column, and a note in small type."""

    text: str
    best: bool = False
    note: str = ""


Row = tuple[str, list[Cell]]
"""A name, and a cell per column."""


@dataclass(frozen=True)
class Table:
    """A caption, column names (the first is that of the row names), and rows."""

    caption: str
    header: list[str]
    rows: list[Row]


def report(paths: Sequence[Path], out: Path) -> Results:
    """Write the page about ``paths`` (see ``read_results``) to ``out``."""
    if out.is_dir():
        raise RevelaError(
            f"{out} is a folder: give the page a file name, such as --out {out / 'report.html'}"
        )
    results = read_results(paths)
    page = render(results, [path.resolve().name for path in paths])
    with atomic_write(out) as temporary:
        # A file name that is not UTF-8 is shown with "?".
        temporary.write_bytes(page.encode("utf-8", errors="replace"))
    return results


def render(results: Results, names: Sequence[str]) -> str:
    """The HTML page, with ``names`` in its title."""
    with extra("report", "the report page"):
        from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    runs, probes = results.runs, results.probes
    return environment.get_template("report.html").render(
        title=", ".join(names),
        runs=runs,
        happened={name: run.in_words() for name, run in runs.items()},
        legend=_legend(kinds_of(runs)),
        facts=facts_table(runs),
        label_free=check_tables(runs),
        checks=_figures(check_plots(runs)),
        training=_figures(loss_plots(runs)),
        comparisons=[
            (
                comparison_table(name, comparison),
                _legend(list(dict.fromkeys(map(kind_of, comparison.curves)))),
                _figures(comparison_plots(comparison)),
            )
            for name, comparison in results.comparisons.items()
        ],
        judged=judged_tables(results.scores),
        probes=_legend(list(probes)),
        places=_figures(profile_plots(probes)),
        place_tables=profile_tables(probes),
        geometry=geometry_table(probes),
        changed=settings_table(runs),
        commands=dict.fromkeys(run.about.command for run in runs.values() if run.about.command),
    )


def _legend(names: Sequence[str]) -> list[tuple[str, str]]:
    return [(name, colour(series)) for series, name in enumerate(names)]


def _figures(plots: Iterable[Plot]) -> list[tuple[str, str]]:
    """Captions and SVG elements."""
    return [(plot.title, plot.svg()) for plot in plots]


def check_tables(runs: Runs) -> list[Table]:
    """A table per task, with a column per run; the best score of each column is marked."""
    systems: dict[str, Callable[[Run], Mapping[str, float]]] = {
        "BM25": lambda run: run.about.bm25,
        "untrained": lambda run: run.about.untrained,
        "before the first step": lambda run: next((c for r, c in run.checks() if r.step == 0), {}),
        "saved": Run.saved,
    }
    tables = []
    for task in check_tasks(runs):
        columns = [
            _marked([scores(run).get(task) for scores in systems.values()], NOISE)
            for run in runs.values()
        ]
        tables.append(Table(task, ["nDCG@10", *runs], _rows(systems, columns)))
    return tables


def comparison_table(name: str, comparison: Comparison) -> Table:
    """Final nDCG@10 by collection: BM25, and each kind of run (mean over seeds), with its start."""
    kinds: dict[str, list[list[CurvePoint]]] = {}
    for label, curve in comparison.curves.items():
        if curve:
            kinds.setdefault(kind_of(label), []).append(curve)
    rows = []
    for row, collections in _with_mean(comparison.bm25).items():

        def score(scores: Mapping[str, float], names: Sequence[str] = collections) -> float:
            return fmean(scores[name] for name in names)

        starts = [[score(curve[0].judged) for curve in curves] for curves in kinds.values()]
        ends = [[score(curve[-1].judged) for curve in curves] for curves in kinds.values()]
        cells = _marked([score(comparison.bm25), *map(fmean, ends)])
        rows.append((row, _noted(cells, ["", *map(_from_to, starts, ends)])))
    return Table(name, ["nDCG@10", "BM25", *kinds], rows)


def judged_tables(files: Mapping[str, Scores]) -> list[Table]:
    """A table of nDCG@10 by collection and system; then one per collection with all metrics."""
    merged = merge(files)
    tables = [_collection_table(name, systems) for name, systems in merged.items()]
    if len(merged) > 1:
        names = list(dict.fromkeys(system for systems in merged.values() for system in systems))
        rows = []
        for row, collections in _with_mean(merged).items():
            means = [_mean_score([merged[c].get(name) for c in collections]) for name in names]
            rows.append((row, _marked(means)))
        tables.insert(0, Table("all collections", ["nDCG@10", *names], rows))
    return tables


def _mean_score(scores: Sequence[SystemScores | None]) -> float | None:
    """Mean nDCG@10 of a system; None if a collection has no score."""
    values = [each.means["ndcg@10"] for each in scores if each and "ndcg@10" in each.means]
    return fmean(values) if len(values) == len(scores) else None


def _collection_table(name: str, systems: Mapping[str, SystemScores]) -> Table:
    each = list(systems.values())
    metrics = [m for m in METRICS if any(m in scores.means for scores in each)] or [MAIN]
    columns = [_marked([scores.means.get(metric) for scores in each]) for metric in metrics]
    if metrics[0] == "ndcg@10":
        margins = ["" if s.margin is None else f"± {s.margin:.3f}" for s in each]
        columns[0] = _noted(columns[0], margins)
    references = list(dict.fromkeys(name for scores in each for name in scores.p))
    columns += [[Cell(_p(scores.p.get(name))) for scores in each] for name in references]
    names = [METRIC_NAMES[metric] for metric in metrics]
    header = ["system", *names, *(f"p against {name}" for name in references)]
    return Table(name, header, _rows(systems, columns))


def merge(files: Mapping[str, Scores]) -> Scores:
    """Merge several files of scores. A system with different scores in a later file is listed
    again, with that file's name.
    """
    merged: Scores = {}
    for source, collections in files.items():
        for collection, systems in collections.items():
            existing = merged.setdefault(collection, {})
            for system, scores in systems.items():
                same = existing.get(system, scores).means == scores.means
                existing[system if same else f"{system} ({source})"] = scores
    return merged


def profile_tables(probes: Probes) -> list[Table]:
    """A table per test: slope, drop and share with their intervals, with a column per probe."""
    tables = []
    for test in probe_tests(probes):
        profiles = [probe.profiles.get(test) for probe in probes.values()]
        rows = [
            (label, [_interval(getattr(p, name) if p else None) for p in profiles])
            for name, label in SUMMARIES.items()
        ]
        tables.append(Table(test, ["with 95 % intervals", *probes], rows))
    return tables


def geometry_table(probes: Probes) -> Table:
    """Alignment, uniformity, anisotropy and effective rank by retriever."""
    measures = {n: dataclasses.asdict(p.geometry) for n, p in probes.items() if p.geometry}
    rows = [
        (name.replace("_", " "), [Cell(_number(each[name])) for each in measures.values()])
        for name in next(iter(measures.values()), {})
    ]
    return Table("Geometry of the vectors", ["", *measures], rows)


def facts_table(runs: Runs) -> Table:
    """Data, progress and machine of each run."""
    facts: dict[str, Callable[[Run], str]] = {
        "corpus": lambda run: run.about.corpus,
        "documents": lambda run: _number(run.about.documents),
        "chunks": lambda run: _number(run.about.chunks),
        "groups": lambda run: _number(run.about.groups),
        "objective": lambda run: _text(run.settings.get("objective")),
        "retriever starts from": lambda run: run.about.models.get("model", {}).get("name", ""),
        "language model": lambda run: run.about.models.get("lm", {}).get("name", ""),
        "steps": lambda run: _number(max((row.step for row in run.metrics), default=None)),
        "saved step": lambda run: _number(run.metrics[-1].kept if run.metrics else None),
        "training took": lambda run: duration(run.metrics[-1].minutes) if run.metrics else "",
        "tokens read": lambda run: _number(
            max((row.tokens_read for row in run.metrics if row.tokens_read), default=None)
        ),
        "state": lambda run: "saved" if run.finished else "not finished",
    }
    texts = {name: [fact(run) for run in runs.values()] for name, fact in facts.items()}
    recorded = [run.about.hardware | run.about.versions for run in runs.values()]
    for name in dict.fromkeys(name for each in recorded for name in each):
        texts[name] = [_text(each.get(name)) for each in recorded]
    rows = [(name, [Cell(text) for text in row]) for name, row in texts.items() if any(row)]
    return Table("", ["", *runs], rows)


def settings_table(runs: Runs) -> Table:
    """Settings that differ from their defaults in any run."""
    defaults = Recipe.of().to_dict()
    given = [run.settings for run in runs.values()]
    rows = []
    for name in dict.fromkeys([*defaults, *(name for each in given for name in each)]):
        default = defaults.get(name)
        values = [each.get(name) for each in given]  # None: its objective has no such setting
        if any(value not in (None, default) for value in values):
            rows.append((name, [Cell(_text(value)) for value in (default, *values)]))
    return Table("Settings that differ from their defaults", ["setting", "default", *runs], rows)


def _rows(names: Iterable[str], columns: Sequence[Sequence[Cell]]) -> list[Row]:
    """Columns of cells as named rows."""
    return list(zip(names, map(list, zip(*columns, strict=True)), strict=True))


def _noted(cells: Iterable[Cell], notes: Iterable[str]) -> list[Cell]:
    return [dataclasses.replace(cell, note=note) for cell, note in zip(cells, notes, strict=True)]


def _with_mean(names: Iterable[str]) -> dict[str, list[str]]:
    """Row -> names that it averages: a row per name, and one for the mean of several."""
    rows = {name: [name] for name in names}
    return rows | ({"mean": list(rows)} if len(rows) > 1 else {})


def _from_to(starts: Sequence[float], ends: Sequence[float]) -> str:
    """The mean start; with several seeds also the range of final scores."""
    seeds = f", seeds {min(ends):.3f} to {max(ends):.3f}" if len(ends) > 1 else ""
    return f"from {fmean(starts):.3f}{seeds}"


def _marked(values: Iterable[float | None], tie: float = 0.0) -> list[Cell]:
    """Values with three digits; the highest is marked, unless another is within ``tie`` of it."""
    texts = ["" if value is None else f"{value:.3f}" for value in values]
    known = sorted(float(text) for text in texts if text and text != "nan")
    wins = len(known) > 1 and known[-1] - known[-2] > tie + 1e-9
    best = f"{known[-1]:.3f}" if wins else None
    return [Cell(text, best=text == best) for text in texts]


def _p(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if value >= 0.001 else "< 0.001"


def _interval(it: Interval | None) -> Cell:
    return (
        Cell("") if it is None else Cell(f"{it.value:.4f}", note=f"{it.low:.4f} to {it.high:.4f}")
    )


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"


def _text(value: Any) -> str:
    """A value as in a recipe file."""
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)
