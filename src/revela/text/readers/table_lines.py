"""Turn rows of cells into lines of text, with each value beside its heading."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby, pairwise, takewhile, zip_longest

Merged = tuple[int, int, int, int]  # first row, first column, last row, last column; from 0

WIDE = 30  # words; in a row with more, each cell is a line
LONG_HEADING = 60  # maximum characters
HEADINGS = 5  # first rows of a sheet's table that may have its headings
JOINED = 3  # maximum rows of headings, if names of groups are above names of columns
# Maximum characters of headings, in all lines and per character of the cells; a table with more is
# swollen.
LABELS, LABELS_PER_CELL = 2**20, 4
_NUMBER = re.compile(r"[\W\d_]*\d[\W\d_]*(?:[^\W\d_]{1,3}\W*)?")  # also with a unit, or a date
_PERIOD = re.compile(r"(?:19|20)\d\d(?:[-/.]\d\d?){0,2}\W*")  # a year, month or day


def table_lines(rows: Iterable[Sequence[str]], headings: int = 0) -> list[str]:
    """One line per row.

    Below headings it is "Heading: value; Heading: value"; for two cells "label: value"; otherwise
    the cells. ``headings`` is the number of rows of headings; 0: those that look like headings.

    >>> table_lines([["Kind", "Legs", "Wings"], ["bee", "6", "4"], ["bat", "2", "2"]])
    ['Kind: bee; Legs: 6; Wings: 4', 'Kind: bat; Legs: 2; Wings: 2']
    >>> table_lines([["Name", "Anna"], ["Phone", "123 45"]])
    ['Name: Anna', 'Phone: 123 45']
    """
    rows, captions = [list(row) for row in rows if any(row)], list[str]()
    while headings > 1 and len(rows) > 1 and len({*rows[0], ""}) == 2:
        captions.append(max(rows.pop(0)))  # a cell that spans all columns
        headings -= 1
    headings, names = (headings, _joined(rows[:headings])) if headings else _headings(rows)
    below = lines_below(names, rows[headings:]) if 0 < headings < len(rows) else ()
    return [*captions, *(below or map(_labelled, rows))]


def is_swollen(headings: Sequence[str], rows: Sequence[Sequence[str]], least: int = LABELS) -> bool:
    """Whether headings would make up most of a table's lines, as in a survey of closed questions,
    and more than ``least`` characters.
    """
    cells = sum(len(cell) for row in rows for cell in row)
    labels = sum(
        len(name) for row in rows for name, cell in zip(headings, row, strict=False) if cell
    )
    return labels > max(least, LABELS_PER_CELL * cells)


def lines_below(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """``table_lines`` for rows below known headings. A swollen table has one line per column, with
    each of its values once.
    """
    if is_swollen(headings, rows):
        for name, *cells in zip_longest(headings, *rows, fillvalue=""):
            yield f"{name.rstrip(':')}: {'; '.join(dict.fromkeys(filter(None, cells)))}"
        return
    for row in rows:
        names = [*(name.rstrip(":") for name in headings), *[""] * (len(row) - len(headings))]
        pairs = [(name, cell) for name, cell in zip(names, row, strict=False) if cell]
        cells = [f"{name}: {cell}" if name else cell for name, cell in pairs]
        is_wide = sum(len(cell.split()) for cell in cells) > WIDE
        yield ("\n" if is_wide else "; ").join(cells)


def has_headings(rows: Sequence[Sequence[str]]) -> bool:
    """Whether the first row has headings: it fills all of three or more cells, except perhaps the
    first, with different texts, which are not numbers, except years and dates above other numbers.
    (In a row of two cells, the first may be the label of the second.)
    """
    width = max(map(len, rows), default=0)
    names = [cell.rstrip(":") for cell in (rows[0] if rows else ()) if cell]
    missing = width - len(names) - (width > 0 and not rows[0][0])
    if len(rows) < 2 or width < 3 or missing or len({*names}) < len(names):
        return False
    numbers = [place for place, cell in enumerate(rows[0]) if is_number(cell)]
    is_long = any(len(name) > LONG_HEADING for name in names)
    if (is_long and not is_swollen(rows[0], rows[1:], LABELS // 16)) or len(numbers) == width:
        return False
    below = [cell for row in rows[1:] for i in numbers for cell in row[i : i + 1] if cell]
    counts = [cell for cell in below if is_number(cell) and not _is_period(cell)]
    are_periods = all(_is_period(rows[0][place]) for place in numbers)
    return not numbers or (are_periods and 2 * len(counts) > len(below))


def _headings(rows: Sequence[Sequence[str]]) -> tuple[int, list[str]]:
    """The number of rows of headings at the beginning of a table, and the headings; (0, []) if
    there are none.

    Names of groups of columns are joined with the names below if those alone are not headings,
    because some are repeated or missing. So that sparse rows of data are not joined, a name must be
    repeated in the last row, or be a year.
    """
    if has_headings(rows):
        return 1, [*rows[0]]
    for height in range(2, min(JOINED, len(rows) - 1) + 1):
        *above, lowest = rows[:height]
        filled = [_over_columns(row) for row in above]
        names = _joined([*filled, lowest])
        is_repeated = len({*lowest} - {""}) < sum(map(bool, lowest))
        if (
            (is_repeated or any(map(_is_period, chain(*above, lowest))))
            and all(_is_period(cell) for cell in lowest if is_number(cell))
            and all(len({*row, ""}) > 2 for row in above)
            and _are_groups(filled, lowest)
            and has_headings([names, *rows[height:]])
            and not has_headings(rows[height - 1 :])
        ):
            return height, names
    return 0, []


def _are_groups(above: Sequence[Sequence[str]], lowest: Sequence[str]) -> bool:
    """Whether each name in the rows above spans several columns, or has no other name below."""
    for number, row in enumerate(above):
        below = _joined([lowest, *above[number + 1 :]])
        around = zip(["", *row], row, [*row[1:], ""], below, strict=False)
        if any(
            name not in (left, right) and other not in ("", name) and name
            for left, name, right, other in around
        ):
            return False
    return True


def _is_period(cell: str) -> bool:
    return bool(_PERIOD.fullmatch(cell))


def _joined(rows: Iterable[Sequence[str]]) -> list[str]:
    """Rows of headings as one row, with the different texts of each column."""
    columns = zip_longest(*rows, fillvalue="")
    return [" ".join(dict.fromkeys(filter(None, column))) for column in columns]


def _over_columns(row: Sequence[str]) -> list[str]:
    """A row of names of groups, with each name repeated in the empty cells to its right; the last
    spans as many columns as the one before, if that spans several.
    """
    begins = [place for place, cell in enumerate(row) if cell]
    if len(begins) > 1 and (width := begins[-1] - begins[-2]) > 1:
        row = row[: begins[-1] + width]
    names = list[str]()
    for cell in row:
        names.append(cell or (names[-1] if names else ""))
    return names


def sheet_tables(rows: Iterable[Sequence[str]], merged: Sequence[Merged] = ()) -> Iterator[str]:
    """The tables of a sheet, each as lines. An empty row ends a table; a table without headings may
    use those of the table above.

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
            place, height, headings = _headings_at(lines[above:])
            if headings:
                above += place
                names = dict(zip(columns, headings, strict=True))
                below = lines_below(headings, lines[above + height :])
            elif len(columns) > 2 and names.keys() >= {*columns}:
                below = lines_below([names[column] for column in columns], lines[above:])
            else:
                below = map(_labelled, lines[above:])
                if len(lines) == 1 and has_headings(lines * 2):  # an empty row is below
                    names = dict(zip(columns, lines[0], strict=True))
            captions = (_labelled([*filter(None, line)]) for line in lines[:above])
            yield "\n".join([*captions, *below])


def _headings_at(rows: Sequence[Sequence[str]]) -> tuple[int, int, list[str]]:
    """The number of rows above the headings, that of rows of headings, and the headings, [] if
    there are none. They may be below a few rows that are half empty, if numbers are below them.
    """
    for place, row in enumerate(rows[:HEADINGS]):
        height, names = _headings(rows[place:])
        if height:
            columns = zip(*rows[place + height :], strict=True)
            if not place or any(2 * sum(map(is_number, cells)) > len(cells) for cells in columns):
                return place, height, names
        if 2 * sum(map(bool, row)) > len(row):
            break
    return 0, 0, []


def _side_by_side(table: list[dict[int, str]]) -> Iterator[list[dict[int, str]]]:
    """The tables between empty columns, if each has headings, and they differ in the number of rows
    or share a name.
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
    """Rows in which the text of a cell that is merged over rows is repeated in each. Headings that
    are merged over columns are joined with the headings below.
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
        below = _with(table[top + 1], wide.get(top + 1, {})) if table[top + 1 :] else []
        columns = [place for place, cell in enumerate(below) if cell]
        if not columns or (len({*above, ""}) < 3 and columns[0] in names):  # a title
            continue
        half = len(columns) / 2
        begins = top - 1 in joined or not top or sum(map(bool, table[top - 1])) <= max(1, half)
        pairs = [*zip_longest(above, below, fillvalue="")]
        lone = [pair for i, pair in enumerate(pairs) if i not in names and len({*pair, ""}) > 2]
        if begins and (not lone or len({*below} - {""}) < len(columns)):
            table[top + 1] = _joined([above, below])
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
