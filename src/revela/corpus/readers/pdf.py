"""Read PDF (the extra pdf): its text, tables of numbers as lines with headings, and the values of
forms.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from revela.corpus.readers.common import (
    ReadReport,
    UnsupportedFile,
    open_seekable,
    reader_extra,
    without_surrogates,
)
from revela.corpus.readers.rows import Fields
from revela.corpus.readers.table_lines import has_headings, is_number, lines_below
from revela.corpus.readers.text import plain_title
from revela.types import Document

# A word that goes on in the next line.
_PARTED = re.compile(r"([^\W\d_]+)([-\u2010\u00ad])[ \t]*\r?\n[ \t]*([^\W\d_]+)")
_WORD = re.compile(r"[^\W\d_]+")
_LIGATURES = {0xFB00 + i: s for i, s in enumerate(["ff", "fi", "fl", "ffi", "ffl", "st", "st"])}
_HYPHENED = re.compile(r"\b[^\W\d_]+-[^\W\d_]+")
# Words after half a word with a hyphen, as in "Ein- und Ausgabe".
_OMITS = frozenset("and or to und oder bis sowie et ou y o e en of och eller og i или и".split())  # noqa: SIM905
_CELL = re.compile(r"\S+(?: \S+)*")
_NUMBER = re.compile(r"\S[ \t]+[^\w\s]*\d")  # after something else
LONG_ROW = 200  # characters
LONG_CELL = 6  # words; most lines in columns of prose have more


def read_pdf(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """Read the text of all pages, and the values of forms."""
    with reader_extra("pdf", "PDF"):
        from pypdf import PdfReader
    # pypdf warns of every fault that it repairs.
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    with open_seekable(path) as handle:
        reader = PdfReader(handle)
        pages = [_page(page) for page in reader.pages]
        title = str((reader.metadata and reader.metadata.title) or "")
        values = list(_values(reader))
    if not any(pages + values):
        raise UnsupportedFile("PDF without text; run OCR on it first")
    if empty := [number for number, page in enumerate(pages, 1) if not page]:
        report.note("PDF with pages without text, which may be scans", f"{name}, page {empty[0]}")
    # Form feeds separate pages (index/places.py).
    text = "\n\n".join(filter(None, ["\n\n\f".join(pages).rstrip(), "\n".join(values)]))
    # A font without a character table can give halves of surrogate pairs.
    text, title = (without_surrogates(given).translate(_LIGATURES) for given in (text, title))
    yield Document(name, join_words(text), plain_title(title))


def _page(page: Any) -> str:
    text = str(page.extract_text()).strip()
    rows = [len(line) < LONG_ROW and bool(_NUMBER.search(line)) for line in text.splitlines()]
    # Layout takes as long as reading: only if two consecutive lines may belong to a table.
    if any(one and other for one, other in pairwise(rows)):
        with suppress(Exception):  # the library's, for fonts that it cannot lay out
            text = _with_tables(text, page.extract_text(extraction_mode="layout"))
    return text


def _values(reader: Any) -> Iterator[str]:
    """The values of a form, which are not in the page's text."""
    with suppress(Exception):  # the library's, for broken forms
        for name, field in (reader.get_fields() or {}).items():
            if isinstance(value := field.value, str) and value.strip() and value[0] != "/":
                yield f"{field.alternate_name or name}: {' '.join(value.split())}"


class _Cell(NamedTuple):
    """A cell of a laid-out line, and the columns where it begins and ends."""

    text: str
    begin: int
    end: int


def _with_tables(text: str, laid_out: str) -> str:
    """Rewrite the tables of a page's text as lines, with each value beside its column's heading.

    >>> page = "Prices\\nRoom Summer Winter\\nOslo 120 80\\nUlm 60\\nBy night."
    >>> _with_tables(page, "Prices\\nRoom   Summer  Winter\\nOslo   120     80\\nUlm            60")
    'Prices\\nRoom: Oslo; Summer: 120; Winter: 80\\nRoom: Ulm; Winter: 60\\nBy night.'
    """
    rows = [[_Cell(m[0], *m.span()) for m in _CELL.finditer(x)] for x in laid_out.splitlines()]
    for is_row, lines in groupby(filter(None, rows), lambda cells: len(cells) > 1):
        if is_row and (table := _table(list(lines))):
            letters = "".join(cell for row in table for cell in row)
            # White space in the text may differ.
            pattern = r"\s*".join(map(re.escape, "".join(letters.split())))
            if found := re.search(pattern, text):
                below = "\n".join(lines_below(table[0], table[1:]))
                text = text[: found.start()] + below + text[found.end() :]
    return text


def _table(rows: Sequence[Sequence[_Cell]]) -> list[list[str]]:
    """Headings and the rows below, if they are a table with numbers; else []."""
    headings, *below = rows
    table = [[cell.text for cell in headings]]
    for row in below:
        if not (cells := _in_columns(headings, row)):
            break
        table.append(cells)
    columns = [*zip(*table[1:], strict=True)]
    is_named = all(name[0].isalnum() for name in table[0]) and has_headings(table)
    is_short = all(len(cell.split()) <= LONG_CELL for row in table for cell in row)
    of_numbers = any(2 * sum(map(is_number, column)) > len(column) for column in columns)
    return table if len(table) > 2 and is_named and is_short and of_numbers else []


def _in_columns(headings: Sequence[_Cell], row: Sequence[_Cell]) -> list[str]:
    """A row's cells by column: each is below the heading whose left side, right side or middle is
    nearest to its own. [] if two are below one heading.
    """
    cells = [""] * len(headings)
    for cell in row:
        gaps = [
            min(
                abs(cell.begin - heading.begin),
                abs(cell.end - heading.end),
                abs(cell.begin + cell.end - heading.begin - heading.end) // 2,
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

    The hyphen stays if the text has the hyphened word elsewhere, if one letter is before it, or if
    both parts are words of the text and the whole is not. Half a word before "and" or the like is
    left as it is.

    >>> join_words("The echo-\\nlocation of bats is well-\\nknown, as all well-known things.")
    'The echolocation of bats is well-known, as all well-known things.'
    """
    hyphened, words = set[str](), set[str]()
    if _PARTED.search(text):
        hyphened = set(_HYPHENED.findall(text))
        words = set(_WORD.findall(_PARTED.sub(" ", text).lower()))

    def joined(found: re.Match[str]) -> str:
        first, mark, rest = found.groups()
        if not rest[0].islower() or rest in _OMITS:
            return found[0]
        parts = {first.lower(), rest}
        is_compound = parts <= words and first.lower() + rest not in words
        is_hyphen = len(first) == 1 or f"{first}-{rest}" in hyphened or is_compound
        return f"{first}-{rest}" if is_hyphen and mark != "\u00ad" else first + rest

    return _PARTED.sub(joined, text)
