"""Find the line and page of a chunk in its file, and the file itself."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import NamedTuple

from revela.text.endings import CODE, MARKDOWN, suffix
from revela.text.readers import READERS
from revela.types import Document

# Rows of a file may have any id.
_TEXT = (CODE | MARKDOWN | {".adoc", ".log", ".org", ".rst", ".text", ".txt"}) - READERS.keys()
_TEXT |= {".tex", ".ltx"}
_ROW = re.compile(r"(.+):\d+")  # the id of a row, by its file and number
_ESCAPED = re.compile(r"\\x([89a-f][0-9a-f])")  # in a path that is not UTF-8 (display_path)


class Start(NamedTuple):
    """The line and the page that a chunk begins on, from 1; None where they are not known."""

    line: int | None = None
    page: int | None = None

    def after(self, text: str) -> Start:
        """The start of the text after this one."""
        line = None if self.line is None else self.line + text.count("\n")
        return Start(line, None if self.page is None else self.page + text.count("\f"))


def starts(document: Document, chunks: Sequence[str]) -> Iterator[Start]:
    """The start of each chunk of a document: a line of text, or a page of a PDF. ``chunks`` are in
    order; blank text may be missing.

    >>> list(starts(Document("a.txt", "One.\\n\\nTwo."), ["One.\\n\\n", "Two."]))
    [Start(line=1, page=None), Start(line=3, page=None)]
    """
    ending = suffix(document.id)
    now = Start(1) if ending in _TEXT else Start(page=1) if ending == ".pdf" else Start()
    at = 0
    for chunk in chunks:
        begin = document.text.index(chunk, at)
        now, at = now.after(document.text[at:begin]), begin
        # A chunk begins at its text, after leading white space.
        yield now.after(chunk[: len(chunk) - len(chunk.lstrip())])


def file_of(sources: Sequence[str | Path], name: str, owner: str = "") -> Path | None:
    """The file of a document's id, below one of these folders or one of these files. None if there
    is none, as ids of rows may be any text, or if a link leads out of the folder.

    Args:
        owner: the path that the document was read from, if it is known: that of its source, and the
            file's name.
    """
    row = _ROW.fullmatch(name)
    names = [name, row[1]] if row else [name]
    names += [owner[len(s) + 1 :] for s in map(str, sources) if owner.startswith(f"{s}/")]
    escaped = [name for name in names if "\\x" in name]
    names += [_ESCAPED.sub(lambda b: os.fsdecode(bytes.fromhex(b[1])), name) for name in escaped]
    for relative in map(PurePath, names):
        if relative.is_absolute() or ".." in relative.parts:
            continue
        for source in map(Path, sources):
            with suppress(OSError, ValueError):  # too long for a name, or no name
                if source.is_dir() and (file := source / relative).is_file():
                    return file if file.resolve().is_relative_to(source.resolve()) else None
                if source.is_file() and source.name == str(relative):
                    return source
    return None
