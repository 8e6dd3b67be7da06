"""Turn rows of cells into lines of text, with each value beside its label."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

WIDE = 30  # words; in a row with more, each cell is a line
LONG_HEADING = 60  # maximum characters
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
    """Whether the first row has headings: it fills all cells, three or more, with different texts
    that are not numbers. (In a row of two cells, the first may be the label of the second.)
    """
    width = max(map(len, rows), default=0)
    names = [cell.rstrip(":") for cell in (rows[0] if rows else ()) if cell]
    if len(rows) < 2 or len(names) < max(3, width) or len({*names}) < len(names):
        return False
    return not any(is_number(name) or len(name) > LONG_HEADING for name in names)


def _labelled(row: Sequence[str]) -> str:
    if len(row) == 2 and all(row) and not is_number(row[0]):
        return f"{row[0].rstrip(':')}: {row[1]}"
    return " | ".join(row).rstrip(" |")


def is_number(cell: str) -> bool:
    """Whether a cell is a number, with or without a unit, or a date."""
    return bool(_NUMBER.fullmatch(cell))
