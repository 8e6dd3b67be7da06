"""Read text of any ending, source code and XML: one document per file. Also cleans titles."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from revela.text.endings import CODE, MARKDOWN, suffix
from revela.text.headings import first_heading
from revela.text.readers.common import ReadReport, UnsupportedFile, read_decoded
from revela.text.readers.rows import Fields, plain_value
from revela.types import Document, Value

MINIFIED = 1000  # mean characters per line of source code; more is minified
TITLE = 200  # maximum characters
# YAML, or TOML between +++.
_FRONT_MATTER = re.compile(
    r"\s*(?:---|(\+\+\+))[ \t]*\n(.*?\n)(?(1)\+\+\+|(?:---|\.\.\.))[ \t]*(?:\n|\Z)", re.S
)
_FRONT_TITLE = re.compile(
    r"""^title(?::|[ \t]*=)[ \t]*(?:[|>][-+\d]*[ \t]*((?:\n[ \t]+\S.*)+)"""
    r"""|(?P<quote>["']?)(.+?)(?P=quote)[ \t]*$)""",
    re.M,
)
# The fields of front matter, the names of those for layout, and empty values.
_FIELD = re.compile(
    r"""^(["']?)([^\W\d][\w .-]{0,60}?)\1[ \t]*(?::(?=\s)|=)(.*\n(?:(?:[ \t\]-].*)?\n)*)""", re.M
)
_LAYOUT = re.compile(
    r"title|layout|template|theme|permalink|slug|url|weight|order|position|icon|banner|cover|image"
    r"|(?:css|style|toc|nav|sidebar|menu|pagination|header|footer|font|math|hide|show|thumb)[\w-]*"
    r"|output|format|documentclass|geometry|bibliography|csl|engine|jupyter|comments",
    re.I,
)
_EMPTY = re.compile(r"[\s\[\]{}\"'~|>-]*|\s*(?:null|true|false)\s*", re.I)
_NAMED = re.compile(
    r"^[ \t]*(?:#\+title:|\\title\{|=(?=[ \t])|:title:)[ \t]*([^\n}]+)", re.M | re.I
)
_LINE_OF_MARKS = r"([=\-~*#^])\{}{{2,}}[ \t]*"
_UNDERLINED = re.compile(
    rf"\s*(?:{_LINE_OF_MARKS.format(1)}\n)?[ \t]*(\S[^\n]*)\n{_LINE_OF_MARKS.format(3)}(?:\n|\Z)"
)
# What is not speech in subtitles: the number and times of a cue, notes, styles, and tags.
_TIMES = r"(?:\d+:)?\d\d:\d\d[.,]\d{3}[ \t]+-->.*"
_CUE = re.compile(
    rf"^WEBVTT.*\n|(?<=\n\n)(?:NOTE|STYLE|REGION)\b.*\n(?:.+\n)*"
    rf"|(?:^\d+[ \t]*\n|(?<=\n\n).+\n)(?={_TIMES}\n)|^{_TIMES}\n|^[ \t]*\n"
    r"|</?[a-z][^<>\n]*>|\{\\[^{}\n]*\}",
    re.MULTILINE,
)
# Titles that programs made up.
_NO_TITLE = re.compile(
    r"(?:microsoft (?:word|powerpoint|excel) - .*"
    r"|.*\.(?:docx?|pptx?|xlsx?|pdf|dvi|tex|indd|qxd|rtf|odt|txt)"
    r"|(?:untitled|\(anonymous|document|dokument|title|slide|folie|presentation"
    r"|powerpoint presentation|powerpoint-präsentation|презентация powerpoint"
    r"|no title|none|null)?[\s\d()._-]*)",
    re.I | re.S,
)


def read_text(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """Read a file of text or source code as one document."""
    text = read_decoded(path, name, report)
    if suffix(path) in CODE or text.startswith("#!"):
        if len(text) > MINIFIED * (1 + text.count("\n")):
            raise UnsupportedFile("minified", short="minified", by_programs=True)
        yield Document(name, text, "", "code")
        return
    title, metadata = "", dict[str, Value]()
    if suffix(path) in MARKDOWN:
        text = text.replace("\r\n", "\n") if text.startswith(("---\r\n", "+++\r\n")) else text
        if front := _FRONT_MATTER.match(text):
            named = _FRONT_TITLE.search(front[2])
            title = (named[1] or named[3]) if named else ""
            given = {field[2]: field for field in _FIELD.finditer(front[2])}
            values = {name: _value(given[name][3]) for name in given.keys() & {*fields.kept}}
            metadata = {name: plain_value(v) for name, v in values.items() if v or v == 0}
            shown = (field for field in given.values() if not _LAYOUT.fullmatch(field[2]))
            kept = "".join(field[0] for field in shown if not _EMPTY.fullmatch(field[3]))
            left_out = front[0].count("\n") - kept.count("\n")  # lines keep their numbers
            text = kept + "\n" * left_out + text[front.end() :]
        title = title or first_heading(text)
    elif found := _NAMED.search(head := text[:2000].replace("\r\n", "\n")):
        title = found[1]
    elif found := _UNDERLINED.match(head):
        title = found[2]
    yield Document(name, text, plain_title(title), metadata=metadata)


def _value(given: str) -> object:
    """A value of front matter: a number, true or false, a list of texts, or text.

    >>> _value(" 2024"), _value("[Anna, 'Otto']"), _value("\\n- a: 1\\n- b"), _value("x  # day")
    (2024, ['Anna', 'Otto'], ['a: 1', 'b'], 'x')
    >>> _value(" >-\\n  How bees\\n  fly")
    'How bees fly'
    """
    text = " ".join(re.sub(r"(?m)(?:^|[ \t])#.*", "", given).split())
    if text.startswith(("[", "- ")):
        items = text.strip("[]").split(",") if text[0] == "[" else text[2:].split(" - ")
        return [found for item in items if (found := item.strip(" '\""))]
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return re.sub(r"^[|>][-+\d]*(?: |$)", "", text).strip("'\"")


def read_subtitles(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """Read the speech of subtitles (SubRip, WebVTT), line by line, as one document."""
    text = read_decoded(path, name, report).replace("\r\n", "\n")
    yield Document(name, _CUE.sub("", text + "\n").strip())


def plain_title(title: str) -> str:
    """A title as one line; "" if a program made it up.

    >>> plain_title(" Bees and\\n bats "), plain_title("Microsoft Word - Document1.docx")
    ('Bees and bats', '')
    """
    title = " ".join(title.split())
    return "" if _NO_TITLE.fullmatch(title) else title[:TITLE]
