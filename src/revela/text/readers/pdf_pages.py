"""Read the pages of PDFs with PDFium, in the guarded process (readers/guarded.py), which alone
imports this file.

A page is its text; or its lines as lists of cells, if it may have a table; or None, if it cannot be
read.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from pypdfium2 import PdfDocument, PdfiumError, raw

# Widths in heights of a line:
COLUMN = 0.6  # a wider gap separates two cells
SPACE = 0.12  # a gap that exceeds the median of its line by more is a space
GLYPHS = 0.15  # a wider gap beside a letter of several glyphs is a space
LONG_ROW = 200  # characters
_HYPHEN = "\ufffe"  # PDFium's sign for a hyphen at the end of a line, and that end
_NUMBER = re.compile(r"\S[ \t]+[^\w\s]*\d")  # after other text
_CLUSTERS = re.compile("[\u0900-\u1aff]")  # scripts in which several glyphs show a letter
_LONE = re.compile(r"\n\S\r")  # a line of one character
_RIGHT_TO_LEFT = "\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc"
_LEFT_TO_RIGHT = re.compile(rf"[^\W{_RIGHT_TO_LEFT}](?:[^{_RIGHT_TO_LEFT}]*[^\W{_RIGHT_TO_LEFT}])?")


class Cell(NamedTuple):
    """A cell of a line, and where it begins and ends."""

    text: str
    begin: float
    end: float


Page = str | list[list[Cell]] | None


class _Character(NamedTuple):
    """A character, its box along the direction of the text and across it, and its font size."""

    text: str
    begin: float
    end: float
    low: float
    high: float
    size: float

    @property
    def height(self) -> float:
        return self.high - self.low


_SPACE, _END = _Character(" ", 0, 0, 0, 0, 0), _Character("\n", 0, 0, 0, 0, 0)  # of a line


def read(file: Path | bytes) -> tuple[str, list[Page], list[str]]:
    """Title, pages, and the values of a form as "name: value", of a file or its bytes."""
    with PdfDocument(file) as document:
        document.init_forms()
        pages, values = list[Page](), dict[str, str]()
        for number in range(len(document)):
            try:
                page = document[number]
                text = page.get_textpage()
            except PdfiumError:
                pages.append(None)
                continue
            pages.append(_page(text))
            values.update(_values(document.formenv, page))
            text.close()
            page.close()
        named = [f"{name}: {' '.join(value.split())}" for name, value in values.items()]
        return _text_of(raw.FPDF_GetMetaText, document, b"Title"), pages, named


def _page(page: Any) -> Page:
    text: str = page.get_text_range()
    kept: Sequence[int] = range(page.count_chars())
    if _CLUSTERS.search(text) and (marks := _marks(page.page)):
        kept = [*_once(page, marks)]
        text = "".join(page.get_text_range(i, 1) for i in kept)
    text = text.strip()
    lines = text.split("\r\n")
    rows = [len(line) < LONG_ROW and bool(_NUMBER.search(line)) for line in lines]
    # Boxes take ten times as long as the text: they are read only if two consecutive lines may
    # belong to a table, or if lines are torn.
    if any(map(all, pairwise(rows))) or _LONE.search(text):
        return [_cells(line) for line in _lines(page, kept)]
    return text.replace(_HYPHEN, "-\n").replace("\r\n", "\n")


def _marks(page: Any) -> dict[int, tuple[float, float]]:
    """Left and right side of the glyphs below each mark that tells their text (ActualText): Chrome
    writes such marks for letters of several glyphs.
    """
    sides = [ctypes.c_float() for _ in range(4)]
    marks = dict[int, tuple[float, float]]()
    for i in range(raw.FPDFPage_CountObjects(page)):
        glyphs = raw.FPDFPage_GetObject(page, i)
        if (mark := _mark(glyphs)) and raw.FPDFPageObj_GetBounds(glyphs, *sides):
            left, right = marks.get(mark, (math.inf, -math.inf))
            marks[mark] = min(left, sides[0].value), max(right, sides[2].value)
    return marks


def _mark(glyphs: Any) -> int:
    """The address of the mark that tells the text of glyphs; 0 if there is none."""
    found = (raw.FPDFPageObj_GetMark(glyphs, i) for i in range(raw.FPDFPageObj_CountMarks(glyphs)))
    named = (m for m in found if raw.FPDFPageObjMark_GetParamValueType(m, b"ActualText"))
    return next((ctypes.addressof(mark.contents) for mark in named), 0)


def _once(page: Any, marks: dict[int, tuple[float, float]]) -> Iterator[int]:
    """The characters of a page without those that PDFium adds: it repeats the text of a mark for
    several of its glyphs, and adds spaces and ends of lines after glyphs that it takes for last.
    """
    box, x, y = raw.FS_RECTF(), ctypes.c_double(), ctypes.c_double()
    first, added, end, level = dict[int, int](), list[int](), -math.inf, math.inf
    for i in range(page.count_chars()):
        if raw.FPDFText_IsGenerated(page, i):
            added.append(i)
            continue
        glyphs = raw.FPDFText_GetTextObject(page, i)
        mark = _mark(glyphs) if glyphs else 0
        if mark and first.setdefault(mark, own := ctypes.addressof(glyphs.contents)) != own:
            continue
        raw.FPDFText_GetLooseCharBox(page, i, box)
        raw.FPDFText_GetCharOrigin(page, i, x, y)
        begin, next_end = marks.get(mark, (box.left, box.right))
        size = raw.FPDFText_GetFontSize(page, i)
        is_next = abs(y.value - level) < size / 4 and -size < begin - end < GLYPHS * size
        yield from () if is_next else added
        yield i
        added, end, level = [], next_end, y.value


def _lines(page: Any, kept: Sequence[int]) -> Iterator[list[_Character]]:
    """The lines of a page. PDFium ends a line before a letter that is set alone: in a cell of one
    letter, and everywhere if letters are set one by one, as by Chrome. Such pieces are joined.
    """
    line, before, is_torn, begin, end = list[_Character](), _END, False, 0.0, 0.0
    for _, group in groupby(_characters(page, kept), lambda character: character is _END):
        piece = list(group)
        if not (boxed := _boxed(piece)):
            continue
        first, last = min(c.begin for c in boxed), max(c.end for c in boxed)
        if line and _is_level(before, boxed[0]) and begin - last < before.height:
            is_torn |= first - end < before.height
            line += [_SPACE, *piece]
            begin, end = min(first, begin), max(last, end)
        else:
            if line:
                yield _mended(line) if is_torn else line
            line, is_torn, begin, end = piece, False, first, last
        before = boxed[-1]
    if line:
        yield _mended(line) if is_torn else line


def _characters(page: Any, kept: Sequence[int]) -> Iterator[_Character]:
    """Characters with their boxes, and spaces and ends of lines without boxes."""
    box, direction = raw.FS_RECTF(), None
    for i in kept:
        code = raw.FPDFText_GetUnicode(page, i)
        is_hyphen = code < 32 and raw.FPDFText_IsHyphen(page, i)
        if not is_hyphen and (code <= 32 or code == 160 or raw.FPDFText_IsGenerated(page, i)):
            yield _END if code in (10, 13) else _SPACE
            continue
        raw.FPDFText_GetLooseCharBox(page, i, box)
        if direction is None:
            angle = raw.FPDFText_GetCharAngle(page, i)
            direction = round(math.cos(angle)), -round(math.sin(angle))
        corners = (box.left, box.bottom), (box.right, box.top)
        begin, end = sorted(direction[0] * x + direction[1] * y for x, y in corners)
        low, high = sorted(direction[0] * y - direction[1] * x for x, y in corners)
        size = raw.FPDFText_GetFontSize(page, i)
        yield _Character("-" if is_hyphen else chr(code), begin, end, low, high, size)
        if is_hyphen:
            yield _END


def _is_level(one: _Character, other: _Character) -> bool:
    """Whether two characters may be in one line; the number of a footnote is not."""
    shared = min(one.high, other.high) - max(one.low, other.low)
    return one.size == other.size and 2 * shared > min(one.height, other.height)


def _boxed(line: list[_Character]) -> list[_Character]:
    return [character for character in line if character not in (_SPACE, _END)]


def _mended(line: list[_Character]) -> list[_Character]:
    """A torn line, in reading order, with spaces where its gaps are wide."""
    is_right_to_left = re.search(f"[{_RIGHT_TO_LEFT}]", "".join(c.text for c in line))
    line = _boxed(line)
    if is_right_to_left:
        line.sort(key=lambda character: -character.end)
    gaps = [max(b.begin - a.end, a.begin - b.end) for a, b in pairwise(line)]
    least = median(gaps) + SPACE * max(character.height for character in line)
    made = line[:1]
    for character, gap in zip(line[1:], gaps, strict=True):
        made += [_SPACE] * (gap > least) + [character]
    if is_right_to_left:
        for found in _LEFT_TO_RIGHT.finditer("".join(c.text for c in made)):
            made[found.start() : found.end()] = made[found.start() : found.end()][::-1]
    return made


def _text(line: list[_Character]) -> str:
    text = "".join(character.text for character in line)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "ignore").strip()


def _cells(line: list[_Character]) -> list[Cell]:
    """The cells of a line, which wide gaps separate."""
    parts, last = [list[_Character]()], None
    least = COLUMN * max(character.height for character in line)
    for character in line:
        if character is not _SPACE:
            if last and character.begin - last.end > least:
                parts.append([])
            last = character
        parts[-1].append(character)
    return [
        Cell(_text(part), min(c.begin for c in boxed), max(c.end for c in boxed))
        for part, boxed in zip(parts, map(_boxed, parts), strict=True)
    ]


def _values(form: Any, page: Any) -> Iterator[tuple[str, str]]:
    """Name and value of each form field that is filled in, which the page's text lacks."""
    written = (
        raw.FPDF_FORMFIELD_TEXTFIELD,
        raw.FPDF_FORMFIELD_COMBOBOX,
        raw.FPDF_FORMFIELD_LISTBOX,
    )
    for i in range(raw.FPDFPage_GetAnnotCount(page) if form else 0):
        field = raw.FPDFPage_GetAnnot(page, i)
        if raw.FPDFAnnot_GetFormFieldType(form, field) in written:
            name = _text_of(raw.FPDFAnnot_GetFormFieldAlternateName, form, field)
            value = _text_of(raw.FPDFAnnot_GetFormFieldValue, form, field)
            if value.strip():
                yield name or _text_of(raw.FPDFAnnot_GetFormFieldName, form, field), value
        raw.FPDFPage_CloseAnnot(field)


def _text_of(get: Callable[..., int], *of: Any) -> str:
    """The text that a function of PDFium writes into a buffer."""
    buffer = (raw.FPDF_WCHAR * (get(*of, None, 0) // 2))()
    get(*of, buffer, 2 * len(buffer))
    return bytes(buffer)[:-2].decode("utf-16-le", "ignore")
