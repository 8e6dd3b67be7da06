"""JSON files: lines of objects, an array of objects, one object, or a Jupyter notebook."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from revela.corpus.readers import common
from revela.corpus.readers.common import (
    DamagedFile,
    ReadReport,
    UnsupportedFile,
    lines_of,
    open_text,
    read_utf8,
    without_surrogates,
)
from revela.corpus.readers.rows import Fields, document_of
from revela.types import Document


def read_jsonl(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """JSON Lines: an object a line."""
    with open_text(path) as handle:
        for number, line in enumerate(lines_of(handle), 1):
            if not line.strip():
                continue
            where = f"{name}:{number}"
            try:
                row = _parsed(line)
            except DamagedFile as error:
                report.skip(str(error), where, bad=True)
            else:
                yield from _documents(row, where, fields, report)


def read_json(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """An array of objects, or one object.

    Most JSON is settings or data, with comments or large: without the text field, it is
    UnsupportedFile.
    """
    if path.stat().st_size > common.MAX_BYTES:
        over = f"over {common.MAX_BYTES >> 20} MB"
        raise UnsupportedFile(f"JSON {over}; make it JSONL, a row a line", short=over)
    source = read_utf8(path)
    value = _parsed(source) if f'"{fields.text}"' in source else None
    rows = value if isinstance(value, list) else [value]
    if not any(isinstance(row, dict) and isinstance(row.get(fields.text), str) for row in rows):
        none = f'no text field "{fields.text}"'
        raise UnsupportedFile(f"JSON with {none}; name another with --text-field", short=none)
    for number, row in enumerate(rows, 1):
        where = name if rows is not value else f"{name}:{number}"
        yield from _documents(row, where, fields, report)


def _documents(row: Any, where: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    if not isinstance(row, dict):
        report.skip("not a JSON object", where, bad=True)
    elif document := document_of(row, where, fields, report):
        yield document


def read_notebook(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """The cells of a Jupyter notebook as one Markdown document, without outputs."""
    notebook = _parsed(read_utf8(path))
    try:
        texts = [_cell(cell) for cell in notebook["cells"]]
    except (KeyError, TypeError) as error:
        raise DamagedFile("no Jupyter notebook of format 4") from error
    text = "\n\n".join(text for text in texts if text)
    if not text:
        raise UnsupportedFile("notebook without text")
    yield Document(name, without_surrogates(text))


def _cell(cell: dict[str, Any]) -> str:
    text = "".join(cell["source"]).strip()  # a string, or its lines
    return f"```\n{text}\n```" if text and cell["cell_type"] == "code" else text


def _parsed(source: str) -> Any:
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as error:
        raise DamagedFile("broken JSON") from error
