"""Turn a passage into plain lines: Markdown without its markup, code as it is, rows of tables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from revela.corpus.endings import CODE, suffix
from revela.corpus.headings import has_headings

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
_KEPT = ("link", "starred", "barred", "struck")  # their text is kept, and cleaned, too
_FENCE = re.compile(r"\s*(`{3,}|~{3,})")
# Lines of signs: rules, below and above headings, around blocks of reStructuredText and AsciiDoc;
# between rows of a table; and above and below columns that are parted by spaces.
_SIGNS = re.compile(
    r"""=+ | -- | ([=\-~^"#*+_:.'])\1{2,} | (?:[-*_][ ]?){3,}
    | (?=.*[|+])[|+]?\s*:?[-=]+:?\s*(?:[|+]\s*:?[-=]+:?\s*)*[|+]?""",
    re.VERBOSE,
)
_SIGNS_OF_COLUMNS = re.compile(r"([=-])\1+(?:\s+\1+)+")
_GAP = re.compile(r"\s{2,}")
_HEADING = re.compile(r"\s{0,3}#{1,6}\s+(.*?)\s*#*\s*")
_QUOTE = re.compile(r"(?:\s{0,3}>\s?)+")
_ITEM = re.compile(r"\s*(?:[-*+]\s+(?:\[[ xX]\]\s+)?|(?P<number>\d{1,9}[.)])\s+)(?=\S)")
_CELLS = re.compile(r"(?<!\\)\|")
_NAMED_CELLS = re.compile(r"[^:;]{1,80}: [^;]*(?:; [^:;]{1,80}: [^;]*)+")  # table_lines.py's rows
# Headings of Org and AsciiDoc, commands of LaTeX, and the times of a log.
_LINE_OF_ITS_OWN = re.compile(
    r"\*{2,} |={2,} |\\[a-z]+\W|\W?\d{1,4}[-./:]\d\d[-./:]\d|[A-Z][a-z]{2} +\d+ \d\d:\d\d"
)
_CODE_END = re.compile(r"[{}()\[\];:,]\s*$")

Kind = Literal["prose", "heading", "item", "row", "code"]


class Line(NamedTuple):
    """A line as it is shown.

    Attributes:
        number: its number in the passage.
        heading: for a row, the number of the table's first line, if that is another line.
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
        kept = next((found[name] for name in _KEPT if found[name] is not None), None)
        if kept is not None:
            kept = plain(kept)
        else:
            kept = found["code"] or found["address"] or found["escaped"] or ""
            if found["image"] and " " in found["image"].strip():  # one word is a file's name
                kept = found["image"]
        return kept + "\n" * (found[0].count("\n") - kept.count("\n"))

    return _INLINE.sub(bare, text)


def lines_of(text: str, name: str = "") -> list[Line]:
    """The lines of a passage as they are shown; the format is that of the document's ``name``."""
    raw = re.sub("[\r\f]", " ", text).split("\n")
    ending = suffix(Path(name)) if "." in name else ""
    if ending in CODE or (not has_headings(name) and _is_code(raw)):
        return [Line(line.expandtabs(4).rstrip(), "code", i) for i, line in enumerate(raw)]
    if has_headings(name) or "](" in text or "```" in text:
        return list(_markdown(raw))
    return list(_rows(Line(line, _kind(line), i) for i, line in enumerate(raw)))


def _kind(line: str) -> Kind:
    """The kind of a line of plain text."""
    if _ITEM.match(line):
        return "item"
    is_row = _NAMED_CELLS.fullmatch(line) or _LINE_OF_ITS_OWN.match(line)
    return "row" if is_row else "prose"


def _is_code(raw: Sequence[str]) -> bool:
    filled = [line for line in raw if line.strip()]
    ended = sum(bool(_CODE_END.search(line)) for line in filled)
    return any(line[0].isspace() for line in filled) and 4 * ended >= len(filled)


def _markdown(raw: Sequence[str]) -> Iterator[Line]:
    """Lines of Markdown without markup; lines of code are kept as they are."""
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
    if _SIGNS.fullmatch(line.strip()):
        return Line(line, "prose", number)
    line = _QUOTE.sub("", line, count=1) if _QUOTE.match(line) else line
    if heading := _HEADING.fullmatch(line):
        return Line(heading[1], "heading", number)
    if item := _ITEM.match(line):
        return Line(f"{item['number'] or '•'} {line[item.end() :]}", "item", number)
    return Line(line, _kind(line), number)


def _rows(lines: Iterator[Line]) -> Iterator[Line]:
    """Mark rows of tables as such, leave out lines of signs, and collapse white space."""
    first: int | None = None  # line of the table
    blank, in_columns = True, False
    for line in lines:
        if line.kind == "code":
            first, blank = None, True
            yield line
            continue
        text = line.text.strip("\n\r ")
        of_columns = _SIGNS_OF_COLUMNS.fullmatch(text)
        if of_columns or _SIGNS.fullmatch(text):
            blank, in_columns = True, in_columns or bool(of_columns)
            yield Line("", "prose", line.number)
            continue
        in_columns = in_columns and bool(text)
        if in_columns:
            first = None
            yield Line(" | ".join(_GAP.split(text)), "row", line.number)
            continue
        is_bars = text.startswith("|") or text.count(" | ") > 1
        if line.kind in ("prose", "row") and (is_bars or "\t" in text.strip()):
            cells = _CELLS.split(text.strip("|")) if is_bars else text.split("\t")
            shown = " | ".join(" ".join(cell.split()) for cell in cells).rstrip(" |")
            first, heading = (line.number, None) if first is None else (first, first)
            yield Line(shown, "row", line.number, heading)
            continue
        text = " ".join(text.split())
        goes_on = line.kind == "prose" and not blank
        blank, first = line.kind in ("heading", "row") or not text, None
        yield Line(text, line.kind, line.number, None, not goes_on)
