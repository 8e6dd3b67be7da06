"""Groups that somebody else has built: JSONL, Parquet, or a dataset of the hub, whose rows are
groups and not documents.

As in the hub's trumancai/revela_training_corpus: a row is a list of texts, or {"src": where they
come from, "text": such a list}; in Parquet, ``text`` is a column of lists and ``src`` may be
missing. A folder of Parquet files is read in the order of their names.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from revela.corpus.readers import common
from revela.corpus.readers.common import DamagedFile, is_unicode, numbered_lines, shown
from revela.corpus.readers.hub import PREFIX, hub_rows
from revela.corpus.readers.tables import open_parquet
from revela.errors import RevelaError, first_line
from revela.groups.folder import Member


def holds_groups(source: Path) -> bool:
    """Whether a source's rows are groups; its first row tells."""
    if files := _parquet_files(source):
        return _holds_lists(files[0])
    if str(source).startswith(PREFIX):
        return _first_of_hub_is_group(source)
    is_lines = source.is_file() and {".jsonl", ".ndjson", ".json"} & set(source.suffixes)
    return bool(is_lines) and _first_is_group(source)


def _first_is_group(source: Path) -> bool:
    try:
        _, first = next(_rows(source), (0, None))
    except RevelaError:
        return False  # whoever reads documents says what is wrong
    return isinstance(first, list) or (
        isinstance(first, dict) and isinstance(first.get("text"), list)
    )


_first_of_hub_is_group = functools.cache(_first_is_group)  # over the network, asked once


def read_groups(source: Path, size: int) -> Iterator[tuple[str, list[str]]]:
    """Groups of a source that ``holds_groups``, each with its name: the first ``size`` texts of
    every row.

    Raises:
        RevelaError: a row is no group, or has fewer texts.
    """
    name = shown(Path(source.name))
    for number, row in _rows(source):
        origin, texts = (row.get("src"), row.get("text")) if isinstance(row, dict) else (name, row)
        if origin is None and _parquet_files(source):
            origin = name
        if (
            not isinstance(origin, str)
            or not isinstance(texts, list)
            or not all(isinstance(text, str) for text in texts)
        ):
            raise _no_group(source, number)
        if not all(map(is_unicode, (origin, *texts))):
            raise RevelaError(
                f"{source}:{number} is not Unicode (half of a surrogate pair): mend that line"
            )
        if len(texts) < size:
            raise RevelaError(
                f"{source}:{number} has {len(texts)} texts, fewer than a group of {size}: lower "
                "--group-size"
            )
        yield f"{origin}:{number}", texts[:size]


def _rows(source: Path) -> Iterator[tuple[int, Any]]:
    """Every row, and its number from 1."""
    if str(source).startswith(PREFIX):
        yield from enumerate(hub_rows(str(source)), 1)
        return
    if files := _parquet_files(source):
        yield from enumerate(_parquet_rows(files), 1)
        return
    for number, line in numbered_lines(source):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise _no_group(source, number) from error


def _parquet_files(source: Path) -> list[Path]:
    """The Parquet files of a source; [] if it is something else."""
    if source.is_dir():
        return sorted(source.glob("*.parquet"))
    return [source] if source.suffix == ".parquet" and source.is_file() else []


def _holds_lists(file: Path) -> bool:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pa.OSFile(os.fsencode(file)) as source:  # its name may be no text
            schema = pq.read_schema(source)
    except (OSError, pa.ArrowException):
        return False  # whoever reads documents says what is wrong
    kind = schema.field("text").type if "text" in schema.names else None
    tests = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return kind is not None and any(test(kind) for test in tests)


def _parquet_rows(files: Sequence[Path]) -> Iterator[dict[str, Any]]:
    import pyarrow as pa

    for file in files:
        number = 0
        try:
            for row in _rows_of(file):
                yield row
                number += 1
        except (OSError, pa.ArrowException, UnicodeDecodeError, DamagedFile) as error:
            raise RevelaError(
                f"{file} cannot be read after row {number} ({first_line(error)}): mend what "
                "follows, or get a whole copy of it"
            ) from error


def _rows_of(file: Path) -> Iterator[dict[str, Any]]:
    with open_parquet(file) as opened:
        names = [name for name in ("src", "text") if name in opened.schema_arrow.names]
        for group in opened.iter_batches(1, columns=names, use_threads=False):
            yield {name: _decoded(group.column(name)[0]) for name in names}


def _decoded(value: Any) -> Any:
    """A value of a Parquet file; a list item by item, which may be the same long text.

    Raises:
        DamagedFile: a list takes more than ``MAX_BYTES``.
    """
    import pyarrow as pa

    if not isinstance(value, pa.ListScalar) or not value.is_valid:
        return value.as_py()
    items, size = [], 0
    for item in value.values:
        items.append(item.as_py())
        size += sys.getsizeof(items[-1])
        if size > common.MAX_BYTES:
            raise DamagedFile(f"a group over {common.MAX_BYTES >> 20} MB")
    return items


def _no_group(source: Path, number: int) -> RevelaError:
    return RevelaError(
        f'{source}:{number} is neither a list of texts nor {{"src": ..., "text": [...]}}: mend '
        "that line"
    )


def group_members(source: Path, size: int) -> Iterator[Member]:
    """The chunks of a source that ``holds_groups``, as of one document a row."""
    for number, (name, texts) in enumerate(read_groups(source, size)):
        yield from (Member(number, text, name=name) for text in texts)
