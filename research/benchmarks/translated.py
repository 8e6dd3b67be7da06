"""Text in a language that comes with Linux: translated manual pages, and documents of packages."""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections.abc import Iterator
from pathlib import Path

from revela.text.analyzer import detect
from revela.text.endings import suffix
from revela.text.readers.common import DamagedFile, ReadReport, UnsupportedFile, read_decoded
from revela.text.readers.html import extract_page
from revela.types import Document

SHARE = Path("/usr/share")
UNREADABLE = (DamagedFile, UnsupportedFile, OSError, EOFError, zlib.error)
MANUALS = ("man/{}/man*/*", "man/{}[_.@]*/man*/*")
DOCUMENTS = (
    "doc/*/*.{}", "doc/*/*.{}.*", "doc/*/{}/*", "doc/*/html/{}/*", "doc/{}/**/*", "doc/{}_*/**/*",
    "help/{}/*/*", "help/{}_*/*/*",
)  # fmt: skip
PAGES = (".html", ".htm", ".xhtml", ".page", ".docbook")
TEXTS = ("", ".txt", ".md", ".rst")

ALTERNATING = {"BR", "RB", "BI", "IB", "IR", "RI"}
NO_TEXT = {  # requests whose arguments are no text
    "TH", "Dd", "Dt", "Os", "so", "de", "ds", "nr", "if", "ie", "el", "tr", "ft", "ad", "in", "ti",
    "ne", "sp", "ta", "hy", "IX", "TS", "TE", "Bl", "El", "Bd", "Ed", "rm", "ll", "fam", "lf", "UE",
    "ME", "HP", "PD", "RS", "RE", "TP",
}  # fmt: skip
GLYPHS = {
    **{"aq": "'", "cq": "’", "oq": "‘", "dq": '"', "lq": "“", "rq": "”", "Fo": "«", "Fc": "»"},
    **{"em": "—", "en": "–", "hy": "-", "mi": "-", "bu": "•", "rs": "\\", "ti": "~", "ha": "^"},
    "ss": "ß",
}
ACCENTS = {":": "\u0308", "'": "\u0301", "`": "\u0300", "^": "\u0302", "~": "\u0303", ",": "\u0327"}
ONE = {"-": "-", "e": "\\", " ": " ", "~": " ", "0": " "}  # escapes of one character; others: none
REQUEST = re.compile(r"[.'][ \t]*(\S*)[ \t]*(.*)")
ARGUMENT = re.compile(r'"((?:[^"]|"")*)"?|(\S+)')
SECTION = re.compile(r"^[.'][ \t]*(?:SH|Sh)\b[ \t]*", re.MULTILINE)


def translated(language: str, share: Path = SHARE) -> list[Document]:
    """What this machine has in a language, each text once; the title says what it is about.

    A manual page's title is the description after its name, which its text then lacks. Texts that
    are still English are left out, and files that cannot be read.

    Args:
        language: as folders are called: de, pt_BR.
        share: folder of man/, doc/ and help/.
    """
    found = dict[str, Document]()
    for read, patterns in ((_manual, MANUALS), (_document, DOCUMENTS)):
        files = {f.resolve() for p in patterns for f in share.glob(p.format(language))}
        for file in sorted(file for file in files if file.is_file()):
            for document in read(file, language):
                if detect([document.text]) != "en":
                    found.setdefault(document.text, document)
    return list(found.values())


def _manual(file: Path, _: str) -> Iterator[Document]:
    try:
        title, text = manual_page(read_decoded(file, str(file), ReadReport()))
    except UNREADABLE:
        return
    yield Document(str(file), text, title)


def _document(file: Path, language: str) -> Iterator[Document]:
    """Of an ending that holds text; README.de and README.de.gz are text."""
    kind = suffix(file.with_name(file.name.replace(f".{language}", "")))
    if kind not in (*PAGES, *TEXTS):
        return
    try:
        source = read_decoded(file, str(file), ReadReport())
    except UNREADABLE:
        return
    title, text = extract_page(source) if kind in PAGES else ("", source)
    yield Document(str(file), text, title)


def manual_page(source: str) -> tuple[str, str]:
    r"""What a manual page describes, and its text after that; both without troff's macros.

    >>> manual_page('.TH LS 1\n.SH NAME\nls \\- list a folder\n.SH USE\n.BR ls ", " dir (1)\n')
    ('list a folder', 'USE\nls, dir(1)')
    """
    _, *sections = SECTION.split(source)  # what is before the first one defines macros
    if not sections:
        return "", ""
    name = " ".join(_stripped(sections[0]).splitlines()[1:])
    about = re.split(r"\s[-–—]+\s", name, maxsplit=1)[1:]
    return " ".join(" ".join(about).split()), "\n\n".join(map(_stripped, sections[1:]))


def _stripped(source: str) -> str:
    """The source of a section, which begins with its heading, as plain text."""
    heading, *body = source.splitlines()
    lines = [_line(heading).replace('"', ""), *map(_line, body)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _line(line: str) -> str:
    """A line without requests, escapes and comments."""
    line = re.sub(r"""\\["#].*""", "", line)
    if request := REQUEST.fullmatch(line):
        name, rest = request.groups()
        words = [quoted or plain for quoted, plain in ARGUMENT.findall(rest)]
        line = ("" if name in ALTERNATING else " ").join(words)
        if name in NO_TEXT:
            return ""
        if name == "Nd":
            line = f"- {line}"
        elif name == "IP":  # the other argument is an indent
            line = words[0] if words else ""
    line = line.replace(r"\*(Aq", "'")  # a string that pages define alike
    line = re.sub(r"\\[hvwlLoDN]'[^']*'", "", line)  # moves and drawings
    line = re.sub(r"\\(?:f|F|m|\*|n|k|s[-+]?)(?:\[[^\]]*\]|\(..|.)", "", line)  # fonts, strings
    line = re.sub(r"\\\[u([0-9A-Fa-f]{4,5})\]", lambda code: chr(int(code[1], 16)), line)
    line = re.sub(r"\\(?:\((..)|\[(.*?)\])", lambda name: _glyph(name[1] or name[2]), line)
    return re.sub(r"\\(.)", lambda escape: ONE.get(escape[1], ""), line).rstrip("\\ ")


def _glyph(name: str) -> str:
    """The character of a name such as bu, or :u."""
    if len(name) == 2 and (accent := ACCENTS.get(name[0])):
        return unicodedata.normalize("NFC", name[1] + accent)
    return GLYPHS.get(name, " ")
