"""JSON files: an array of rows, one row, or a Jupyter notebook."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from revela.corpus.readers.common import (
    DamagedFile,
    NoDocuments,
    ReadReport,
    TooLarge,
    UnsupportedFile,
    read_utf8,
)
from revela.corpus.readers.rows import Fields, document_of
from revela.types import Document


def read_json(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """An array of objects as the lines of JSONL, or one object as one document.

    Most JSON is settings or data, which may have comments or be large: what does not name the
    field of the text is not read.

    Raises:
        NoDocuments: no object has a text.
        DamagedFile: it is binary, not UTF-8 or broken.
    """
    try:
        source = read_utf8(path)
    except TooLarge as error:
        raise NoDocuments(f"JSON {error}; make it JSONL, a row a line", str(error)) from error
    value = _parsed(source) if f'"{fields.text}"' in source else None
    rows = value if isinstance(value, list) else [value]
    if not any(isinstance(row, dict) and isinstance(row.get(fields.text), str) for row in rows):
        none = f'no text field "{fields.text}"'
        raise NoDocuments(f"JSON with {none}; name another with --text-field", none)
    for number, row in enumerate(rows, 1):
        where = name if rows is not value else f"{name}:{number}"
        if not isinstance(row, dict):
            report.skip("an entry that is not a JSON object", where, bad=True)
        elif document := document_of(row, where, fields, report):
            yield document


def read_notebook(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """The cells of a Jupyter notebook as one document of Markdown, without what they printed."""
    notebook = _parsed(read_utf8(path))
    try:
        texts = [_cell(cell) for cell in notebook["cells"]]
    except (KeyError, TypeError) as error:
        raise DamagedFile("no Jupyter notebook of format 4") from error
    text = "\n\n".join(text for text in texts if text)
    if not text:
        raise UnsupportedFile("notebook without text")
    yield Document(name, text.encode("utf-8", "replace").decode())


def _cell(cell: dict[str, Any]) -> str:
    text = "".join(cell["source"]).strip()  # a string, or its lines
    return f"```\n{text}\n```" if text and cell["cell_type"] == "code" else text


def _parsed(source: str) -> Any:
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as error:
        raise DamagedFile("broken JSON") from error
