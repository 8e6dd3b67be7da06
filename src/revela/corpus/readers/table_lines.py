"""Turn rows of cells into lines of text, with each value beside its label."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise, takewhile, zip_longest

Merged = tuple[int, int, int, int]  # first row, first column, last row, last column; from 0

WIDE = 30  # words; in a row with more, each cell is a line
LONG_HEADING = 60  # maximum characters
HEADINGS = 5  # rows of a sheet's table, at most, of which one has its headings
_NUMBER = re.compile(r"[\W\d_]*\d[\W\d_]*(?:[^\W\d_]{1,3}\W*)?")  # also with a unit, or a date


def table_lines(rows: Iterable[Sequence[str]], headings: int | None = None) -> list[str]:
    """A line per row.

    Below a row of headings it is "Heading: value; Heading: value"; for two cells "label: value";
    otherwise the cells. ``headings`` is the number of rows of headings; None: 1 if the first row
    looks like one.

    >>> table_lines([["Kind", "Legs", "Wings"], ["bee", "6", "4"], ["bat", "2", "2"]])
    ['Kind: bee; Legs: 6; Wings: 4', 'Kind: bat; Legs: 2; Wings: 2']
    >>> table_lines([["Name", "Anna"], ["Phone", "123 45"]])
    ['Name: Anna', 'Phone: 123 45']
    """
    rows = [list(row) for row in rows if any(row)]
    if headings is None:
        headings = int(has_headings(rows))
    if headings and len(rows) > 1:
        return list(lines_below(rows[0], rows[1:]))
    return [_labelled(row) for row in rows]


def lines_below(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """``table_lines`` for rows below known headings, one at a time."""
    for row in rows:
        names = [*(name.rstrip(":") for name in headings), *[""] * (len(row) - len(headings))]
        pairs = [(name, cell) for name, cell in zip(names, row, strict=False) if cell]
        cells = [f"{name}: {cell}" if name else cell for name, cell in pairs]
        is_wide = sum(len(cell.split()) for cell in cells) > WIDE
        yield ("\n" if is_wide else "; ").join(cells)


def has_headings(rows: Sequence[Sequence[str]]) -> bool:
    """Whether the first row has headings: it fills all cells but perhaps the first, of three or
    more, with different texts that are not numbers. (In a row of two cells, the first may be the
    label of the second.)
    """
    width = max(map(len, rows), default=0)
    names = [cell.rstrip(":") for cell in (rows[0] if rows else ()) if cell]
    missing = width - len(names) - (width > 0 and not rows[0][0])
    if len(rows) < 2 or width < 3 or missing or len({*names}) < len(names):
        return False
    return not any(is_number(name) or len(name) > LONG_HEADING for name in names)


def sheet_tables(rows: Iterable[Sequence[str]], merged: Sequence[Merged] = ()) -> Iterator[str]:
    """The tables of a sheet, each as lines. An empty row ends a table; one without headings may go
    on with those above.

    >>> rows = [["Stock"], ["Part", "Shelf", "Left"], ["hinge", "C4", "2"], [], ["foot", "A1", "9"]]
    >>> list(sheet_tables(rows))
    ['Stock\\nPart: hinge; Shelf: C4; Left: 2', 'Part: foot; Shelf: A1; Left: 9']
    """
    names = dict[int, str]()  # of columns
    for is_filled, block in groupby(_unmerged(rows, merged), any):
        cells = [{i: cell for i, cell in enumerate(row) if cell} for row in block]
        for table in _side_by_side(cells) if is_filled else ():
            columns = sorted(set[int]().union(*table))
            lines = [[row.get(column, "") for column in columns] for row in table]
            single = takewhile(lambda row: len(row) == 1, table if len(columns) > 1 else ())
            above = sum(1 for _ in single)
            if (place := _headings_at(lines[above:])) is not None:
                above += place
                names = dict(zip(columns, lines[above], strict=True))
                below = lines_below(lines[above], lines[above + 1 :])
            elif len(columns) > 2 and names.keys() >= {*columns}:
                below = lines_below([names[column] for column in columns], lines[above:])
            else:
                below = map(_labelled, lines[above:])
                if len(lines) == 1 and has_headings(lines * 2):  # an empty row is below
                    names = dict(zip(columns, lines[0], strict=True))
            captions = (_labelled([*filter(None, line)]) for line in lines[:above])
            yield "\n".join([*captions, *below])


def _headings_at(rows: Sequence[Sequence[str]]) -> int | None:
    """The number of the row of headings, if there is one. It may be below some rows that are half
    empty, if numbers are below it.
    """
    for place, row in enumerate(rows[:HEADINGS]):
        if has_headings(rows[place:]):
            columns = zip(*rows[place + 1 :], strict=True)
            if not place or any(2 * sum(map(is_number, cells)) > len(cells) for cells in columns):
                return place
        if 2 * sum(map(bool, row)) > len(row):
            return None
    return None


def _side_by_side(table: list[dict[int, str]]) -> Iterator[list[dict[int, str]]]:
    """The tables between empty columns: with headings of their own, of other rows or the same
    names.
    """
    columns = sorted(set[int]().union(*table))
    for last, first in pairwise(columns):
        if first == last + 1 or not min(table[0]) < first <= max(table[0]):
            continue
        left = [{i: row[i] for i in row if i < first} for row in table]
        right = [{i: row[i] for i in row if i >= first} for row in table]
        left, right = [*filter(None, left)], [*filter(None, right)]
        both = ([[row.get(i, "") for i in side[0]] for row in side] for side in (left, right))
        repeated = {*left[0].values()} & {*right[0].values()}
        if all(map(has_headings, both)) and (len(left) != len(right) or repeated):
            yield left
            yield from _side_by_side(right)
            return
    yield table


def _unmerged(rows: Iterable[Sequence[str]], merged: Sequence[Merged]) -> Iterable[Sequence[str]]:
    """Rows with the text of a cell that is merged over rows in each of them. Headings that are
    merged over columns are joined with the headings below.
    """
    if not merged:
        return rows
    table = [[*row] for row in rows]
    filled, wide = [*map(any, table)], dict[int, dict[int, str]]()
    for top, first, bottom, last in merged:
        if text := next(iter(table[top][first : first + 1]), "") if top < len(table) else "":
            for number in range(top + 1, min(bottom + 1, len(table))):
                if filled[number]:
                    table[number] = _with(table[number], {first: text})
            if last > first:
                wide.setdefault(top, {}).update(dict.fromkeys(range(first, last + 1), text))
    joined = set[int]()
    for top, names in sorted(wide.items()):
        above = _with(table[top], names)
        begins = top - 1 in joined or not top or sum(map(bool, table[top - 1])) < 2
        if not begins or len({*above, ""}) < 3 or not any(table[top + 1 : top + 2]):
            continue
        below = _with(table[top + 1], wide.get(top + 1, {}))
        pairs = [*zip_longest(above, below, fillvalue="")]
        if all(i in names or not one or other in ("", one) for i, (one, other) in enumerate(pairs)):
            table[top + 1] = [" ".join(dict.fromkeys(filter(None, pair))) for pair in pairs]
            joined.add(top)
    return [row for number, row in enumerate(table) if number not in joined]


def _with(row: Sequence[str], texts: Mapping[int, str]) -> list[str]:
    """A row with texts in its empty cells, by column."""
    row = [*row, *[""] * (max(texts, default=0) + 1 - len(row))]
    return [text or texts.get(column, "") for column, text in enumerate(row)]


def _labelled(row: Sequence[str]) -> str:
    if len(row) == 2 and all(row) and not is_number(row[0]):
        return f"{row[0].rstrip(':')}: {row[1]}"
    return " | ".join(row).rstrip(" |")


def is_number(cell: str) -> bool:
    """Whether a cell is a number, with or without a unit, or a date."""
    return bool(_NUMBER.fullmatch(cell))
