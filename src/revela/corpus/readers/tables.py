"""Parquet, Arrow and CSV files: a row is a document.

Parquet goes through pyarrow a page at a time, whatever the size of its row groups. CSV goes through
Python's own reader: half as fast as pyarrow's, but in constant memory, with no limit to the length
of a row, and with bad rows told apart (docs/log.md).
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from revela.corpus.readers import opened as files
from revela.corpus.readers.opened import Damaged, Unsuited, opened, suffix
from revela.corpus.readers.rows import Fields, columns_of, document_of
from revela.corpus.report import Report
from revela.types import Document

BATCH = 2**22  # bytes of a Parquet file decoded at a time
DELIMITERS = {".csv": ",;\t", ".tsv": "\t"}


def read_parquet(path: Path, name: str, fields: Fields, report: Report) -> Iterator[Document]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    # No memory map: a file that shrinks would end the process. No pre-buffering: it holds whole row
    # groups.
    with (
        _damage("damaged Parquet"),
        pa.OSFile(str(path)) as source,
        pq.ParquetFile(source, pre_buffer=False, buffer_size=2**20) as file,
    ):
        wanted = _text_columns(file.schema_arrow, fields)
        groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
        row_bytes = max(
            (group.total_byte_size / max(1, group.num_rows) for group in groups), default=1
        )
        batches = file.iter_batches(
            batch_size=max(1, min(4096, int(BATCH / max(1, row_bytes)))),
            columns=wanted,
            use_threads=False,
        )
        yield from documents_of(batches, name, fields, report)


def read_arrow(path: Path, name: str, fields: Fields, report: Report) -> Iterator[Document]:
    """A file of the datasets library's cache or ``save_to_disk``, or any other Arrow stream or
    file.
    """
    import pyarrow as pa

    with _damage("damaged Arrow file"), pa.OSFile(str(path)) as source:
        batches: Iterable[Any]
        try:
            batches = stream = pa.ipc.open_stream(source)
            schema = stream.schema
        except pa.ArrowInvalid:
            source.seek(0)
            file = pa.ipc.open_file(source)
            schema, batches = (
                file.schema,
                (file.get_batch(i) for i in range(file.num_record_batches)),
            )
        _text_columns(schema, fields)
        yield from documents_of(batches, name, fields, report)


@contextmanager
def _damage(reason: str) -> Iterator[None]:
    """What pyarrow raises is damage to the file; what the operating system raises is not."""
    import pyarrow as pa

    try:
        yield
    except pa.ArrowException as error:
        raise Damaged(reason) from error
    except OSError as error:
        if error.errno is None:  # pyarrow's own, of a file that is cut short
            raise Damaged(reason) from error
        raise


def documents_of(
    batches: Iterable[Any], name: str, fields: Fields, report: Report
) -> Iterator[Document]:
    """The rows of Arrow record batches or tables as documents, numbered from 1."""
    number = 0
    for batch in batches:
        names = columns_of(batch.schema.names, fields)
        for values in zip(*(_values(batch.column(column)) for column in names), strict=True):
            number += 1
            if document := document_of(
                dict(zip(names, values, strict=True)), f"{name}:{number}", fields, report
            ):
                yield document


def _values(column: Any) -> list[Any]:
    try:
        return column.to_pylist()  # type: ignore[no-any-return]
    except UnicodeDecodeError:  # a broken string makes its row bad, not its file
        import pyarrow as pa

        return [
            None if raw is None else files.decoded(raw)
            for raw in column.cast(pa.large_binary()).to_pylist()
        ]


def _text_columns(schema: Any, fields: Fields) -> list[str]:
    import pyarrow as pa

    wanted = columns_of(schema.names, fields)
    kind = schema.field(fields.text).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    ):
        raise Unsuited(
            f'column "{fields.text}" holds no text; name another with --text-field', f"holds {kind}"
        )
    return wanted


def read_csv(path: Path, name: str, fields: Fields, report: Report) -> Iterator[Document]:
    """Rows under a header of column names; .tsv is separated by tabs, .csv by commas, semicolons or
    tabs, whichever the header has most.
    """
    csv.field_size_limit(files.MAX_BYTES)
    with (
        opened(path) as raw,
        io.TextIOWrapper(raw, "utf-8-sig", errors="surrogateescape", newline="") as text,
    ):
        header = text.readline()
        delimiter = max(DELIMITERS[suffix(path)], key=header.count)
        reader = csv.reader(_lines(header, text), delimiter=delimiter)
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
                if len(row) != len(names):  # over many lines it is a quote that nobody closed
                    lines = where if first == last else f"{where}-{last}"
                    report.skip(
                        f"row of {len(row)} fields under a header of {len(names)}", lines, bad=True
                    )
                elif any(map(_is_not_utf8, row)):
                    report.skip("not UTF-8", where, bad=True)
                elif document := document_of(
                    _typed(dict(zip(names, row, strict=True)), fields), where, fields, report
                ):
                    yield document
        except csv.Error as error:
            raise Damaged(
                "broken CSV, its rest lost", f"after line {reader.line_num:,}: {error}"
            ) from error


def _typed(row: dict[str, Any], fields: Fields) -> dict[str, Any]:
    """A row whose metadata are numbers where they look like them: CSV knows text only. An empty
    field is none.
    """
    for name in fields.metadata:
        if (value := row.get(name)) is not None:
            row[name] = next(
                (kind(value) for kind in (int, float) if _NUMBER[kind].fullmatch(value)),
                value or None,
            )
    return row


# No leading zero: 007 is a code, not a count.
_NUMBER = {
    int: re.compile(r"-?(0|[1-9]\d{0,17})"),
    float: re.compile(r"-?(0|[1-9]\d*)\.\d+(e-?\d+)?", re.IGNORECASE),
}


def _lines(header: str, rest: Iterable[str]) -> Iterator[str]:
    yield header
    yield from rest


def _is_not_utf8(value: str) -> bool:
    if value.isascii():
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return True
    return False
