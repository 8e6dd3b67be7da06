"""The tables of a report: scores, label-free checks, probes, settings and environments."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from revela.evaluation.metrics import MAIN, METRICS
from revela.evaluation.results import (
    Comparison,
    CurvePoint,
    Interval,
    ProbeResult,
    Run,
    Scores,
    SystemScores,
)
from revela.settings import Recipe
from revela.silence import duration

METRIC_NAMES = {
    "ndcg@10": "nDCG@10",
    "recall@100": "recall@100",
    "mrr@10": "MRR@10",
    "map": "MAP",
    MAIN: "main score",
}
Runs = Mapping[str, Run]
Probes = Mapping[str, ProbeResult]


@dataclass(frozen=True)
class Cell:
    """A text, whether it is the best of those it is compared with, and a note in small type."""

    text: str
    best: bool = False
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A caption, the names of the columns (that of the row names first), and rows: a name, and a
    cell per column.
    """

    caption: str
    header: list[str]
    rows: list[tuple[str, list[Cell]]]


def label_free(runs: Runs) -> list[Table]:
    """A table per task: BM25, the untrained model, the state before the first step, the saved one;
    a column per run, its best marked.
    """
    tables = []
    for task in dict.fromkeys(task for run in runs.values() for _, c in run.checks() for task in c):
        systems = {
            "BM25": [run.about.bm25.get(task) for run in runs.values()],
            "untrained": [run.about.untrained.get(task) for run in runs.values()],
            "before the first step": [
                next((check.get(task) for row, check in run.checks() if row.step == 0), None)
                for run in runs.values()
            ],
            "saved": [run.saved().get(task) for run in runs.values()],
        }
        columns = [_marked(column) for column in zip(*systems.values(), strict=True)]
        tables.append(Table(task, ["nDCG@10", *runs], _rows(systems, columns)))
    return tables


def compared(name: str, comparison: Comparison) -> Table:
    """nDCG@10 of judged queries at the end, a row per collection: BM25, and each kind of run as the
    mean over its seeds, with where it began.
    """
    kinds: dict[str, list[list[CurvePoint]]] = {}
    for label, curve in comparison.curves.items():
        if curve:
            kinds.setdefault(kind_of(label), []).append(curve)

    def score(point: CurvePoint, collections: Sequence[str]) -> float:
        return fmean(point.judged[name] for name in collections)

    rows = []
    for row, collections in _with_mean(comparison.bm25).items():
        first = [[score(curve[0], collections) for curve in curves] for curves in kinds.values()]
        last = [[score(curve[-1], collections) for curve in curves] for curves in kinds.values()]
        bm25 = fmean(comparison.bm25[n] for n in collections)
        notes = ["", *map(_from_to, first, last)]
        cells = _marked([bm25, *map(fmean, last)])
        rows.append((row, _noted(cells, notes)))
    return Table(name, ["nDCG@10", "BM25", *kinds], rows)


def kind_of(label: str) -> str:
    """The name of a run of a comparison without its seed."""
    return label.rpartition(", seed ")[0] or label


def judged(scores: Mapping[str, Scores]) -> list[Table]:
    """Scores of ``eval``: nDCG@10 over all collections, a column per system; then for each
    collection all its metrics, a row per system.
    """
    merged = merge(scores)
    tables = [_collection_table(name, systems) for name, systems in merged.items()]
    if len(merged) > 1:
        names = list(dict.fromkeys(system for systems in merged.values() for system in systems))
        rows = []
        for row, collections in _with_mean(merged).items():
            means = []
            for system in names:
                found = [merged[c].get(system, SystemScores({})) for c in collections]
                values = [each.means["ndcg@10"] for each in found if "ndcg@10" in each.means]
                means.append(fmean(values) if len(values) == len(collections) else None)
            rows.append((row, _marked(means)))
        tables.insert(0, Table("all collections", ["nDCG@10", *names], rows))
    return tables


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


def worst(scores: Mapping[str, Scores], count: int = 10) -> list[Table]:
    """Of each file with scores per query: the queries on which the retrievers, by their mean
    nDCG@10, lose most to BM25; a column per system.
    """
    tables = []
    for source, file in scores.items():
        for collection, systems in file.collections.items():
            caption = f"{collection} ({source})" if len(scores) > 1 else collection
            rows = _lost_to_bm25({n: s for n, s in systems.items() if s.queries}, count)
            if rows:
                names = [name for name, values in systems.items() if values.queries]
                tables.append(Table(caption, ["nDCG@10 of a query", *names], rows))
    return tables


def _lost_to_bm25(systems: Mapping[str, SystemScores], count: int) -> list[tuple[str, list[Cell]]]:
    own = [name for name in systems if name != "BM25" and " + BM25" not in name]
    if "BM25" not in systems or not own:
        return []
    found: dict[str, dict[str, float]] = {}
    for query in systems["BM25"].queries:
        if all(query in values.queries for values in systems.values()):
            found[query] = {n: values.queries[query]["ndcg@10"] for n, values in systems.items()}
    lost = {q: at["BM25"] - fmean(at[name] for name in own) for q, at in found.items()}
    most = [q for q in sorted(lost, key=lambda q: -lost[q])[:count] if lost[q] > 0]
    texts = systems[own[0]].texts
    return [(texts.get(q, q), _marked(found[q].values())) for q in most]


def merge(scores: Mapping[str, Scores]) -> dict[str, dict[str, SystemScores]]:
    """Several files of scores as one: {collection: {system: scores}}.

    A system that has other scores in a later file is listed a second time, with that file's name.
    """
    merged: dict[str, dict[str, SystemScores]] = {}
    for source, file in scores.items():
        for collection, systems in file.collections.items():
            known = merged.setdefault(collection, {})
            for system, values in systems.items():
                other = known.get(system, values).means
                same = all(other.get(metric) == values.means.get(metric) for metric in METRICS)
                known[system if same else f"{system} ({source})"] = values
    return merged


SUMMARIES = {
    "slope": "slope per tenth",
    "drop": "first place minus the last",
    "first_wins": "share whose first place beats the last",
}


def profiles(probes: Probes) -> list[Table]:
    """A table per test: slope, drop and share with their intervals; a column per probe."""
    tests = dict.fromkeys(test for probe in probes.values() for test in probe.profiles)
    header = ["with 95 % intervals", *probes]
    tables = []
    for test in tests:
        found = [probe.profiles.get(test) for probe in probes.values()]
        rows = [
            (label, [_interval(getattr(p, name) if p else None) for p in found])
            for name, label in SUMMARIES.items()
        ]
        tables.append(Table(test, header, rows))
    return tables


def geometry(probes: Probes) -> Table:
    """Alignment, uniformity, anisotropy and effective rank; a column per retriever."""
    found = {n: dataclasses.asdict(p.geometry) for n, p in probes.items() if p.geometry}
    names = list(next(iter(found.values()), {}))
    rows = [
        (n.replace("_", " "), [Cell(_short(each[n])) for each in found.values()]) for n in names
    ]
    return Table("Geometry of the vectors", ["", *found], rows)


def facts(runs: Runs) -> Table:
    """What each run was made from and how far it went, a column per run."""
    each = list(runs.values())
    ends = [run.metrics[-1] if run.metrics else None for run in each]
    tokens = [[r.tokens_read for r in run.metrics if r.tokens_read is not None] for run in each]
    rows: dict[str, list[str]] = {
        "corpus": [run.about.corpus for run in each],
        "documents": [_count(run.about.documents) for run in each],
        "chunks": [_count(run.about.chunks) for run in each],
        "groups": [_count(run.about.groups) for run in each],
        "objective": [_text(run.settings.get("objective")) for run in each],
        "retriever starts from": [_text(run.settings.get("model")) for run in each],
        "language model": [_text(run.settings.get("lm")) for run in each],
        "steps": [_steps(run) for run in each],
        "training took": [duration(end.minutes) if end else "" for end in ends],
        "tokens read": [_count(max(read, default=None)) for read in tokens],
        "state": ["saved" if run.finished else "not finished" for run in each],
    }
    return _plain(runs, rows)


def settings(runs: Runs) -> tuple[Table, Table]:
    """The settings that a run changed, beside the default; and the others."""
    defaults = Recipe.of().flat()
    given = [run.settings for run in runs.values()]
    names = list(dict.fromkeys([*defaults, *(name for each in given for name in each)]))
    changed, others = [], []
    for name in names:
        default = defaults.get(name)
        if any(each.get(name, default) != default for each in given):
            values = [default, *(each.get(name) for each in given)]
            changed.append((name, [Cell(_text(value)) for value in values]))
        else:
            others.append((name, [Cell(_text(default))]))
    return (
        Table("Settings that differ from their defaults", ["setting", "default", *runs], changed),
        Table("All others", ["setting", "default"], others),
    )


def environment(runs: Runs) -> Table:
    """Hardware and versions of each run."""
    recorded = [run.about.hardware | run.about.versions for run in runs.values()]
    names = dict.fromkeys(name for each in recorded for name in each)
    return _plain(runs, {name: [_text(each.get(name)) for each in recorded] for name in names})


def _plain(runs: Runs, rows: Mapping[str, Sequence[str]]) -> Table:
    """A table of texts without empty rows."""
    filled = [(name, [Cell(text) for text in texts]) for name, texts in rows.items() if any(texts)]
    return Table("", ["", *runs], filled)


def _rows(names: Iterable[str], columns: Sequence[Sequence[Cell]]) -> list[tuple[str, list[Cell]]]:
    """Rows by name, of columns of cells."""
    return list(zip(names, map(list, zip(*columns, strict=True)), strict=True))


def _noted(cells: Iterable[Cell], notes: Iterable[str]) -> list[Cell]:
    return [dataclasses.replace(cell, note=note) for cell, note in zip(cells, notes, strict=True)]


def _with_mean(names: Iterable[str]) -> dict[str, list[str]]:
    """Each name for itself and, of several, a row for their mean."""
    rows = {name: [name] for name in names}
    return rows | ({"mean": list(rows)} if len(rows) > 1 else {})


def _from_to(begun: Sequence[float], ended: Sequence[float]) -> str:
    """The mean at the start, and of several seeds the lowest and the highest end."""
    seeds = f", seeds {min(ended):.3f} to {max(ended):.3f}" if len(ended) > 1 else ""
    return f"from {fmean(begun):.3f}{seeds}"


def _marked(values: Iterable[float | None]) -> list[Cell]:
    """Three digits each, the highest marked."""
    texts = ["" if value is None else f"{value:.3f}" for value in values]
    best = max((text for text in texts if text and text != "nan"), key=float, default=None)
    return [Cell(text, best=bool(text) and text == best and len(texts) > 1) for text in texts]


def _steps(run: Run) -> str:
    if not run.metrics:
        return ""
    last, kept = run.metrics[-1].step, run.metrics[-1].kept
    return f"{last:,}" + (f" (saved: step {kept:,})" if kept not in (None, last) else "")


def _p(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if value >= 0.001 else "< 0.001"


def _interval(found: Interval | None) -> Cell:
    if found is None:
        return Cell("")
    return Cell(f"{found.value:.4f}", note=f"{found.low:.4f} to {found.high:.4f}")


def _short(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.3f}"


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _text(value: Any) -> str:
    """A value as a recipe file writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)
