"""Read text of any ending, source code and XML: one document per file; and clean titles."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from revela.corpus.endings import CODE, MARKDOWN, suffix
from revela.corpus.headings import first_heading
from revela.corpus.readers.common import ReadReport, UnsupportedFile, read_decoded
from revela.corpus.readers.roff import is_roff, plain_roff
from revela.corpus.readers.rows import Fields
from revela.types import Document

MINIFIED = 1000  # mean characters per line of source code; with more it is made by programs
TITLE = 200  # maximum characters
# Embedded pictures.
_DATA = re.compile(r"(data:[\w.+-]+/[\w.+-]+;base64,)[A-Za-z0-9+/=\s]{40,}")
# Of YAML, or of TOML between +++.
_FRONT_MATTER = re.compile(
    r"\s*(?:---|(\+\+\+))[ \t]*\n(.*?\n)(?(1)\+\+\+|(?:---|\.\.\.))[ \t]*(?:\n|\Z)", re.S
)
_FRONT_TITLE = re.compile(
    r"""^title(?::|[ \t]*=)[ \t]*(?P<quote>["']?)(.+?)(?P=quote)[ \t]*$""", re.M
)
# Fields of a front matter that describe the text.
_FRONT_KEPT = re.compile(
    r"^(?:description|summary|abstract|subtitle|tags|keywords|categories|aliases|authors?|date)"
    r"(?::|[ \t]*=).*\n(?:[ \t-].*\n)*",
    re.M | re.I,
)
_NAMED = re.compile(
    r"^[ \t]*(?:#\+title:|\\title\{|=(?=[ \t])|:title:)[ \t]*([^\n}]+)", re.M | re.I
)
_LINE_OF_MARKS = r"([=\-~*#^])\{}{{2,}}[ \t]*"
_UNDERLINED = re.compile(
    rf"\s*(?:{_LINE_OF_MARKS.format(1)}\n)?[ \t]*(\S[^\n]*)\n{_LINE_OF_MARKS.format(3)}(?:\n|\Z)"
)
# What is no speech in subtitles: the number and times of a cue, notes, styles, and tags.
_TIMES = r"(?:\d+:)?\d\d:\d\d[.,]\d{3}[ \t]+-->.*"
_CUE = re.compile(
    rf"^WEBVTT.*\n|(?<=\n\n)(?:NOTE|STYLE|REGION)\b.*\n(?:.+\n)*"
    rf"|(?:^\ufeff?\d+[ \t]*\n|(?<=\n\n).+\n)(?={_TIMES}\n)|^{_TIMES}\n|^[ \t]*\n"
    r"|</?[a-z][^<>\n]*>|\{\\[^{}\n]*\}",
    re.MULTILINE,
)
# Titles made up by programs.
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
    if ";base64," in text:
        text = _DATA.sub(r"\1", text)
    title = ""
    if suffix(path) in MARKDOWN:
        text = text.replace("\r\n", "\n") if text.startswith(("---\r\n", "+++\r\n")) else text
        if front := _FRONT_MATTER.match(text):
            named = _FRONT_TITLE.search(front[2])
            title = named[2] if named else ""
            kept = "".join(_FRONT_KEPT.findall(front[2]))
            left_out = front[0].count("\n") - kept.count("\n")  # lines keep their numbers
            text = kept + "\n" * left_out + text[front.end() :]
        title = title or first_heading(text)
    elif is_roff(text):
        title, text = plain_roff(text)
    elif found := _NAMED.search(text[:2000]):
        title = found[1]
    elif found := _UNDERLINED.match(text[:2000]):
        title = found[2]
    yield Document(name, text, plain_title(title))


def read_subtitles(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """Read subtitles (SubRip, WebVTT) as one document: the speech, line by line."""
    text = read_decoded(path, name, report).replace("\r\n", "\n")
    yield Document(name, _CUE.sub("", text + "\n").strip())


def plain_title(title: str) -> str:
    """A title as one line; "" if a program made it up.

    >>> plain_title(" Bees and\\n bats "), plain_title("Microsoft Word - Document1.docx")
    ('Bees and bats', '')
    """
    title = " ".join(title.split())
    return "" if _NO_TITLE.fullmatch(title) else title[:TITLE]
