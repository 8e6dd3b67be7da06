"""A table next to the paper's numbers: TABLE.md and TABLE.csv, with the differences of its rows."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean

from research.reproduce.published import PUBLISHED, Published, cell, published_heads
from research.reproduce.run import Options, Results, Scores, found_heads, margin_of, mean_of
from research.reproduce.tables import Row, Table
from revela.evaluation.significance import Difference, differences
from revela.files import atomic_write

HEADER = ["size", "row", "column", "metric", "here", "half interval", "published", "difference"]
NOT_COMPARABLE = (
    "**Tiny budgets (--small): these numbers show that everything runs; they cannot be compared "
    "with published ones, nor with one another.**"
)


@dataclass(frozen=True)
class Cell:
    """A number here and as published, in the unit of the paper; None where there is none."""

    here: float | None = None
    margin: float | None = None
    published: Published | None = None

    @property
    def difference(self) -> float | None:
        if self.here is None or self.published is None or self.published.is_impossible:
            return None
        return self.here - self.published.value


@dataclass(frozen=True)
class Line:
    """A row of a table with one size: (column, metric) -> its cell."""

    row: Row
    size: str
    cells: dict[tuple[str, str], Cell]


def lines_of(table: Table, results: Results, folder: Path = PUBLISHED) -> list[Line]:
    """All rows of a table, each with its sizes that have run; rows that are not run with all."""
    there = _columns(results) or list(table.columns)
    lines = []
    for row in table.rows:
        ran = results.get(row.label, {})
        for size in ran or ({} if row.model == "BM25" else dict.fromkeys(row.sizes or table.sizes)):
            scores = ran.get(size, {})
            cells = {
                (column, metric): value
                for metric in table.metrics
                for column, value in _cells(table, row, size, metric, scores, there, folder)
            }
            if ran or any(value.published for value in cells.values()):
                lines.append(Line(row, size, cells))
    return lines


def _columns(results: Results) -> list[str]:
    """The data sets of all rows that have run."""
    runs = (scores for sizes in results.values() for scores in sizes.values())
    return list(dict.fromkeys(column for scores in runs for column in scores))


def _cells(
    table: Table,
    row: Row,
    size: str,
    metric: str,
    scores: Mapping[str, Scores],
    there: Sequence[str],
    folder: Path,
) -> Iterator[tuple[str, Cell]]:
    """The cells of a row, and its means; a mean over some of its columns says so."""
    unit, label = 100.0 if table.percent else 1.0, row.published or row.label

    def printed(column: str) -> Published | None:
        return cell(table.name, label, size, column, metric, folder)

    found = dict[str, Cell]()
    for column in there:
        if column in scores:
            half = margin_of(scores[column], metric)
            half = half if half is None else half * unit
            here: float | None = mean_of(scores[column], metric) * unit
        else:
            here = half = None
        found[column] = Cell(here, half, printed(column))
    shown = {column: value for column, value in found.items() if column not in table.tasks}
    for mean, parts in table.means.items():
        inside = [found[part] for part in parts if part in found]
        values = [value.here for value in inside if value.here is not None]
        known = [value.published for value in inside]
        name, stated = mean, printed(mean)
        if any(part in table.means for part in parts):
            inside_here = len(inside) == len(parts)
        else:
            covered = [part for part in parts if part in there]
            inside_here = len(values) == len(covered) > 0
            if len(covered) < len(parts):
                if not covered:
                    continue
                name, stated = f"{mean} ({len(covered)} of {len(parts)})", None
                if all(known):
                    numbers = [value.value for value in known if value is not None]
                    stated = Published(round(fmean(numbers), 3))
        average = fmean(values) if inside_here and values else None
        found[name] = shown[name] = Cell(average, None, stated)
    yield from shown.items()


def write_report(table: Table, results: Results, options: Options) -> str:
    """Write OUT/TABLE.md and OUT/TABLE.csv; returns the text."""
    name = f"{table.name}-small" if options.small else table.name
    if table.heads:
        text = heads_report(table, options)
    else:
        lines = lines_of(table, results)
        text = markdown(table, lines, list(pairs_of(table, results)), small=options.small)
        with atomic_write(options.out / f"{name}.csv") as temporary:
            temporary.write_text(as_csv(lines), encoding="utf-8")
    with atomic_write(options.out / f"{name}.md") as temporary:
        temporary.write_text(text, encoding="utf-8")
    return text


def markdown(
    table: Table, lines: Sequence[Line], pairs: Sequence[tuple[str, Difference]], *, small: bool
) -> str:
    """The table, the differences of its rows, and notes."""
    digits = 1 if table.percent else 3
    keys = list(dict.fromkeys(key for line in lines for key in line.cells))
    several = len(table.metrics) > 1
    titles = [f"{column}, {metric}" if several else column for column, metric in keys]
    unit = "per cent" if table.percent else "0 to 1"
    text = [f"# {table.name}: {table.shows}", ""]
    text += [NOT_COMPARABLE, ""] if small else []
    text += [
        f"{', '.join(table.metrics)}, {unit}. ±: half the 95 % interval over queries. Means are "
        "over data sets.",
        "",
        *_table(["row", "size", "", *titles], _rows(lines, keys, digits)),
    ]
    if pairs:
        scale = 100 if table.percent else 1
        differing = [
            [
                size,
                f"{d.first} - {d.second}",
                d.on,
                f"{d.mean * scale:+.{digits}f}" + _half(d.margin, scale, digits),
                f"{d.p:.4f}",
            ]
            for size, d in pairs
        ]
        head = ["size", "rows", "on", f"difference in {table.metrics[0]}", "p"]
        text += ["", "## Differences of rows", "", *_table(head, differing)]
        text += ["", "p: paired randomisation test, two-sided, not corrected for several tests."]
    rows_by_label = {line.row.label: line.row for line in lines}
    notes = [
        f"- {row.label}: {f'not run: {row.why_not}' if row.why_not else row.note}"
        for row in rows_by_label.values()
        if row.why_not or row.note
    ]
    if notes:
        text += ["", "## Notes", "", *notes]
    return "\n".join(text) + "\n"


def _rows(
    lines: Sequence[Line], keys: Sequence[tuple[str, str]], digits: int
) -> Iterator[list[str]]:
    """Up to three rows of each line: here, published, difference."""
    for line in lines:
        cells = [line.cells.get(key, Cell()) for key in keys]
        here = [
            "" if c.here is None else f"{c.here:.{digits}f}" + _half(c.margin, 1, digits)
            for c in cells
        ]
        published = [_printed(c.published, digits) for c in cells]
        difference = ["" if c.difference is None else f"{c.difference:+.{digits}f}" for c in cells]
        named = [line.row.label, line.size]
        for what, values in {
            "here": here,
            "published": published,
            "difference": difference,
        }.items():
            if any(values):
                yield [*named, what, *values]
                named = ["", ""]


def _printed(published: Published | None, digits: int) -> str:
    if published is None:
        return ""
    said = f"{published.value:.{digits}f}"
    return f"{said} (not to be reproduced)" if published.is_impossible else said


def _half(margin: float | None, scale: float, digits: int) -> str:
    return "" if margin is None else f" ± {margin * scale:.{digits}f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]] | Iterator[list[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)]


def as_csv(lines: Sequence[Line]) -> str:
    """A line for each cell."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*HEADER, "note"])
    for line in lines:
        for (column, metric), c in line.cells.items():
            numbers = [c.here, c.margin, c.published and c.published.value, c.difference]
            cells = ["" if n is None else f"{n:.4f}".rstrip("0").rstrip(".") for n in numbers]
            impossible = c.published is not None and c.published.is_impossible
            note = "not to be reproduced" if impossible else line.row.why_not
            writer.writerow([line.size, line.row.label, column, metric, *cells, note])
    return file.getvalue()


def pairs_of(table: Table, results: Results) -> Iterator[tuple[str, Difference]]:
    """(size, difference) of each pair of rows, on the data sets that both have; rows without sizes
    are compared with those of each size.
    """
    sized = [size for size in table.sizes if any(size in sizes for sizes in results.values())]
    for size in sized or [""]:
        rows = dict[str, dict[str, Scores]]()
        for label, sizes in results.items():
            own = [s for s in sizes if s == size or s not in table.sizes]
            if own:
                rows[label] = sizes[own[0]]
        for first, second in combinations(rows, 2):
            common = [c for c in rows[first] if c in rows[second] and c not in table.tasks]
            pair = {
                label: {
                    part if len(rows[label][c]) == 1 else f"{c} {part}": {
                        query: values[table.metrics[0]] for query, values in queries.items()
                    }
                    for c in common
                    for part, queries in rows[label][c].items()
                }
                for label in (first, second)
            }
            if common:
                yield from ((size, found) for found in differences(pair))


def heads_report(table: Table, options: Options) -> str:
    """How many of the published heads the probe has found."""
    published = published_heads(table.name)
    found = found_heads(table, options, len(published))
    same = len({*published} & {*found})
    rows = [
        [
            str(rank),
            "{}-{}".format(*there),
            "{}-{}".format(*here),
            "yes" if here in published else "",
        ]
        for rank, (there, here) in enumerate(zip(published, found, strict=False), 1)
    ]
    return "\n".join(
        [
            f"# {table.name}: {table.shows}",
            "",
            *([NOT_COMPARABLE, ""] if options.small else []),
            f"{same} of the {len(published)} published heads are among the {len(found)} best here.",
            "",
            *_table(["rank", "published layer-head", "here", "here is published"], rows),
            "",
        ]
    )
