"""JSON Lines: a line is a document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from revela.corpus.readers import opened as files
from revela.corpus.readers.rows import Fields, document_of
from revela.corpus.report import Report
from revela.types import Document


def read_jsonl(path: Path, name: str, fields: Fields, report: Report) -> Iterator[Document]:
    limit = files.MAX_BYTES
    with files.opened(path) as handle:
        number = 0
        while line := handle.readline(limit + 1):
            number += 1
            where = f"{name}:{number}"
            if len(line) > limit:
                while line and not line.endswith(b"\n"):
                    line = handle.readline(limit)
                report.skip(f"line over {limit >> 20} MB", where, bad=True)
            elif (text := files.decoded(line)) is None:
                report.skip("not UTF-8", where, bad=True)
            elif text.strip() and (document := _parsed(text, where, fields, report)):
                yield document


def _parsed(line: str, where: str, fields: Fields, report: Report) -> Document | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        report.skip("broken JSON", where, bad=True)
        return None
    if not isinstance(row, dict):
        report.skip("a line that is no JSON object", where, bad=True)
        return None
    return document_of(row, where, fields, report)
