"""Read PDF: its text, tables of numbers as lines with headings, and the values of forms."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from revela.text.endings import COMPRESSED
from revela.text.readers.common import ReadReport, UnsupportedFile, read_bytes
from revela.text.readers.rows import Fields
from revela.text.readers.table_lines import has_headings, is_number, lines_below
from revela.text.readers.text import plain_title
from revela.types import Document

if TYPE_CHECKING:
    from revela.text.readers.pdf_pages import Cell, Page

# A word that continues on the next line.
_PARTED = re.compile(r"([^\W\d_]+)([-\u2010\u00ad])[ \t]*\r?\n[ \t]*([^\W\d_]+)")
_WORD = re.compile(r"[^\W\d_]+")
_LIGATURES = {0xFB00 + i: s for i, s in enumerate(["ff", "fi", "fl", "ffi", "ffl", "st", "st"])}
_HYPHENED = re.compile(r"\b[^\W\d_]+-[^\W\d_]+")
# Words after half a word with a hyphen, as in "Ein- und Ausgabe".
_OMITS = frozenset("and or to und oder bis sowie et ou y o e en of och eller og i или и".split())  # noqa: SIM905
LONG_CELL = 6  # words; most lines in columns of prose have more, and in one column of a table


def read_pdf(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """Read the text of all pages, and the values of forms."""
    from revela.text.readers.pdf_pages import read

    title, given, values = read(read_bytes(path) if path.suffix in COMPRESSED else path)
    for number, page in enumerate(given, 1):
        if page is None:
            report.skip("damaged page", f"{name}, page {number}")
    pages = [_text(page) for page in given]
    if not any(pages + values):
        raise UnsupportedFile("PDF without text; run OCR on it first")
    if empty := [number for number, page in enumerate(given, 1) if page in ("", [])]:
        report.note("PDF with pages without text, which may be scans", f"{name}, page {empty[0]}")
    # Form feeds separate pages (searching/locations.py).
    text = "\n\n".join(filter(None, ["\n\n\f".join(pages).rstrip(), "\n".join(values)]))
    yield Document(name, join_words(text.translate(_LIGATURES)), plain_title(title))


def _text(page: Page) -> str:
    """A page's text, with tables as lines that have each value beside the heading of its column.

    >>> from revela.text.readers.pdf_pages import Cell
    >>> head = [Cell("Room", 0, 4), Cell("Summer", 9, 15), Cell("Winter", 17, 23)]
    >>> oslo = [Cell("Oslo", 0, 4), Cell("120", 9, 12), Cell("8", 17, 18)]
    >>> ulm = [Cell("Ulm", 0, 3), Cell("60", 17, 19)]
    >>> _text([[Cell("Prices", 0, 6)], head, oslo, ulm, [Cell("By night.", 0, 9)]])
    'Prices\\nRoom: Oslo; Summer: 120; Winter: 8\\nRoom: Ulm; Winter: 60\\nBy night.'
    """
    if not isinstance(page, list):
        return page or ""
    lines = list[str]()
    for is_row, group in groupby(page, lambda cells: len(cells) > 1):
        found = list(group)
        table = _table(found) if is_row else []
        lines += lines_below(table[0], table[1:]) if table else ()
        lines += (" ".join(cell.text for cell in row) for row in found[len(table) :])
    return "\n".join(lines).strip()


def _table(rows: Sequence[Sequence[Cell]]) -> list[list[str]]:
    """The headings and the rows below if they are a table with numbers; else []."""
    headings, *below = rows
    table = [[cell.text for cell in headings]]
    for row in below:
        if not (cells := _in_columns(headings, row)):
            break
        table.append(cells)
    columns = [*zip(*table[1:], strict=True)]
    is_named = all(name[0].isalnum() for name in table[0]) and has_headings(table)
    long = [any(len(cell.split()) > LONG_CELL for cell in column) for column in columns]
    is_short = sum(long) < 2 and all(len(name.split()) <= LONG_CELL for name in table[0])
    of_numbers = any(2 * sum(map(is_number, column)) > len(column) for column in columns)
    return table if len(table) > 2 and is_named and is_short and of_numbers else []


def _in_columns(headings: Sequence[Cell], row: Sequence[Cell]) -> list[str]:
    """A row's cells by column: each is below the heading whose left side, right side or middle is
    nearest to its own. [] if two are below one heading.
    """
    cells = [""] * len(headings)
    for cell in row:
        gaps = [
            min(
                abs(cell.begin - heading.begin),
                abs(cell.end - heading.end),
                abs(cell.begin + cell.end - heading.begin - heading.end) / 2,
            )
            for heading in headings
        ]
        place = gaps.index(min(gaps))
        if any(cells[place:]):
            return []
        cells[place] = cell.text
    return cells


def join_words(text: str) -> str:
    """Join words that are split at the end of a line.

    The hyphen stays if the hyphenated word occurs elsewhere in the text, if one letter precedes it,
    or if both parts are words of the text (the second in lower case, unlike a German noun) and the
    whole is not. Half a word before "and" or the like is unchanged. If the text does not tell, the
    parts are joined, because most are one word.

    >>> join_words("The echo-\\nlocation of bats is well-\\nknown, as all well-known things.")
    'The echolocation of bats is well-known, as all well-known things.'
    """
    if not _PARTED.search(text):
        return text
    hyphened = {*_HYPHENED.findall(text.lower())}
    words = {*_WORD.findall(_PARTED.sub(" ", text))}
    lower = {word.lower() for word in words}

    def joined(found: re.Match[str]) -> str:
        first, mark, rest = found.groups()
        if not rest[0].islower() or rest in _OMITS:
            return found[0]
        known = first.lower()
        is_compound = known in lower and rest in words and known + rest not in lower
        is_hyphen = len(first) == 1 or f"{known}-{rest}" in hyphened or is_compound
        return f"{first}-{rest}" if is_hyphen and mark != "\u00ad" else first + rest

    return _PARTED.sub(joined, text)
