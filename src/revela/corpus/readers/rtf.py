"""Read rich text (RTF), without fonts, styles and pictures."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from revela.corpus.readers.common import DamagedFile, ReadReport, UnsupportedFile, read_bytes
from revela.corpus.readers.rows import Fields
from revela.corpus.readers.text import plain_title
from revela.types import Document

_TOKEN = re.compile(
    rb"\\'(?P<byte>[0-9a-fA-F]{2})|\\(?P<word>[a-zA-Z]+)(?P<number>-?\d+)? ?|\\(?P<sign>[^a-zA-Z])"
    rb"|(?P<brace>[{}])|[\r\n]+|(?P<text>[^\\{}\r\n]+)"
)
# Groups with text that is not the document's.
_HIDDEN = frozenset(
    b"""fonttbl colortbl stylesheet info pict object themedata datastore listtable listoverridetable
    rsidtbl generator xmlnstbl latentstyles fldinst header headerl headerr headerf footer footerl
    footerr footerf bkmkstart bkmkend""".split()
)
_SIGNS = {
    **dict.fromkeys((b"par", b"sect", b"page", b"row"), "\n\n"), b"line": "\n", b"tab": "\t",
    b"cell": " | ", b"footnote": " ", b"emdash": "\u2014", b"endash": "\u2013", b"bullet": "\u2022",
    b"lquote": "\u2018", b"rquote": "\u2019", b"ldblquote": "\u201c", b"rdblquote": "\u201d",
    b"~": "\u00a0", b"_": "\u2011",
}  # fmt: skip
_TITLE = re.compile(rb"\{\\title ([^{}\\]*)\}")


def read_rtf(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """Read a file as one document."""
    raw = read_bytes(path)
    if not raw.lstrip().startswith(b"{\\rtf"):
        raise DamagedFile("no RTF")
    text = re.sub(r" \| *(?=\n|\Z)", "", _text(raw))
    text = re.sub(r"(?<![ \t])[ \t]*\n(?:[ \t]*\n)+", "\n\n", text).strip()
    if not text:
        raise UnsupportedFile("RTF without text")
    title = _TITLE.search(raw)
    yield Document(name, text, plain_title(title[1].decode("latin-1")) if title else "")


def _text(raw: bytes) -> str:
    page = re.search(rb"\\ansicpg(\d+)", raw[:1000])
    state = _Writer(_codec(page[1].decode() if page else "1252"))
    for token in _TOKEN.finditer(raw):
        if token["byte"]:
            state.add_byte(int(token["byte"], 16))
        elif token["brace"]:
            state.open_group() if token["brace"] == b"{" else state.close_group()
        elif token["text"]:
            state.add(token["text"].decode("latin-1"), is_fallback=True)
        elif token["word"] or token["sign"]:
            state.obey(token["word"] or token["sign"], int(token["number"] or 1))
    state.flush()
    return "".join(state.out).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _codec(page: str) -> str:
    try:
        return codecs.lookup(f"cp{page}").name
    except LookupError:
        return "cp1252"


class _Writer:
    """Writes the text of an RTF file.

    Attributes:
        out: the text so far.
        waiting: bytes that may be parts of a character.
        is_hidden: whether the current group is not text.
        followed: number of fallback characters after each \\u, for programs that do not know it.
        skip: fallback characters still to skip.
    """

    def __init__(self, codec: str) -> None:
        self.out, self.codec, self.waiting = list[str](), codec, bytearray()
        self.groups, self.is_hidden, self.followed, self.skip = list[Any](), False, 1, 0

    def flush(self) -> None:
        """Write the waiting bytes."""
        self.out.append(self.waiting.decode(self.codec, "replace"))
        self.waiting.clear()

    def add_byte(self, value: int) -> None:
        if self.skip:
            self.skip -= 1
        elif not self.is_hidden:
            self.waiting.append(value)

    def add(self, text: str, is_fallback: bool = False) -> None:
        self.flush()
        if is_fallback:
            text, self.skip = text[self.skip :], max(0, self.skip - len(text))
        self.out += [] if self.is_hidden else [text]

    def open_group(self) -> None:
        self.flush()
        self.groups.append((self.is_hidden, self.followed))

    def close_group(self) -> None:
        self.flush()
        self.is_hidden, self.followed = self.groups.pop() if self.groups else (False, 1)
        self.skip = 0

    def obey(self, word: bytes, number: int) -> None:
        if word == b"*" or word in _HIDDEN:
            self.flush()
            self.is_hidden = True
        elif word == b"uc":
            self.followed = number
        elif word == b"u":
            self.add(chr(number % 0x10000))
            self.skip = self.followed
        elif word == b"bin":
            raise DamagedFile("RTF with binary data")
        elif word in _SIGNS:
            self.add(_SIGNS[word])
        elif word in (b"\\", b"{", b"}"):
            self.add(word.decode())
