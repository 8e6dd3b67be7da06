"""Parquet, Arrow and CSV files: a row is a document.

pyarrow reads Parquet page by page, whatever the size of the row groups. Python's csv reads CSV: at
half the speed of pyarrow, but in constant memory, with rows of any length, and naming each bad row.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from revela.corpus.readers import common
from revela.corpus.readers.common import (
    DamagedFile,
    ReadReport,
    UnsupportedFile,
    is_unicode,
    lines_of,
    open_binary,
    suffix,
)
from revela.corpus.readers.rows import Fields, columns_of, document_of
from revela.types import Document

ROWS = 16  # of an Arrow file, decoded at a time; those of a small one may share a long text
DELIMITERS = {".csv": ",;\t", ".tsv": "\t"}


def read_parquet(
    path: Path, name: str, fields: Fields, report: ReadReport, some: range | None = None
) -> Iterator[Document]:
    """A Parquet file, of some row groups only, or of all."""
    with _as_damaged_file("damaged Parquet"), open_parquet(path) as file:
        wanted = _text_columns(file.schema_arrow, fields)
        passed = range(some.start) if some else ()
        before = sum(file.metadata.row_group(i).num_rows for i in passed)
        rows = row_by_row(file, wanted, some)
        yield from documents_of(rows, name, fields, report, before)


@contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    """A ParquetFile for reading a stranger's rows in order."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    # No memory map: a file that shrinks would crash the process. No pre-buffering: it holds whole
    # row groups.
    with (
        pa.OSFile(os.fsencode(path)) as source,  # its name may be no text
        pq.ParquetFile(source, pre_buffer=False, buffer_size=2**20) as file,
    ):
        yield file


def row_by_row(file: Any, columns: Sequence[str], some: range | None = None) -> Iterator[Any]:
    """Record batches of one row each, of some row groups or of all. Rows of a small file may share
    a long text, so one at a time is decoded; it takes a hundredth of a millisecond.
    """
    yield from file.iter_batches(
        batch_size=1, row_groups=some, columns=list(columns), use_threads=False
    )


def read_arrow(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """An Arrow stream or file, such as the datasets library's cache or ``save_to_disk`` writes."""
    import pyarrow as pa

    with _as_damaged_file("damaged Arrow file"), pa.OSFile(os.fsencode(path)) as source:
        batches: Iterable[Any]
        try:
            batches = stream = pa.ipc.open_stream(source)
            schema = stream.schema
        except pa.ArrowInvalid:
            source.seek(0)
            file = pa.ipc.open_file(source)
            schema = file.schema
            batches = (file.get_batch(i) for i in range(file.num_record_batches))
        wanted = _text_columns(schema, fields)
        yield from documents_of((_checked(b, wanted) for b in batches), name, fields, report)


def _checked(batch: Any, names: list[str]) -> Any:
    """These columns; offsets that point out of them would read the memory of this process.

    Raises:
        ArrowInvalid: they do.
    """
    import pyarrow as pa

    batch = batch.select(names)
    for column in batch.columns:
        # Text is checked as bytes: one that is not UTF-8 spoils its row only.
        raw = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}.get(column.type)
        (column.view(raw) if raw else column).validate(full=True)
    return batch


@contextmanager
def _as_damaged_file(reason: str) -> Iterator[None]:
    """Turn pyarrow's errors into ``DamagedFile``; the operating system's pass."""
    import pyarrow as pa

    try:
        yield
    except pa.ArrowException as error:
        raise DamagedFile(reason) from error
    except OSError as error:
        if error.errno is None:  # pyarrow's own, for a truncated file
            raise DamagedFile(reason) from error
        raise


def documents_of(
    batches: Iterable[Any], name: str, fields: Fields, report: ReadReport, number: int = 0
) -> Iterator[Document]:
    """The rows of Arrow record batches or tables as documents; ``number`` rows stand before."""
    parts = (b.slice(start, ROWS) for b in batches for start in range(0, b.num_rows, ROWS))
    for part in parts:
        names = columns_of(part.schema.names, fields)
        for values in zip(*(_values(part.column(column)) for column in names), strict=True):
            number += 1
            row = dict(zip(names, values, strict=True))
            if document := document_of(row, f"{name}:{number}", fields, report):
                yield document


def _values(column: Any) -> list[Any]:
    try:
        return column.to_pylist()  # type: ignore[no-any-return]
    except UnicodeDecodeError:  # a broken string spoils its row, not the file
        import pyarrow as pa

        return [
            None if raw is None else common.decode(raw)
            for raw in column.cast(pa.large_binary()).to_pylist()
        ]


def _text_columns(schema: Any, fields: Fields) -> list[str]:
    import pyarrow as pa

    wanted = columns_of(schema.names, fields)
    kind = schema.field(fields.text).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    is_text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    if not any(test(kind) for test in is_text):
        message = f'column "{fields.text}" is not text; name another with --text-field'
        raise UnsupportedFile(message, f"holds {kind}")
    return wanted


def read_csv(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """Rows below a header of column names.

    A .tsv file is separated by tabs, a .csv file by commas, semicolons or tabs, whichever the
    header has most.
    """
    csv.field_size_limit(common.MAX_BYTES)
    with (
        open_binary(path) as raw,
        io.TextIOWrapper(raw, "utf-8-sig", errors="surrogateescape", newline="") as text,
    ):
        read = lines_of(text)
        header = next(read, "")
        delimiter = max(DELIMITERS[suffix(path)], key=header.count)
        reader = csv.reader(chain([header], read), delimiter=delimiter)
        try:
            names = next(reader, [])
            if not names:
                return
            columns_of(names, fields)
            last = reader.line_num
            for row in reader:
                first, last = last + 1, reader.line_num
                where = f"{name}:{first}"
                if not row:
                    continue
                if len(row) != len(names):  # over many lines: a quote that is not closed
                    lines = where if first == last else f"{where}-{last}"
                    reason = f"row of {len(row)} fields under a header of {len(names)}"
                    report.skip(reason, lines, bad=True)
                elif not all(map(is_unicode, row)):
                    report.skip("not UTF-8", where, bad=True)
                else:
                    values = _typed(dict(zip(names, row, strict=True)), fields)
                    if document := document_of(values, where, fields, report):
                        yield document
        except csv.Error as error:
            detail = f"after line {reader.line_num:,}: {error}"
            raise DamagedFile("broken CSV, its rest lost", detail) from error


def _typed(row: dict[str, Any], fields: Fields) -> dict[str, Any]:
    """The row with metadata as numbers where they look like numbers; an empty field is None."""
    for name in fields.metadata:
        if (value := row.get(name)) is not None:
            numbers = (kind(value) for kind in _NUMBER if _NUMBER[kind].fullmatch(value))
            row[name] = next(numbers, value or None)
    return row


# No leading zero: 007 is a code, not a count.
_NUMBER: dict[type[int] | type[float], re.Pattern[str]] = {
    int: re.compile(r"-?(0|[1-9]\d{0,17})"),
    float: re.compile(r"-?(0|[1-9]\d*)\.\d+(e-?\d+)?", re.IGNORECASE),
}
