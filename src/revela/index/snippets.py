"""What is shown of a hit: the part of its passage with the rarest words of the query, as plain
text, and the places of these words in it.

The words are found as BM25 finds them (language.py): by their stems, and pairs of characters where
words are not spaced. An identifier such as NW-1007 is one word.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise, takewhile
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import regex
from numpy.typing import NDArray

from revela.corpus.chunk import sentences
from revela.corpus.endings import CODE, suffix
from revela.corpus.headings import has_headings
from revela.corpus.words import count_words
from revela.index.language import ENGLISH_STOP_WORDS, LETTER, Terms, normalised
from revela.types import Hit, evenly_spaced

CHARACTERS, LINES = 300, 6  # of a snippet, at most; characters of double width count twice
QUERY = 1000  # characters of a query whose words are marked
LONG_WORD = 40  # characters; a longer one may be cut
RARE = 0.25  # of the greatest idf: words below it are not marked, as they stand everywhere
# What questions are made of, and BM25 counts.
QUESTION_WORDS = frozenset([
    *ENGLISH_STOP_WORDS, *"""about am been can could did do does from had has have he her his how i
    its me my our she should so than them us we were what when where which who whom whose why would
    you your""".split()  # noqa: SIM905
])  # fmt: skip
_JOINT = r"[-_./:@#+\\]{1,2}"
_IDENTIFIER = regex.compile(rf"{LETTER}+(?:{_JOINT}{LETTER}+)+", regex.V1)
_NAMES = re.compile(r"\d|[_.@\\]|::")  # a sign of an identifier; well-known and he/she have none
_PART = regex.compile(rf"{LETTER}+", regex.V1)
_HIRAGANA = re.compile("[\u3041-\u309f]")
_CLUSTER = regex.compile(r"\X")

_TAGS = (
    "a|abbr|b|blockquote|br|center|code|dd|details|div|dl|dt|em|figure|font|h[1-6]|hr|i|img|kbd|li|"
    "ol|p|picture|pre|s|samp|small|source|span|strong|sub|summary|sup|table|tbody|td|th|thead|tr|u|"
    "ul|video"
)
_WORDS = r"(?:[^\[\]\\]|\\.){0,500}"
_TARGET = r"""(?:\([^()\s]{0,2000}(?:\([^()\s]{0,200}\)[^()\s]{0,200})?
    (?:\s+["'(][^"\n]{0,200}["')])?\)|\[[^\[\]\n]{0,100}\])"""
_INLINE = re.compile(
    rf"""(?P<ticks>`{{1,3}})(?P<code>[^`\n]{{1,500}})(?P=ticks)
    |<!--.{{0,1000}}?-->
    |\[\s*!\[{_WORDS}\]{_TARGET}[^\[\]]{{0,200}}\]{_TARGET}    # a badge
    |!\[(?P<image>{_WORDS})\]{_TARGET}
    |\[(?P<link>{_WORDS})\]{_TARGET}
    |^[ ]{{0,3}}\[[^\[\]\n]{{1,200}}\]:[ \t]*\S.{{0,500}}$     # where a link leads
    |<(?P<address>(?:https?://|mailto:)[^<>\s]{{1,2000}})>
    |</?(?:{_TAGS})(?:\s[^<>]{{0,1000}})?/?>
    |(?<![\w*])(?P<star>\*{{1,3}})(?=[^\s*])(?P<starred>[^*]{{0,300}}[^\s*])(?P=star)(?!\*)
    |(?<![\w])(?P<bar>_{{1,3}})(?=[^\s_])(?P<barred>[^_]{{0,300}}[^\s_])(?P=bar)(?!\w)
    |~~(?P<struck>[^~\n]{{1,300}})~~
    |\\(?P<escaped>[!-/:-@\[-`{{-~])""",
    re.VERBOSE | re.MULTILINE | re.DOTALL | re.IGNORECASE,
)
_KEPT = ("link", "starred", "barred", "struck")  # and cleaned in turn
_FENCE = re.compile(r"\s*(`{3,}|~{3,})")
_RULE = re.compile(r"\s*(?:=+|-{2,}|(?:[-*_] ?){3,})\s*")  # also the line below a heading
_HEADING = re.compile(r"\s{0,3}#{1,6}\s+(.*?)\s*#*\s*")
_QUOTE = re.compile(r"(?:\s{0,3}>\s?)+")
_ITEM = re.compile(r"\s*(?:[-*+]\s+(?:\[[ xX]\]\s+)?|(?P<number>\d{1,9}[.)])\s+)(?=\S)")
_DASHES = re.compile(r"\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*")  # below a table's heading
_CELLS = re.compile(r"(?<!\\)\|")
_BLANK = re.compile(r"\A\s*\n")
_CODE_END = re.compile(r"[{}()\[\];:,]\s*$")

Kind = Literal["prose", "heading", "item", "row", "code"]


class Snippet(NamedTuple):
    """A text in one to ``LINES`` lines, the places (begin, end) of what is marked in it, and how
    many lines and pages of the passage lie before the line with the rarest of it.
    """

    text: str
    marks: list[tuple[int, int]]
    line: int = 0
    page: int = 0


@dataclass(frozen=True)
class Sought:
    """The words of a query that are marked, and their idf; identifiers are in lower case."""

    analyzer: Terms
    terms: dict[str, float]
    identifiers: dict[str, float]
    unstemmed: frozenset[str] = frozenset()  # terms that are the words themselves

    @classmethod
    def of(
        cls, query: str, analyzer: Terms, idf: Callable[[Sequence[str]], NDArray[np.float64]]
    ) -> Sought:
        """The words of a query by their idf; those that stand everywhere are left out."""
        query = normalised(query[:QUERY])
        places = list(analyzer.places(query))
        *found, absent = idf([*(term for *_, term in places), "\0"]).tolist()
        weights = dict(zip(places, found, strict=True))
        names, identifiers = list[tuple[int, int]](), dict[str, float]()
        for name in _IDENTIFIER.finditer(query):
            if _NAMES.search(name[0]):
                begin, end = name.span()
                names.append((begin, end))
                inside = (w for (b, e, _), w in weights.items() if begin <= b and e <= end)
                identifiers[name[0].lower()] = sum(inside)
        words, before = dict[str, float](), (-1, -1)
        for i, (begin, end, term) in enumerate(places):
            # Of getFileName the whole; of characters in a row the longest n-grams.
            near = places[max(0, i - 3) : i + 4]
            is_part = (begin, end) == before or _is_inside(begin, end, near)
            before = begin, end
            if not is_part and not any(b <= begin and end <= e for b, e in names):
                words[term] = weights[begin, end, term]
        common = QUESTION_WORDS.union(*map(analyzer, QUESTION_WORDS))
        telling = {t: w for t, w in words.items() if t not in common and not _HIRAGANA.search(t)}
        words = telling or words
        least = RARE * max((weight for weight in words.values() if weight < absent), default=0)
        kept = {term: weight for term, weight in words.items() if weight >= least}
        unstemmed = (t for b, e, t in places if t in kept and _is_word(t, query[b:e]))
        return cls(analyzer, kept, identifiers, frozenset(unstemmed))

    def places(self, text: str) -> list[tuple[int, int, str, float]]:
        """Begin, end, word and idf of each in a text, in order."""
        plain, begins, ends = _normalised(text)
        found = [
            (begins[begin], ends[end - 1], known, self.terms[known])
            for begin, end, term in self.analyzer.places(plain)
            if (known := self._known(term, plain[begin:end]))
        ]
        lower = plain.lower()
        for name, weight in self.identifiers.items():
            if not all(part in lower for part in _PART.findall(name)):
                continue
            for match in _whole(name).finditer(plain):
                begin, end = match.span()
                found.append((begins[begin], ends[end - 1], name, weight))
        return sorted(found)

    def _known(self, term: str, word: str) -> str:
        """The term sought that this one of a text is; "" if there is none. Where words are not
        stemmed, as the text is in several languages, some letters more or less are its ending.
        """
        if term in self.terms:
            return term
        if not self.unstemmed or len(term) < 4 or not _is_word(term, word):
            return ""
        return next((known for known in self.unstemmed if _has_ending(known, term)), "")


def _is_word(term: str, word: str) -> bool:
    return term == word.lower() and word.isalpha()


def _has_ending(one: str, other: str) -> bool:
    """Whether one is the other with up to three letters at its end, fewer for short words."""
    short, long = sorted((one, other), key=len)
    return long.startswith(short) and len(long) - len(short) <= min(3, len(short) - 3)


def _is_inside(begin: int, end: int, places: Sequence[tuple[int, int, str]]) -> bool:
    return any(b <= begin and end <= e and e - b > end - begin for b, e, _ in places)


@lru_cache
def _whole(name: str) -> regex.Pattern[str]:
    """An identifier with any signs between its parts; some between digits."""
    parts = _PART.findall(name)
    pattern = regex.escape(parts[0])
    for last, part in pairwise(parts):
        least = 1 if last[-1].isdigit() and part[0].isdigit() else 0
        pattern += rf"[\W_]{{{least},2}}{regex.escape(part)}"
    return regex.compile(rf"(?<!{LETTER}){pattern}(?!{LETTER})", regex.V1 | regex.IGNORECASE)


def _normalised(text: str) -> tuple[str, Sequence[int], Sequence[int]]:
    """A text as the analyzer reads it; and of each of its characters, begin and end in the text."""
    if normalised(text) == text:
        return text, range(len(text)), range(1, len(text) + 1)
    plain, begins, ends = list[str](), list[int](), list[int]()
    for cluster in _CLUSTER.finditer(text):
        part = normalised(cluster[0])
        plain.append(part)
        begins += [cluster.start()] * len(part)
        ends += [cluster.end()] * len(part)
    return "".join(plain), begins, ends


class Line(NamedTuple):
    """A line as it is shown; ``number``: in the passage, ``heading``: of a row, the table's first
    line, if that is another one.
    """

    text: str
    kind: Kind
    number: int
    heading: int | None = None
    begins: bool = True  # rather than goes on with the line before


def plain(text: str) -> str:
    """Markdown without its signs: links, emphasis, images, badges; with as many line breaks."""
    if not re.search(r"[`\[*_~<\\]", text):
        return text

    def bare(found: re.Match[str]) -> str:
        kept = next((found[name] for name in _KEPT if found[name] is not None), None)
        if kept is not None:
            kept = plain(kept)
        else:
            kept = found["code"] or found["address"] or found["escaped"] or ""
            if found["image"] and " " in found["image"].strip():  # else it names a picture
                kept = found["image"]
        return kept + "\n" * (found[0].count("\n") - kept.count("\n"))

    return _INLINE.sub(bare, text)


def lines_of(text: str, name: str = "") -> list[Line]:
    """The lines of a passage as they are shown; ``name``: of the document, whose ending says what
    it is.
    """
    raw = re.sub("[\r\f]", " ", text).split("\n")
    ending = suffix(Path(name)) if "." in name else ""
    if ending in CODE or (not has_headings(name) and _is_code(raw)):
        return [Line(line.expandtabs(4).rstrip(), "code", i) for i, line in enumerate(raw)]
    if has_headings(name) or "](" in text or "```" in text:
        return list(_markdown(raw))
    kinds: Iterator[tuple[str, Kind]] = ((s, "item" if _ITEM.match(s) else "prose") for s in raw)
    return list(_rows(Line(line, kind, i) for i, (line, kind) in enumerate(kinds)))


def _is_code(raw: Sequence[str]) -> bool:
    filled = [line for line in raw if line.strip()]
    ended = sum(bool(_CODE_END.search(line)) for line in filled)
    return any(line[0].isspace() for line in filled) and 4 * ended >= len(filled)


def _markdown(raw: Sequence[str]) -> Iterator[Line]:
    """Lines of Markdown, without its signs; those of code keep theirs."""
    fence, kept, coded = "", list[str](), list[bool]()
    for line in raw:
        mark = _FENCE.match(line)
        if mark and (not fence or mark[1].startswith(fence)):
            fence = "" if fence else mark[1]
            kept.append("")
            coded.append(True)
        else:
            kept.append(line)
            coded.append(bool(fence))
    outside = "\n".join("" if code else line for line, code in zip(kept, coded, strict=True))
    cleaned = plain(outside).split("\n")
    lines = list[Line]()
    for i, code in enumerate(coded):
        lines.append(Line(kept[i].expandtabs(4), "code", i) if code else _block(cleaned[i], i))
    yield from _rows(iter(lines))


def _block(line: str, number: int) -> Line:
    """A line of Markdown outside of code."""
    if _DASHES.fullmatch(line) and "|" in line:
        return Line("|", "row", number)
    if _RULE.fullmatch(line):
        return Line("", "prose", number)
    line = _QUOTE.sub("", line, count=1) if _QUOTE.match(line) else line
    if heading := _HEADING.fullmatch(line):
        return Line(heading[1], "heading", number)
    if item := _ITEM.match(line):
        return Line(f"{item['number'] or '•'} {line[item.end() :]}", "item", number)
    return Line(line, "prose", number)


def _rows(lines: Iterator[Line]) -> Iterator[Line]:
    """The lines, where rows of tables are marked as such; white space is single."""
    first: int | None = None  # of the table
    blank = True
    for line in lines:
        if line.kind == "code":
            first, blank = None, True
            yield line
            continue
        text = line.text.strip("\n\r ")
        is_bars = text.startswith("|") or text.count(" | ") > 1
        if line.kind in ("prose", "row") and (is_bars or "\t" in text.strip()):
            cells = _CELLS.split(text.strip("|")) if is_bars else text.split("\t")
            shown = " | ".join(" ".join(cell.split()) for cell in cells).rstrip(" |")
            first, heading = (line.number, None) if first is None else (first, first)
            yield Line(shown, "row", line.number, heading)
            continue
        text = " ".join(text.split())
        goes_on = line.kind == "prose" and not blank
        blank, first = line.kind == "heading" or not text, None
        yield Line(text, line.kind, line.number, None, not goes_on)


def heading_of(hit: Hit) -> str:
    """What a hit is called: its title, and the headings that its text begins with; else its id."""
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
    """A passage as one text in lines, with where each line of the passage begins in it."""

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
        """Where the lines and sentences up to a place begin, the last first."""
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


def snippet(text: str, sought: Sought, name: str = "", characters: int = CHARACTERS) -> Snippet:
    """The part of a passage with the most of the words sought, by their idf, as plain text, without
    the headings that it begins with (``heading_of``).

    Args:
        text: the passage.
        sought: the query's words.
        name: the document's id.
        characters: of the snippet, at most; all of the passage is shown if it fits.

    >>> from revela.index.bm25 import BM25
    >>> known = BM25(["Order **NW-1007** is late.", "Order NW-2 came."], "en")
    >>> snippet("Order **NW-1007** is late.", Sought.of("NW-1007", known.terms, known.idf), "a.md")
    Snippet(text='Order NW-1007 is late.', marks=[(6, 13)], line=0, page=0)
    """
    text = _BLANK.sub("", text)
    all_lines = lines_of(text, name)
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
    found = _cut(shown, spans, places)
    before = text.split("\n")[: found.line + 1]
    return found._replace(page="".join(before).count("\f"))


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
    """Begin and end of the stretch whose words have the greatest sum of idf, the first of them."""
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
    """Where a snippet ends: between words, after the last one sought."""
    end, at = min(len(text), begin + characters), begin - 1
    for _ in range(min(lines, end - begin)):
        at = text.find("\n", at + 1, end)
        if at < 0:
            break
    else:
        end = at if at >= past else end
    if end < len(text) and text[end] != "\n":
        space = max(text.rfind(" ", past, end), text.rfind("\n", past, end))
        end = space if space > end - LONG_WORD else _between(text, end, len(text))
    return max(end, past)


def _cut(
    shown: _Shown,
    spans: Sequence[tuple[int, int]],
    places: Sequence[tuple[int, int, str, float]],
) -> Snippet:
    """The text of these spans, with dots where it is cut, and its marks."""
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
    return _dedented(Snippet(text, marks, line), _indent(shown, begin, end))


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
    return Snippet(text, marks, found.line)


def same_texts(texts: Sequence[str]) -> list[int | None]:
    """Of each text, the number of the first one before that is equal but for white space."""
    first = dict[str, int]()
    found = list[int | None]()
    for number, text in enumerate(texts):
        earlier = first.setdefault(" ".join(text.split()), number)
        found.append(earlier if earlier != number else None)
    return found


def examples_of(hits: Sequence[Hit], most: int = 3) -> list[str]:
    """Queries to begin with: headings that stand once, or else sentences."""
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
