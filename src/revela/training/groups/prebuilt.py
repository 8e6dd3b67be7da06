"""Read prebuilt groups: rows of JSONL, of Parquet or of a dataset of the hub.

A row is a list of texts, or {"src": source, "text": list of texts}, as in the hub's
trumancai/revela_training_corpus. In Parquet, ``text`` is a column of lists and ``src`` is optional.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from revela.errors import RevelaError
from revela.text.readers.common import display_path, numbered_lines
from revela.text.readers.hub import PREFIX, hub_rows
from revela.text.readers.tables import parquet_batches, refuse_damage
from revela.training.groups.store import Member
from revela.types import is_unicode


def holds_groups(source: Path) -> bool:
    """Whether a source's rows are groups, by its first row."""
    if str(source).startswith(PREFIX):
        return _first_of_hub_is_group(source)
    is_lines = source.is_file() and {".jsonl", ".ndjson", ".json"} & set(source.suffixes)
    return bool(is_lines or _parquet_files(source)) and _first_is_group(source)


def _first_is_group(source: Path) -> bool:
    try:
        _, first = next(_rows(source), (0, None))
    except RevelaError:
        return False  # reading it as documents raises the error
    return isinstance(first.get("text") if isinstance(first, dict) else first, list)


_first_of_hub_is_group = functools.cache(_first_is_group)  # one request over the network


def group_members(source: Path, size: int) -> Iterator[Member]:
    """The chunks of prebuilt groups. Each row is a document, and gives as many texts as fill whole
    groups of ``size``.
    """
    name = display_path(Path(source.name))
    for number, (place, row) in enumerate(_rows(source)):
        group = row if isinstance(row, dict) else {"text": row, "src": name}
        origin, texts = group.get("src"), group.get("text")
        if origin is None and _parquet_files(source):
            origin = name
        if not isinstance(texts, list) or not all(isinstance(s, str) for s in (origin, *texts)):
            raise _no_group(source, place)
        if not all(map(is_unicode, (origin, *texts))):
            raise RevelaError(
                f"{source}:{place} is not Unicode (half of a surrogate pair): correct that line"
            )
        if len(texts) < size:
            raise RevelaError(
                f"{source}:{place} has {len(texts)} texts, fewer than a group of {size}: lower "
                "--group-size"
            )
        whole = texts[: len(texts) // size * size]
        yield from (Member(number, text, name=f"{origin}:{place}") for text in whole)


def _rows(source: Path) -> Iterator[tuple[int, Any]]:
    """Every row, and its number from 1."""
    if str(source).startswith(PREFIX):
        yield from enumerate(hub_rows(str(source)), 1)
    elif files := _parquet_files(source):
        yield from enumerate((row for file in files for row in _parquet_rows(file)), 1)
    else:
        for number, line in numbered_lines(source):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise _no_group(source, number) from error


def _parquet_files(source: Path) -> list[Path]:
    """The Parquet files of a source; [] for other sources."""
    if source.is_dir():
        return sorted(source.glob("*.parquet"))
    return [source] if source.suffix == ".parquet" and source.is_file() else []


def _parquet_rows(file: Path) -> Iterator[dict[str, Any]]:
    def columns(schema: Any) -> list[str]:
        return [name for name in ("src", "text") if name in schema.names]

    with refuse_damage(file):
        for batch in parquet_batches(file, columns):
            yield from batch.to_pylist()


def _no_group(source: Path, number: int) -> RevelaError:
    return RevelaError(
        f'{source}:{number} is neither a list of texts nor {{"src": ..., "text": [...]}}: mend '
        "that line"
    )
