"""A report's tables of scores: the label-free check, judged queries, and those that are lost to
BM25.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from revela.evaluation.metrics import METRICS
from revela.evaluation.report.runs import Comparison, Run

MAIN = "main"  # what benchmarks of another kind than retrieval are scored by


@dataclasses.dataclass(frozen=True)
class Cell:
    """What one place of a table says, whether it is the best of those it is compared with, and what
    stands small beside it.
    """

    text: str
    best: bool = False
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Table:
    """A caption, the names of the columns (that of the rows first), and rows: a name and a cell a
    column.
    """

    caption: str
    header: list[str]
    rows: list[tuple[str, list[Cell]]]


def label_free(runs: Sequence[Run]) -> list[Table]:
    """A table a task: BM25, the model at its start, the state before the first update, the saved
    one. A column a run, its best marked.
    """
    tasks = dict.fromkeys(task for run in runs for row in run.checks() for task in row["check"])
    tables = []
    for task in tasks:
        systems = {
            "BM25": [run.about.get("bm25", {}).get(task) for run in runs],
            "untrained": [run.about.get("untrained", {}).get(task) for run in runs],
            "before the first update": [
                next((r["check"].get(task) for r in run.checks() if r["step"] == 0), None)
                for run in runs
            ],
            "saved": [run.saved().get(task) for run in runs],
        }
        columns = [_marked(column) for column in zip(*systems.values(), strict=True)]
        rows = list(zip(systems, map(list, zip(*columns, strict=True)), strict=True))
        tables.append(Table(task, ["nDCG@10", *(run.name for run in runs)], rows))
    return tables


def compared(comparison: Comparison) -> Table:
    """nDCG@10 of judged queries at the end, a row a collection: BM25, and each kind of run over its
    seeds, with where it began.
    """
    kinds: dict[str, list[list[dict[str, Any]]]] = {}
    for label, curve in comparison.curves.items():
        if curve:
            kinds.setdefault(label.rpartition(", seed ")[0] or label, []).append(curve)
    rows = []
    for name, collections in _with_mean({name: [name] for name in comparison.bm25}).items():
        first, last = (
            [
                [fmean(c[at]["judged"][n] for n in collections) for c in curves]
                for curves in kinds.values()
            ]
            for at in (0, -1)
        )
        cells = _marked([fmean(comparison.bm25[n] for n in collections), *map(fmean, last)])
        notes = ["", *(_from_to(begun, ended) for begun, ended in zip(first, last, strict=True))]
        rows.append(
            (
                name,
                [
                    dataclasses.replace(cell, note=note)
                    for cell, note in zip(cells, notes, strict=True)
                ],
            )
        )
    return Table(comparison.name, ["nDCG@10", "BM25", *kinds], rows)


def judged(scores: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    """Scores of ``eval``: nDCG@10 over all collections, a column a system, and for each collection
    all its metrics, a row a system.
    """
    merged = merge(scores)
    tables = []
    for collection, systems in merged.items():
        metrics = [m for m in METRICS if any(m in values for values in systems.values())] or [MAIN]
        columns = [
            _marked([_number(values.get(metric)) for values in systems.values()])
            for metric in metrics
        ]
        if metrics[:1] == ["ndcg@10"]:
            margins = [_margin(values.get("interval")) for values in systems.values()]
            columns[0] = [
                dataclasses.replace(cell, note=margin)
                for cell, margin in zip(columns[0], margins, strict=True)
            ]
        references = dict.fromkeys(
            name for values in systems.values() for name in values.get("p") or {}
        )
        columns += [
            [Cell(_p((values.get("p") or {}).get(name))) for values in systems.values()]
            for name in references
        ]
        header = [
            "system",
            *map(_metric_name, metrics),
            *(f"p against {name}" for name in references),
        ]
        tables.append(
            Table(
                collection,
                header,
                list(zip(systems, map(list, zip(*columns, strict=True)), strict=True)),
            )
        )
    if len(merged) > 1:
        names = list(dict.fromkeys(system for systems in merged.values() for system in systems))
        rows = []
        for name, collections in _with_mean({name: [name] for name in merged}).items():
            values = [
                [_number(merged[c].get(system, {}).get("ndcg@10")) for c in collections]
                for system in names
            ]
            rows.append(
                (
                    name,
                    _marked(
                        [
                            fmean(v for v in each if v is not None) if None not in each else None
                            for each in values
                        ]
                    ),
                )
            )
        tables.insert(0, Table("all collections", ["nDCG@10", *names], rows))
    return tables


def worst(scores: Mapping[str, Mapping[str, Any]], count: int = 10) -> list[Table]:
    """Of each file with scores of every query: those that the retrievers lose to BM25 most, by
    their mean nDCG@10; a column a system.
    """
    tables = []
    for source, content in scores.items():
        for collection, systems in merge({source: content}).items():
            by_query = {
                name: values["queries"] for name, values in systems.items() if values.get("queries")
            }
            own = [name for name in by_query if name != "BM25" and not name.endswith(" + BM25")]
            if "BM25" not in by_query or not own:
                continue
            shared = [
                q for q in by_query["BM25"] if all(q in queries for queries in by_query.values())
            ]
            found = {
                q: {name: float(queries[q]["ndcg@10"]) for name, queries in by_query.items()}
                for q in shared
            }
            lost = {
                q: values["BM25"] - fmean(values[name] for name in own)
                for q, values in found.items()
            }
            most = [q for q in sorted(lost, key=lambda q: -lost[q])[:count] if lost[q] > 0]
            rows = [
                (str(by_query[own[0]][q].get("text", q)), _marked(found[q].values())) for q in most
            ]
            if rows:
                caption = f"{collection} ({source})" if len(scores) > 1 else collection
                tables.append(Table(caption, ["nDCG@10 of a query", *by_query], rows))
    return tables


def merge(scores: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Several files of scores as one: {collection: {system: what is known of it}}.

    A system that has other scores in a later file stands there a second time, with that file's
    name.
    """
    merged: dict[str, dict[str, dict[str, Any]]] = {}
    for source, content in scores.items():
        for collection, systems in content.items():
            for system, values in systems.items() if isinstance(systems, dict) else ():
                if isinstance(values, dict) and any(
                    _number(values.get(metric)) is not None for metric in (*METRICS, MAIN)
                ):
                    at = merged.setdefault(collection, {})
                    same = all(
                        at.get(system, values).get(metric) == values.get(metric)
                        for metric in METRICS
                    )
                    at[system if same else f"{system} ({source})"] = values
    return merged


def _with_mean(names: dict[str, list[str]]) -> dict[str, list[str]]:
    return names | ({"mean": list(names)} if len(names) > 1 else {})


def _from_to(begun: Sequence[float], ended: Sequence[float]) -> str:
    """Where runs began, and the least and the greatest end of several."""
    return f"from {fmean(begun):.3f}" + (
        f", seeds {min(ended):.3f} to {max(ended):.3f}" if len(ended) > 1 else ""
    )


def _marked(values: Iterable[float | None]) -> list[Cell]:
    """Three digits each, the greatest marked."""
    texts = ["" if value is None else f"{value:.3f}" for value in values]
    best = max((text for text in texts if text and text != "nan"), key=float, default=None)
    return [Cell(text, best=bool(text) and text == best and len(texts) > 1) for text in texts]


def _metric_name(metric: str) -> str:
    return {
        "ndcg@10": "nDCG@10",
        "recall@100": "recall@100",
        "mrr@10": "MRR@10",
        "map": "MAP",
        MAIN: "main score",
    }.get(metric, metric)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _margin(interval: Any) -> str:
    """Half of a 95 % interval."""
    return (
        f"± {(interval[1] - interval[0]) / 2:.3f}"
        if isinstance(interval, list) and len(interval) == 2
        else ""
    )


def _p(value: Any) -> str:
    return "" if _number(value) is None else f"{value:.3f}" if value >= 0.001 else "< 0.001"
