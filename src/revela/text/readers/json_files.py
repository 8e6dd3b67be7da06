"""Read JSON files: lines of objects, an array of objects, one object, or a Jupyter notebook."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from revela.text.headings import first_heading
from revela.text.readers import common
from revela.text.readers.common import DamagedFile, ReadReport, UnsupportedFile
from revela.text.readers.rows import Fields, document_of
from revela.text.readers.text import plain_title
from revela.types import Document

LARGEST = 2**20  # maximum characters of JSON without the text field; a longer file is data

_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*+"?')
# A string of five words or more, or letters of other scripts, also escaped.
_PROSE = re.compile(r'"[^\W\d_][^"\s]* (?:[^"\s]+ ){3}|[^\W\d_a-zA-Z]{5}|(?:\\u[\da-fA-F]{4}){5}')


def read_jsonl(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """Read JSON Lines: one object per line."""
    with common.open_text(path) as handle:
        for number, line in enumerate(common.lines_of(handle), 1):
            if not line.strip():
                continue
            where = f"{name}:{number}"
            try:
                row = _parsed(common.check_length(line))
            except DamagedFile as error:
                report.skip(str(error), where, bad=True)
            else:
                yield from _documents(row, where, fields, report)


def read_json(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """Read an array of objects, one object, or lines of objects as in JSONL.

    A file without the text field has settings or data: if it is small, it is one document.
    """
    if path.stat().st_size > common.MAX_BYTES:
        over = f"over {common.MAX_BYTES >> 20} MB"
        raise UnsupportedFile(f"JSON {over}; convert it to JSONL, one row per line", short=over)
    source = common.read_decoded(path, name, report)
    has_field = f'"{fields.text}"' in source
    first, _, others = source.strip().partition("\n")
    if has_field and others and _is_row(first, fields):
        yield from read_jsonl(path, name, fields, report)
        return
    try:
        value = _parsed(source) if has_field else None
    except DamagedFile:
        if not _has_comments(source):
            raise
        value = None
    rows = value if isinstance(value, list) else [value]
    if not any(_has_text(row, fields) for row in rows):
        if len(source) > LARGEST:
            none = f'data: no text field "{fields.text}"'
            advice = f"{none}; name another with --text-field"
            is_data = not _PROSE.search(source)  # with prose, it may be an export of messages
            raise UnsupportedFile(f"JSON of {advice}", short=none, by_programs=is_data)
        yield Document(name, source, "", "code")
        return
    for number, row in enumerate(rows, 1):
        where = name if rows is not value else f"{name}:{number}"
        yield from _documents(row, where, fields, report)


def _has_comments(source: str) -> bool:
    """Whether JSON has comments, as the settings of some programs do."""
    outside = _STRING.sub("", source)
    return "//" in outside or "/*" in outside


def _has_text(row: Any, fields: Fields) -> bool:
    return isinstance(row, dict) and isinstance(row.get(fields.text), str)


def _is_row(line: str, fields: Fields) -> bool:
    with suppress(DamagedFile):
        return _has_text(_parsed(line), fields)
    return False


def _documents(row: Any, where: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    if not isinstance(row, dict):
        report.skip("not a JSON object", where, bad=True)
    elif document := document_of(row, where, fields, report):
        yield document


def read_notebook(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """Read the cells of a Jupyter notebook as one Markdown document, without outputs."""
    source = common.read_decoded(path, name, report)
    notebook = _parsed(source) if source.strip() else {"cells": []}
    try:
        texts = [_cell(cell) for cell in notebook["cells"]]
    except (KeyError, TypeError) as error:
        raise DamagedFile("not a Jupyter notebook") from error
    text = common.without_surrogates("\n\n".join(text for text in texts if text))
    if not text:
        raise UnsupportedFile("notebook without text", by_programs=True)
    yield Document(name, text, plain_title(first_heading(text)))


def _cell(cell: dict[str, Any]) -> str:
    text = "".join(cell.get("source") or "").strip()  # a string, or its lines
    if text and cell["cell_type"] == "code":
        fence = "`" * (1 + max(2, *map(len, re.findall("`+", text + "``"))))
        return f"{fence}\n{text}\n{fence}"
    return text


def _parsed(source: str) -> Any:
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as error:
        raise DamagedFile("broken JSON") from error
