"""Split Markdown into sections, and give each chunk the headings above it as title."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from revela.text.endings import MARKDOWN, suffix
from revela.types import Document

LONGEST = 200  # maximum characters of a heading in a chunk's title
FENCE = r"`{3,}+(?!.*`)|~{3,}"  # of a block of code; code within a line may begin with ``` too
_MARKED = rf" {{0,3}}(?:({FENCE})(.*)|(#{{1,6}})[ \t]+(\S.*))"
_MARKS = r"\n {0,3}(==+|--+)[ \t]*\r?$"
# A single line below a blank one that is not a list item, a quotation or a row of a table.
_UNDERLINED = rf"(?:\A|(?<=\n\n)|(?<=\n\r\n)) {{0,3}}(?![-+*>|]|\d+[.)][ \t])(\S.*){_MARKS}"
_LINE = re.compile(rf"^{_MARKED}()()$(?:\s*\n)?", re.MULTILINE)
_LINE_OR_UNDERLINED = re.compile(rf"^(?:{_MARKED}$|{_UNDERLINED})(?:\s*\n)?", re.MULTILINE)
_HAS_UNDERLINED = re.compile(_MARKS, re.MULTILINE)
_CLOSING = re.compile(r"\s+#*$")


class Heading(NamedTuple):
    """A heading of Markdown.

    Attributes:
        place: index of its first #, or of its words if they are underlined.
        level: from 1, the highest.
        words: its text.
        start: index where its line begins.
        end: index where the blank lines below it end.
    """

    place: int
    level: int
    words: str
    start: int
    end: int


END = Heading(sys.maxsize, 7, "", sys.maxsize, sys.maxsize)


def titles(document: Document, chunks: Sequence[str]) -> list[str]:
    """The title of each chunk: the document's and, in Markdown, the headings above the chunk. A
    heading that begins the chunk is left out. ``chunks`` are in order; chunks of white space may be
    missing.

    >>> text = "# Guide\\nFirst.\\n\\n## Install\\nRun pip.\\n\\nThen this."
    >>> chunks = ["# Guide\\nFirst.\\n\\n", "## Install\\nRun pip.\\n\\n", "Then this."]
    >>> titles(Document("a.md", text), chunks)
    ['', 'Guide', 'Guide > Install']
    """
    title = document.title.strip()
    if suffix(document.id) not in MARKDOWN:
        return [title] * len(chunks)
    # A first heading that equals the title is not repeated.
    repeated = [title] if title else []
    headings, at, out = _headings(document.text), 0, list[str]()
    after = next(headings, END)
    path: list[Heading] = []
    for chunk in chunks:
        start = document.text.index(chunk, at)
        at = start + len(chunk)
        begins = start + len(chunk) - len(chunk.lstrip())
        while after.place < begins:
            path = [*(above for above in path if above.level < after.level), after]
            after = next(headings, END)
        own = after.level if after.place == begins else END.level
        above = [heading.words for heading in path if heading.level < own]
        out.append(" > ".join(above if above[:1] == repeated else [*repeated, *above]))
    return out


class Section(NamedTuple):
    """Consecutive headings and the text below them; joined, sections are the document's text.

    Attributes:
        above: level of the heading above the first one; 0: none.
        level: level of the last heading.
        headings: the headings, with only white space between them.
        text: the text below.
    """

    above: int
    level: int
    headings: str
    text: str


def sections(text: str) -> Iterator[Section]:
    """The sections of Markdown in order; the text before the first heading is one, too.

    A heading without text shares a section with the next heading, unless the level of that is
    higher.
    """
    levels = [0]
    start = end = above = 0
    for heading in _headings(text):
        begins = heading.start > end or heading.level <= above
        if begins:
            yield Section(above, levels[-1], text[start:end], text[end : heading.start])
            start = heading.start
        while levels[-1] >= heading.level:
            levels.pop()
        above = levels[-1] if begins else above
        levels.append(heading.level)
        end = heading.end
    yield Section(above, levels[-1], text[start:end], text[end:])


def first_heading(text: str) -> str:
    """The words of the first heading of Markdown if it has level 1; else "".

    >>> first_heading("[![build](a.svg)](b)\\n\\n# Bees\\n\\nThey dance.")
    'Bees'
    """
    first = next(_headings(text), END)
    return first.words if first.level == 1 else ""


def _headings(text: str) -> Iterator[Heading]:
    """Headings in order; a # in fenced code does not begin one."""
    fence = ""
    pattern = _LINE_OR_UNDERLINED if _HAS_UNDERLINED.search(text) else _LINE  # twice as fast
    for line in pattern.finditer(text):
        mark, info, level, heading, underlined, marks = line.groups()
        if fence:
            if mark and mark.startswith(fence) and not info.strip():
                fence = ""
        elif mark:
            fence = mark
        elif level:
            words = _CLOSING.sub("", heading[:LONGEST].rstrip())
            yield Heading(line.start(3), len(level), words, *line.span())
        else:
            words = underlined[:LONGEST].rstrip()
            yield Heading(line.start(5), 1 if marks[0] == "=" else 2, words, *line.span())
