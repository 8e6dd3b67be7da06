"""Text and source files: a file is a document."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from revela.corpus.readers.opened import CODE, suffix, whole_text
from revela.corpus.readers.rows import Fields
from revela.corpus.report import Report
from revela.types import Document


def read_text(path: Path, name: str, fields: Fields, report: Report) -> Iterator[Document]:
    yield Document(name, whole_text(path), "", "code" if suffix(path) in CODE else "prose")
