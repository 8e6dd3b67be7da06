"""Turn a passage into plain lines: Markdown without its markup, code as it is, rows of tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from revela.text.endings import CODE, MARKDOWN, suffix
from revela.text.headings import FENCE

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
_FENCE = re.compile(rf"\s*({FENCE})")
# Lines of signs: rules, below and above headings, around blocks of reStructuredText and AsciiDoc;
# between rows of a table; and above and below columns that are parted by spaces.
_SIGNS = re.compile(
    r"""=+ | -- | ([=\-~^"#*+_:.'])\1{2,} | (?:[-*_][ ]?){3,}
    | (?=.*[|+])[|+]?\s*:?[-=]+:?\s*(?:[|+]\s*:?[-=]+:?\s*)*[|+]?""",
    re.VERBOSE,
)
_SIGNS_OF_COLUMNS = re.compile(r"([=-])\1+(?:\s+\1+)+")
_HEADING = re.compile(r"\s{0,3}#{1,6}\s+(.*?)\s*#*\s*")
_QUOTE = re.compile(r"\A(?:\s{0,3}>\s?)+")
_ITEM = re.compile(r"\s*(?:[-*+]\s+(?:\[[ xX]\]\s+)?|(?P<number>\d{1,9}[.)])\s+)(?=\S)")
_CELLS = re.compile(r"(?<!\\)\|")
_NAMED_CELLS = re.compile(r"[^:;]{1,80}: [^;]*(?:; [^:;]{1,80}: [^;]*)+")  # table_lines.py's rows
# Headings of Org and AsciiDoc, commands of LaTeX, and the times of a log.
_LINE_OF_ITS_OWN = re.compile(
    r"\*{2,} |={2,} |\\[a-z]+\W|\W?\d{1,4}[-./:]\d\d[-./:]\d|[A-Z][a-z]{2} +\d+ \d\d:\d\d"
)
_CODE_END = re.compile(r"[{}()\[\];:,]\s*$")

Kind = Literal["prose", "heading", "item", "row", "columns", "code"]


class Line(NamedTuple):
    """A line as it is shown.

    Attributes:
        number: its number in the passage.
        heading: for a row of a table, and signs below it, the number of the table's first line.
        begins: whether it begins a paragraph; otherwise it continues the line before.
    """

    text: str
    kind: Kind
    number: int
    heading: int | None = None
    begins: bool = True


def plain(text: str) -> str:
    """Remove Markdown's markup: links, emphasis, images, badges. Line breaks are kept."""
    if not re.search(r"[`\[*_~<\\]", text):
        return text

    def bare(found: re.Match[str]) -> str:
        text = found["link"] or found["starred"] or found["barred"] or found["struck"]
        kept = plain(text) if text else found["code"] or found["address"] or found["escaped"] or ""
        if " " in (found["image"] or "").strip():  # one word is a file's name
            kept = found["image"]
        return kept + "\n" * (found[0].count("\n") - kept.count("\n"))

    return _INLINE.sub(bare, text)


def ending_of(name: str) -> str:
    """The ending of a document's name, which gives its format; "" if it has none."""
    return suffix(name) if "." in name else ""


def lines_of(text: str, name: str = "") -> list[Line]:
    """The lines of a passage as they are shown; the format is that of the document's ``name``."""
    raw = re.sub("[\r\f]", " ", text).split("\n")
    ending = ending_of(name)
    if ending in CODE or (ending not in MARKDOWN and _is_code(raw)):
        return [Line(line.expandtabs(4).rstrip(), "code", i) for i, line in enumerate(raw)]
    is_markdown = ending in MARKDOWN or "](" in text or "```" in text
    fenced = _fenced(raw) if is_markdown else {}
    rest = "\n".join("" if i in fenced else line for i, line in enumerate(raw))
    found = [Line("", "prose", -1)]
    for i, line in enumerate((plain(rest) if is_markdown else rest).split("\n")):
        is_code = i in fenced
        found.append(Line(fenced[i], "code", i) if is_code else _line(line, found[-1], is_markdown))
    return found[1:]


def _is_code(raw: Sequence[str]) -> bool:
    filled = [line for line in raw if line.strip()]
    ended = sum(bool(_CODE_END.search(line)) for line in filled)
    return any(line[0].isspace() for line in filled) and 4 * ended >= len(filled)


def _fenced(raw: Sequence[str]) -> dict[int, str]:
    """The lines of Markdown's code blocks by number; the fences are blank."""
    fence, found = "", dict[int, str]()
    for i, line in enumerate(raw):
        mark = _FENCE.match(line)
        if mark and (not fence or mark[1].startswith(fence)):
            fence, found[i] = "" if fence else mark[1], ""
        elif fence:
            found[i] = line.expandtabs(4).rstrip()
    return found


def _line(line: str, before: Line, is_markdown: bool) -> Line:
    """A line that is not code. Lines of signs are blank; white space is collapsed."""
    number, line = before.number + 1, (_QUOTE.sub("", line) if is_markdown else line)
    text = line.strip("\n\r ")
    if _SIGNS.fullmatch(text):
        return Line("", "prose", number, before.heading)
    if _SIGNS_OF_COLUMNS.fullmatch(text):
        return Line("", "columns", number)
    if before.kind == "columns" and text:
        return Line(re.sub(r"\s{2,}", " | ", text), "columns", number)
    if is_markdown and (heading := _HEADING.fullmatch(line)):
        return Line(" ".join(heading[1].split()), "heading", number)
    is_bars = text.startswith("|") or text.count(" | ") > 1
    item = _ITEM.match(line)
    if not item and (is_bars or "\t" in text.strip()):
        cells = _CELLS.split(text.strip("|")) if is_bars else text.split("\t")
        shown = " | ".join(" ".join(cell.split()) for cell in cells).rstrip(" |")
        return Line(shown, "row", number, number if before.heading is None else before.heading)
    if item and is_markdown:
        text = f"{item['number'] or '•'} {line[item.end() :]}"
    is_row = _NAMED_CELLS.fullmatch(line) or _LINE_OF_ITS_OWN.match(line)
    kind: Kind = "item" if item else "row" if is_row else "prose"
    goes_on = kind == "prose" and bool(before.text) and before.kind in ("prose", "item")
    return Line(" ".join(text.split()), kind, number, begins=not goes_on)
