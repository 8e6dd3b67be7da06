"""Read rich text (RTF), without fonts, styles and pictures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from revela.text.readers.common import DamagedFile, ReadReport, UnsupportedFile, read_bytes
from revela.text.readers.rows import Fields
from revela.text.readers.text import plain_title
from revela.types import Document

_TITLE = re.compile(r"\{\\title ([^{}\\]*)\}")


def read_rtf(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """Read a file as one document."""
    from striprtf.striprtf import rtf_to_text

    source = read_bytes(path).decode("latin-1")
    if not source.lstrip().startswith("{\\rtf"):
        raise DamagedFile("not RTF")
    title = _TITLE.search(source)
    # striprtf drops footnotes, and writes the cells of a table without a space between them.
    source = re.sub(r"\\footnote(?![a-z])", " ", source)
    source = re.sub(r"\\cell(?![a-z]) ?", r" \\cell  ", source)
    text = rtf_to_text(source, errors="replace").replace("\xad", "")
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    text = re.sub(r" \| *\n", "\n", text)
    text = re.sub(r"(?<![ \t])[ \t]*\n\s*", "\n\n", text).strip()
    if not text:
        raise UnsupportedFile("RTF without text")
    yield Document(name, text, plain_title(title[1]) if title else "")
