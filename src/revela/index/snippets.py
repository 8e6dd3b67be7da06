"""Make snippets: the part of a hit's passage with the rarest words of the query (sought.py), as
plain text (corpus/plain_lines.py), with these words marked.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import groupby, islice, takewhile
from typing import NamedTuple

from revela.corpus.chunk import sentences
from revela.corpus.headings import has_headings
from revela.corpus.plain_lines import Line, lines_of, plain
from revela.corpus.words import count_words
from revela.index.sought import Sought
from revela.types import Hit, evenly_spaced

CHARACTERS, LINES = 300, 6  # of a snippet, at most; characters of double width count twice
SPARE = 2  # times as many hits are searched for as are shown, as some may have equal texts
LONG_WORD = 40  # characters; a longer one may be cut
_BLANK = re.compile(r"\A\s*\n")


class Snippet(NamedTuple):
    """A text in one to ``LINES`` lines, the places (begin, end) of what is marked in it, and the
    line of the file and the page that the rarest of it stands on, where these are known.
    """

    text: str
    marks: list[tuple[int, int]]
    line: int | None = None
    page: int | None = None


def heading_of(hit: Hit) -> str:
    """A hit's heading: its title, and the headings that its text begins with; else its id."""
    own = (line.text for line in _headings(lines_of(hit.text, hit.id)))
    title = (plain(hit.title) if has_headings(hit.id) else hit.title).strip()
    parts = [*filter(None, title.split(" > ")), *own]
    # A file's first heading is its title too.
    return " > ".join(name for name, _ in groupby(parts)) or hit.id


def _headings(lines: Sequence[Line]) -> list[Line]:
    """The headings before all other lines, if there are others."""
    filled = [line for line in lines if line.text.strip()]
    found = list(takewhile(lambda line: line.kind == "heading", filled))
    return found if len(found) < len(filled) else []


class _Shown:
    """A passage as text in lines, and the index where each of its lines begins."""

    def __init__(self, lines: Sequence[Line]) -> None:
        parts, length = list[str](), 0
        self.begins, self.lines = list[int](), list[Line]()
        for line in lines:
            if not line.text.strip():
                continue
            goes_on = not line.begins and bool(self.lines)
            if parts:
                parts.append(" " if goes_on else "\n")
                length += 1
            self.begins.append(length)
            self.lines.append(line)
            parts.append(line.text)
            length += len(line.text)
        self.text = "".join(parts)
        wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in self.text[:2000])
        self.is_wide = 3 * wide > len(self.text[:2000])

    def at(self, place: int) -> Line:
        return self.lines[max(0, bisect_right(self.begins, place) - 1)]

    def starts(self, place: int) -> list[int]:
        """The indices where lines and sentences begin, up to a place, the last first."""
        begin = self.text.rfind("\n", 0, place) + 1
        found, at = [begin], begin
        if self.at(begin).kind in ("prose", "item"):
            for sentence in sentences(self.text[begin:place]):
                found.append(at)
                at += len(sentence)
        while begin:
            begin = self.text.rfind("\n", 0, begin - 1) + 1
            found.append(begin)
        return sorted(set(found), reverse=True)


def snippet(hit: Hit, sought: Sought, characters: int = CHARACTERS) -> Snippet:
    """The part of a hit's passage with the most of the words sought, by their idf, as plain text,
    without the headings that it begins with (``heading_of``).

    Args:
        hit: its text is the passage.
        sought: the query's words.
        characters: of the snippet, at most; all of the passage is shown if it fits.

    >>> from revela.index.bm25 import BM25
    >>> known = BM25(["Order **NW-1007** is late.", "Order NW-2 came."], "en")
    >>> hit = Hit("a.md", 1.0, "", "Order **NW-1007** is late.", line=3)
    >>> snippet(hit, Sought.of("NW-1007", known.terms, known.idf))
    Snippet(text='Order NW-1007 is late.', marks=[(6, 13)], line=3, page=None)
    """
    text = _BLANK.sub("", hit.text)
    all_lines = lines_of(text, hit.id)
    called = _headings(all_lines)
    shown = _Shown([line for line in all_lines if line not in called])
    characters = characters // 2 if shown.is_wide else characters
    lines = LINES if characters <= CHARACTERS else characters
    places = sought.places(shown.text)
    if len(shown.text) <= characters and shown.text.count("\n") < lines:
        spans = [(0, len(shown.text))]
    else:
        begin, end = _window(shown, places, characters, lines)
        spans = [(begin, end)]
        if (first := shown.at(begin).heading) is not None and shown.at(begin).kind == "row":
            spans.insert(0, _heading_of(shown, first, characters // 2))
    found, number = _cut(shown, spans, places)
    pages = "".join(text.split("\n")[: number + 1]).count("\f")
    return found._replace(
        line=None if hit.line is None else hit.line + number,
        page=None if hit.page is None else hit.page + pages,
    )


def _heading_of(shown: _Shown, number: int, most: int) -> tuple[int, int]:
    at = next(i for i, line in enumerate(shown.lines) if line.number >= number)
    return shown.begins[at], shown.begins[at] + min(most, len(shown.lines[at].text))


def _window(
    shown: _Shown, places: Sequence[tuple[int, int, str, float]], characters: int, lines: int
) -> tuple[int, int]:
    """Begin and end of what is shown."""
    first, past = _best(shown.text, places, characters, lines)
    begin = max(first - characters // 4, past - characters, 0)
    if begin:  # not within a word
        space = re.compile(r"\s").search(shown.text, begin - 1, min(first, begin + LONG_WORD))
        begin = space.end() if space else _between(shown.text, begin, first)
    for number, start in enumerate(shown.starts(first)):
        if past - start > characters or shown.text.count("\n", start, past) >= lines:
            break
        is_whole = len(shown.text) - start <= characters and shown.text.count("\n", start) < lines
        if number and not is_whole:
            break
        begin = start  # and what stands before, if there is room
    end = _end(shown.text, begin, past, characters, lines)
    return begin, end


def _best(
    text: str, places: Sequence[tuple[int, int, str, float]], characters: int, lines: int
) -> tuple[int, int]:
    """Begin and end of the first stretch with the greatest sum of its words' idf."""
    best, chosen, left = 0.0, (0, 0), 0
    held, weights = Counter[str](), dict[str, float]()
    breaks = [match.start() for match in re.finditer("\n", text)]
    for right, (_, end, term, weight) in enumerate(places):
        held[term] += 1
        weights[term] = weight
        while left < right and (
            end - places[left][0] > characters
            or bisect_right(breaks, end) - bisect_right(breaks, places[left][0]) >= lines
        ):
            held[places[left][2]] -= 1
            left += 1
        value = sum(weights[term] for term, count in held.items() if count)
        if value > best + 1e-9:
            best, chosen = value, (places[left][0], end)
    return chosen


def _between(text: str, place: int, limit: int) -> int:
    """The first place from this one on that is not before a combining mark."""
    while place < limit and unicodedata.category(text[place]).startswith("M"):
        place += 1
    return place


def _end(text: str, begin: int, past: int, characters: int, lines: int) -> int:
    """The end of a snippet: between words, after the last word sought."""
    end, at = min(len(text), begin + characters), begin - 1
    for _ in range(min(lines, end - begin)):
        at = text.find("\n", at + 1, end)
        if at < 0:
            break
    else:
        end = at if at >= past else end
    if end < len(text) and text[end] != "\n":
        space = max(text.rfind(" ", past, end), text.rfind("\n", past, end))
        longest = min(LONG_WORD, (end - begin) // 4)
        end = space if space > end - longest else _between(text, end, len(text))
    return max(end, past)


def _cut(
    shown: _Shown,
    spans: Sequence[tuple[int, int]],
    places: Sequence[tuple[int, int, str, float]],
) -> tuple[Snippet, int]:
    """The text of these spans, with dots where it is cut, and its marks; and the number of the line
    with the rarest of it.
    """
    merged = list[tuple[int, int]]()
    for begin, end, *_ in places:
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    text, marks = "", list[tuple[int, int]]()
    begin, end = spans[-1]
    for first, past in spans:
        text += "\n" if text else ""
        if first == begin and first > shown.text.rfind("\n", 0, first) + 1:
            text += "… "
        at = len(text) - first
        text += shown.text[first:past]
        marks += [(b + at, e + at) for b, e in merged if first <= b and e <= past]
        if past < len(shown.text) and shown.text[past] != "\n":
            text += " …" if text[-1:].isascii() else "…"
    words = defaultdict[int, dict[str, float]](dict)  # of each line
    for first, past, word, weight in places:
        if begin <= first and past <= end:
            words[shown.at(first).number][word] = weight
    most = max(words, key=lambda number: sum(words[number].values()), default=None)
    line = shown.at(begin).number if most is None and shown.lines else most or 0
    return _dedented(Snippet(text, marks), _indent(shown, begin, end)), line


def _indent(shown: _Shown, begin: int, end: int) -> int:
    """White space that all lines of code shown begin with."""
    if not shown.lines or shown.at(begin).kind != "code" or shown.text[:begin].rpartition("\n")[2]:
        return 0
    lines = [line for line in shown.text[begin:end].split("\n") if line.strip()]
    return min((len(line) - len(line.lstrip()) for line in lines), default=0)


def _dedented(found: Snippet, indent: int) -> Snippet:
    if not indent:
        return found
    starts = [0, *(match.end() for match in re.finditer("\n", found.text))]
    marks = [
        (begin - indent * bisect_right(starts, begin), end - indent * bisect_right(starts, begin))
        for begin, end in found.marks
    ]
    text = "\n".join(line[indent:] for line in found.text.split("\n"))
    return Snippet(text, marks)


def same_texts(texts: Sequence[str]) -> list[int | None]:
    """The index of the first earlier text that equals each text, but for white space, or None."""
    first = dict[str, int]()
    found = list[int | None]()
    for number, text in enumerate(texts):
        earlier = first.setdefault(" ".join(text.split()), number)
        found.append(earlier if earlier != number else None)
    return found


def distinct(hits: Sequence[Hit], k: int) -> dict[int, list[int]]:
    """The first k hits with different texts, by their indices, and the indices of the hits with the
    text of each. Hits without a text are different. ``SPARE`` says how many hits to ask for.

    >>> [a, b, c] = [Hit(name, 1.0, "", text) for name, text in zip("abc", ["One", "Two", "One "])]
    >>> distinct([a, b, c], 2)
    {0: [2], 1: []}
    """
    groups = dict[int, list[int]]()
    same = same_texts([hit.text.strip() or hit.id for hit in hits])
    for number, first in enumerate(same):
        if first is None:
            groups[number] = []
        else:
            groups[first].append(number)
    return dict(islice(groups.items(), k))


def examples_of(hits: Sequence[Hit], most: int = 3) -> list[str]:
    """Example queries: headings that occur once, or else sentences."""
    named = Counter(" ".join(heading_of(hit).rsplit(" > ", 1)[-1].split()) for hit in hits)
    found = [name for name, count in named.items() if count == 1 and _is_natural(name, 2)]
    if len(found) < most:
        found += [said for said in dict.fromkeys(map(_first_natural, hits)) if said]
    return [found[i] for i in evenly_spaced(len(found), most)] if found else []


def _first_natural(hit: Hit) -> str:
    """The first natural sentence of a passage."""
    lines = lines_of(hit.text, hit.id)
    texts = (line.text for line in lines if line.kind == "prose")
    all_said = (said.strip() for text in texts for said in sentences(text))
    return next((said for said in all_said if _is_natural(said, 4)), "")


def _is_natural(text: str, least: int) -> bool:
    """Whether a text is some words, and hardly anything but letters."""
    letters = sum(letter.isalpha() or letter.isspace() for letter in text)
    if not text[:1].isalnum() or len(text) > 80:
        return False
    return least <= count_words(text) <= 12 and letters >= 0.9 * len(text)
