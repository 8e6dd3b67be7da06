"""Make snippets: the part of a hit's passage with the rarest words of the query (highlight.py), as
plain text (searching/plain_lines.py), with these words marked.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, groupby, islice, takewhile
from typing import NamedTuple
from unicodedata import east_asian_width

import regex

from revela.searching.highlight import HighlightTerms, Match
from revela.searching.plain_lines import Line, ending_of, lines_of, plain
from revela.text.endings import CODE, MARKDOWN
from revela.text.sentences import sentences
from revela.types import Hit

CHARACTERS, LINES = 300, 6  # of a snippet, at most; characters of double width count twice
SPARE = 2  # search for this many times the hits to show, because some have equal texts
Span = tuple[int, int]
_BLANK = re.compile(r"\A\s*[\n\f]")  # a page without text ends with \f
_LINE, _BREAK = re.compile(".+"), re.compile("\n")
_ROW = re.compile(r":\d+\Z")
_MAIL = {".eml", ".mht", ".mhtml", ".mbox", ".mbx"}
# Fields, each with its lines, until a blank line; and the first comments of source code.
_FIELDS = re.compile(r"(?:[^\W\d][\w .-]{0,60}:(?:[ \t].*)?(?:\n(?:[ \t]|- ).*)*\n)+(?:[ \t]*\n)+")
_COMMENT = re.compile(
    r"(?:#!.*\n)?(?:[ \t]*(?:(?:#|//|--|;|%).*\n|/\*(?s:.*?)\*/.*\n|<!--(?s:.*?)-->.*\n|\n))+"
)
_LICENCE = re.compile(r"copyright|licen[cs]e|spdx-", re.I)
_SPACE, _WORD_START = re.compile(r"\s"), re.compile(r"(?<=\s)\S")
_NO_MARK = regex.compile(r"\P{M}|\Z")  # a text is not cut before a combining mark


class Snippet(NamedTuple):
    """A text in one to ``LINES`` lines, the places (begin, end) of what is marked in it, and the
    line of the file and the page that the rarest of it stands on, where these are known.
    """

    text: str
    marks: list[Span]
    line: int | None = None
    page: int | None = None


def heading_of(hit: Hit) -> str:
    """A hit's heading: its title, and the headings that its text begins with; else its id."""
    own = (line.text for line in _headings(lines_of(hit.text, hit.id)))
    title = (plain(hit.title) if ending_of(hit.id) in MARKDOWN else hit.title).strip()
    parts = [*filter(None, title.split(" > ")), *own]
    # A file's first heading is its title too.
    return " > ".join(name for name, _ in groupby(parts)) or hit.id


def _headings(lines: Sequence[Line]) -> list[Line]:
    """The headings before all other lines, if there are others."""
    filled = [line for line in lines if line.text.strip()]
    found = list(takewhile(lambda line: line.kind == "heading", filled))
    return found if len(found) < len(filled) else []


def snippet(hit: Hit, terms: HighlightTerms, characters: int = CHARACTERS) -> Snippet:
    """The part of a hit's passage with the most of the query's words, by their idf, as plain text,
    without the headings that it begins with (``heading_of``).

    Args:
        hit: its text is the passage.
        terms: the query's words.
        characters: of the snippet, at most; all of the passage is shown if it fits.

    >>> from revela.ranking.bm25 import BM25
    >>> known = BM25(["Order **NW-1007** is late.", "Order NW-2 came."], "en")
    >>> hit = Hit("a.md", 1.0, "", "Order **NW-1007** is late.", line=3)
    >>> snippet(hit, HighlightTerms.of("NW-1007", known.terms, known.idf))
    Snippet(text='Order NW-1007 is late.', marks=[(6, 13)], line=3, page=None)
    """
    passage = _BLANK.sub("", hit.text)
    lines = lines_of(passage, hit.id)
    headings = _headings(lines)
    text = [line for line in lines if line not in headings]
    shown = _Shown(text, characters)
    matches = terms.matches(shown.text)
    head = _head(hit, passage) if characters <= CHARACTERS else 0
    body = [line for line in text if line.number >= head and line.text.strip()]
    if head and body:
        own = _headings(body)
        rest = _Shown([line for line in body if line not in own], characters)
        found = terms.matches(rest.text)
        if {match.term for match in matches} == {match.term for match in found}:
            shown, matches = rest, found
    begin, end = shown.window(matches)
    number = shown.line_of_rarest(begin, end, matches)
    pages = "".join(passage.split("\n")[: number + 1]).count("\f")
    line, page = hit.line and hit.line + number, hit.page and hit.page + pages
    return Snippet(*shown.cut(begin, end, matches), line, page)


def _head(hit: Hit, passage: str) -> int:
    """The number of lines before a document's text: front matter, the header of a mail, and a
    comment with a licence. They are shown only if a word of the query is nowhere else.
    """
    ending = ending_of(_ROW.sub("", hit.id))
    if hit.chunk:
        return 0
    if ending in CODE:
        comment = _COMMENT.match(passage)
        found = comment if comment and _LICENCE.search(comment[0]) else None
    else:
        found = _FIELDS.match(passage) if ending in MARKDOWN | _MAIL else None
    return found[0].count("\n") if found else 0


class _Shown:
    """A passage as text in lines, and the index where each of its lines begins."""

    def __init__(self, lines: Sequence[Line], characters: int) -> None:
        self.lines = [line for line in lines if line.text.strip()] or [Line("", "prose", 0)]
        text, self.begins = "", list[int]()
        for line in self.lines:
            text += "" if not text else "\n" if line.begins else " "
            self.begins.append(len(text))
            text += line.text
        self.text, start = text, text[:2000]
        is_wide = 3 * sum(east_asian_width(letter) in "WF" for letter in start) > len(start)
        self.characters = characters // 2 if is_wide else characters
        self.most_lines = LINES if self.characters <= CHARACTERS else self.characters

    def at(self, place: int) -> Line:
        return self.lines[bisect_right(self.begins, place) - 1]

    def fits(self, begin: int, end: int) -> bool:
        is_short = end - begin <= self.characters
        return is_short and self.text.count("\n", begin, end) < self.most_lines

    def window(self, matches: Sequence[Match]) -> tuple[int, int]:
        """Begin and end of what is shown: from the sentence or line of the best matches on, or from
        an earlier one where the end of the passage leaves room.
        """
        text, (first, past) = self.text, self._best(matches)
        starts = self._starts(first)
        begin = starts[0]
        if not self.fits(begin, past):  # it begins at a word
            begin = max(first - self.characters // 4, past - self.characters)
            found = _WORD_START.search(text, begin, first + 1) or _NO_MARK.search(text, begin)
            begin = found.start()
        begin = min([begin, *(start for start in starts if self.fits(start, len(text)))])
        end = min(len(text), begin + self.characters)
        for line in islice(_BREAK.finditer(text, begin, end), self.most_lines - 1, None):
            return begin, line.start()
        if end < len(text) and text[end] != "\n":  # it ends at a word
            spaces = list(_SPACE.finditer(text, max(past, end - self.characters // 4), end))
            end = spaces[-1].start() if spaces else _NO_MARK.search(text, end).start()
        return begin, end

    def _best(self, matches: Sequence[Match]) -> tuple[int, int]:
        """Begin and end of the first stretch with the greatest sum of its words' idf."""
        best, chosen, left = 0.0, (0, 0), 0
        for right, match in enumerate(matches):
            while left < right and not self.fits(matches[left].begin, match.end):
                left += 1
            value = sum({found.term: found.idf for found in matches[left : right + 1]}.values())
            if value > best + 1e-9:
                best, chosen = value, (matches[left].begin, match.end)
        return chosen

    def _starts(self, place: int) -> list[int]:
        """The indices where lines and sentences begin, up to a place, the last first."""
        begin = self.text.rfind("\n", 0, place) + 1
        found = {0, *(line.end() for line in _BREAK.finditer(self.text, 0, place))}
        if self.at(begin).kind in ("prose", "item"):
            lengths = map(len, sentences(self.text[begin:place]))
            found.update([*accumulate(lengths, initial=begin)][:-1])
        return sorted(found, reverse=True)

    def cut(self, begin: int, end: int, matches: Sequence[Match]) -> tuple[str, list[Span]]:
        """The text of this span, with dots where it is cut, and its marks. A row stands below the
        first row of its table; code is shown without the indentation of all its lines.
        """
        spans, first = [(begin, end)], self.at(begin)
        i = [line.heading for line in self.lines].index(first.heading)
        if first.heading is not None and self.lines[i] != first:
            length = min(self.characters // 2, len(self.lines[i].text))
            spans.insert(0, (self.begins[i], self.begins[i] + length))
        at_start, indent = begin in (0, self.text.rfind("\n", 0, begin) + 1), 0
        if first.kind == "code" and at_start:
            lines = [line for line in self.text[begin:end].split("\n") if line.strip()]
            indent = min((len(line) - len(line.lstrip()) for line in lines), default=0)
        text, marks, merged = "", list[Span](), _merged(matches)
        found = (line.span() for span in spans for line in _LINE.finditer(self.text, *span))
        for start, stop in found:
            text += "\n" if text else ""
            text += "" if at_start or start != begin else "… "
            shift = len(text) - start - indent
            text += self.text[start + indent : stop]
            marks += [(b + shift, e + shift) for b, e in merged if start <= b and e <= stop]
            if self.text[stop : stop + 1] not in ("", "\n"):
                text += " …" if text[-1:].isascii() else "…"
        return text, marks

    def line_of_rarest(self, begin: int, end: int, matches: Sequence[Match]) -> int:
        """The number of the line in this span whose words have the greatest sum of idf."""
        words = defaultdict[int, dict[str, float]](dict)
        for match in matches:
            if begin <= match.begin and match.end <= end:
                words[self.at(match.begin).number][match.term] = match.idf
        first = self.at(begin).number
        return max(words, key=lambda number: sum(words[number].values()), default=first)


def _merged(matches: Sequence[Match]) -> list[Span]:
    """Begin and end of the matches; those that touch are one."""
    merged = list[Span]()
    for begin, end, *_ in matches:
        if merged and begin <= merged[-1][1]:
            begin, end = merged[-1][0], max(end, merged.pop()[1])
        merged.append((begin, end))
    return merged
