"""Text and source files: a file is a document."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from revela.data.report import Report
from revela.data.sources.files import CODE, suffix, whole_text
from revela.data.sources.rows import Fields
from revela.types import Document


def read_text(path: Path, name: str, fields: Fields, report: Report) -> Iterator[Document]:
    yield Document(name, whole_text(path), "", "code" if suffix(path) in CODE else "prose")
