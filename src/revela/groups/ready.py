"""Groups that somebody else has built: JSONL, Parquet, or a dataset of the hub, whose rows are
groups and not documents.

As in the hub's trumancai/revela_training_corpus: a row is a list of texts, or {"src": where they
come from, "text": such a list}; in Parquet, ``text`` is a column of lists and ``src`` may be
missing. A folder of Parquet files is read in the order of their names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from revela.corpus.readers.common import READ_ERRORS, lines_of, open_text
from revela.corpus.readers.hub import PREFIX, hub_rows
from revela.errors import RevelaError, first_line
from revela.types import Chunk, Document

READ_ROWS = 256  # groups of a Parquet file that are decoded at a time


def holds_groups(source: Path) -> bool:
    """Whether a source's rows are groups; its first row tells."""
    if files := _parquet_files(source):
        return _holds_lists(files[0])
    if not str(source).startswith(PREFIX) and not (
        source.is_file() and {".jsonl", ".ndjson", ".json"} & set(source.suffixes)
    ):
        return False
    try:
        _, first = next(_rows(source), (0, None))
    except RevelaError:
        return False  # whoever reads documents says what is wrong
    return isinstance(first, list) or (
        isinstance(first, dict) and isinstance(first.get("text"), list)
    )


def read_groups(source: Path, size: int) -> Iterator[tuple[str, list[str]]]:
    """Groups of a source that ``holds_groups``, each with its name: the first ``size`` texts of
    every row.

    Raises:
        RevelaError: a row is no group, or has fewer texts.
    """
    for number, row in _rows(source):
        origin, texts = (
            (row.get("src"), row.get("text")) if isinstance(row, dict) else (source.name, row)
        )
        if origin is None and _parquet_files(source):
            origin = source.name
        if (
            not isinstance(origin, str)
            or not isinstance(texts, list)
            or not all(isinstance(text, str) for text in texts)
        ):
            raise _no_group(source, number)
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
    number = 0
    with open_text(source) as handle:
        try:
            for number, line in enumerate(lines_of(handle), 1):
                if line.strip():
                    yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _no_group(source, number) from error
        except READ_ERRORS as error:
            raise RevelaError(
                f"{source} cannot be read after line {number} ({error}): get a whole copy of it"
            ) from error


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
    import pyarrow.parquet as pq

    for file in files:
        try:
            with pa.OSFile(os.fsencode(file)) as source, pq.ParquetFile(source) as opened:
                names = [name for name in ("src", "text") if name in opened.schema_arrow.names]
                for batch in opened.iter_batches(batch_size=READ_ROWS, columns=names):
                    yield from batch.to_pylist()
        except (OSError, pa.ArrowException) as error:
            reason = first_line(error)
            raise RevelaError(
                f"{file} cannot be read ({reason}): get a whole copy of it"
            ) from error


def _no_group(source: Path, number: int) -> RevelaError:
    return RevelaError(
        f'{source}:{number} is neither a list of texts nor {{"src": ..., "text": [...]}}: mend '
        "that line"
    )


def group_rows(source: Path, size: int, leave_out: frozenset[str]) -> Iterator[Chunk]:
    """The chunks of a source that ``holds_groups``, as of one document a row; those of the named
    rows are left out.
    """
    kept = (texts for name, texts in read_groups(source, size) if name not in leave_out)
    return chain.from_iterable((Chunk(i, text) for text in texts) for i, texts in enumerate(kept))


def group_documents(source: Path, size: int) -> Iterator[Document]:
    """A document for each row of a source that ``holds_groups``."""
    return (Document(name, "\n\n".join(texts)) for name, texts in read_groups(source, size))
