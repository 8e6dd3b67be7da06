"""Read Parquet, Arrow and CSV files: a row is a document.

CSV is read by Python's csv, at half the speed of pyarrow, but in constant memory, with rows of any
length, and with the place of each bad row.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, islice, pairwise
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from revela.errors import RevelaError, first_line
from revela.text.endings import COMPRESSED, suffix
from revela.text.readers import common
from revela.text.readers.common import ReadReport, TooLarge, UnsupportedFile
from revela.text.readers.rows import Fields, columns_of, document_of
from revela.text.readers.table_lines import is_swollen, lines_below, sheet_tables
from revela.types import Document

DEFAULT_TEXT = "text"
WORDED = 0.1  # minimum share of rows with a word; a table with fewer has only numbers
MENDED = 20  # maximum unclosed quotes to repair in a file; each reads again up to the next quote
_WORD = re.compile(r"\b[^\W\d_]{2,}\b")
# Without a leading zero: 007 is a code.
_NUMBER = re.compile(r"-?(?:0|[1-9]\d{0,17})(\.\d+(?:e-?\d+)?)?", re.IGNORECASE)
ROWS = 16  # rows decoded at a time
LINES_ABOVE = 20  # of a CSV file, maximum, above its header
DELIMITERS = {".csv": ",;\t|", ".tsv": "\t"}


def read_parquet(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    columns = partial(_text_columns, fields=fields)
    yield from documents_of(parquet_batches(path, columns), name, fields, report)


def parquet_batches(path: Path, columns: Callable[[Any], list[str]]) -> Iterator[Any]:
    """The record batches of a file. ``columns``: a schema -> names to read."""
    import pyarrow.parquet as pq

    # No pre-buffering: it holds whole row groups.
    with (
        _open_arrow(path) as source,
        pq.ParquetFile(source, pre_buffer=False, buffer_size=2**20) as file,
    ):
        names = columns(file.schema_arrow)
        yield from file.iter_batches(ROWS, columns=names, use_threads=False)


def _open_arrow(path: Path) -> Any:
    """Open a file for pyarrow, decompressed."""
    import pyarrow as pa

    if path.suffix in COMPRESSED:
        return pa.BufferReader(common.read_bytes(path))
    # No memory map: the process would crash if the file shrank. Names that are not UTF-8 must be
    # given to pyarrow as bytes.
    return pa.OSFile(os.fsencode(path))


@contextmanager
def refuse_damage(path: Path) -> Iterator[None]:
    """Raise RevelaError if a Parquet file cannot be read, for code that must not skip it."""
    import pyarrow as pa

    try:
        yield
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise RevelaError(
            f"{path} cannot be read ({first_line(error)}): get a whole copy of it"
        ) from error


def read_arrow(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """Read an Arrow stream or file, such as the datasets library writes in its cache or by
    ``save_to_disk``.
    """
    import pyarrow as pa

    with _open_arrow(path) as source:
        try:
            batches = file = pa.ipc.open_stream(source)
        except pa.ArrowInvalid:
            source.seek(0)
            file = pa.ipc.open_file(source)
            batches = map(file.get_batch, range(file.num_record_batches))
        columns = _text_columns(file.schema, fields)

        def validated(batch: Any) -> Any:
            part = batch.select(columns)
            part.validate(full=True)  # wrong offsets would read this process's memory
            return part

        yield from documents_of(map(validated, batches), name, fields, report)


def documents_of(
    batches: Iterable[Any], name: str, fields: Fields, report: ReadReport
) -> Iterator[Document]:
    """The rows of record batches or tables as documents, numbered from 1."""
    parts = (b.slice(start, ROWS) for b in batches for start in range(0, b.num_rows, ROWS))
    selected = (part.select(columns_of(part.schema.names, fields)) for part in parts)
    rows = chain.from_iterable(part.to_pylist() for part in selected)
    for number, row in enumerate(rows, 1):
        for column, value in row.items():
            if isinstance(value, bytes):
                row[column] = value.decode("utf-8", "backslashreplace")
        if document := document_of(row, f"{name}:{number}", fields, report):
            yield document


def _text_columns(schema: Any, fields: Fields) -> list[str]:
    """The columns to read; UnsupportedFile if the text column is missing or is not text."""
    import pyarrow as pa

    columns = columns_of(schema.names, fields)
    if repeated := next((column for column in columns if schema.names.count(column) > 1), None):
        raise UnsupportedFile(f'two columns "{repeated}": rename one of them')
    kind = schema.field(fields.text).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if kind not in (pa.string(), pa.large_string(), pa.string_view()):
        message = f'column "{fields.text}" is not text; name another with --text-field'
        raise UnsupportedFile(message, f"holds {kind}")
    return columns


def read_csv(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """Read rows below a header of column names. A file without a text column is one document with a
    line per row, like an Excel sheet; it keeps the lines above its header.

    The delimiter is a tab in .tsv. In .csv it is the one after "sep=", or the most frequent one of
    ``DELIMITERS`` in the header.
    """
    csv.field_size_limit(common.MAX_BYTES)
    with _open_csv(path, name, report) as text:
        lines = map(common.check_length, common.lines_of(text))
        rows = _rows_of(lines, DELIMITERS[suffix(path)], name, report)
        names = [column.strip() for column in next(rows, ("", []))[1]]
        if not names:
            return
        for column in [column for column, times in Counter(names).items() if column and times > 1]:
            report.note(f'two columns "{column}": the first is read', name)
        if fields.text not in names and fields.text in (folded := [*map(str.casefold, names)]):
            names = folded  # Id and Text
        if fields.text not in names:
            if fields.text != DEFAULT_TEXT:
                columns_of(names, fields)  # raises an error with the names
            yield from _table(names, (row for _, row in rows), name, fields, report)
            return
        for where, row in rows:
            if len(row) != len(names):
                reason = f"row of {len(row)} fields under a header of {len(names)}"
                report.skip(reason, where, bad=True)
                continue
            # Of two columns with the same name, the first counts.
            values: dict[str, Any] = dict(zip(reversed(names), reversed(row), strict=True))
            values |= {key: _typed(values[key]) for key in values.keys() & {*fields.metadata}}
            if document := document_of(values, where, fields, report):
                yield document


def _table(
    names: list[str], rows: Iterable[list[str]], name: str, fields: Fields, report: ReadReport
) -> Iterator[Document]:
    """A file without a text column as one document; UnsupportedFile if it is a table of numbers."""
    table, size = list[list[str]](), 0
    for row in rows:
        table.append([" ".join(cell.split()) for cell in row])
        size += sum(map(len, row))
        if size > common.MAX_BYTES:
            raise TooLarge
    if table and sum(any(map(_WORD.search, row)) for row in table) < WORDED * len(table):
        numbers = "table of numbers"
        message = f'{numbers} without a column "{fields.text}"'
        raise UnsupportedFile(message, short=numbers, by_programs=True)
    filled = [sum(map(bool, row)) for row in (names, *table)]
    if table and filled[0] + 1 < median(filled):  # the first row is not a header of all columns
        found = "\n".join(sheet_tables([names, *table]))
    else:
        if is_swollen(names, table):
            report.note("table with long headings, read column by column", name)
        found = "\n".join(filter(None, lines_below(names, table)))
    if found:
        yield Document(name, found)


def _rows_of(
    lines: Iterator[str], delimiters: str, name: str, report: ReadReport
) -> Iterator[tuple[str, list[str]]]:
    """(place, cells) of each row that is not empty.

    If a quote is not closed, its line is read without quotes, and the lines after it as usual.
    """
    first = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    number, header = next(first, (1, ""))
    above = [header, *islice(lines, LINES_ABOVE)]
    delimiter, lines = _delimiter(above, delimiters), chain(above[1:], lines)
    if named := re.fullmatch(r"sep=(.)\s*", header):
        delimiter, header, number = named[1], next(lines, ""), number + 1
    lines, mended, taken = chain([header], lines), 0, list[str]()

    def noted(lines: Iterator[str]) -> Iterator[str]:
        for line in lines:
            taken.append(line)
            yield line

    while True:
        for row in csv.reader(noted(lines), delimiter=delimiter):
            place, number = f"{name}:{number}", number + len(taken)
            if len(taken) > 1 and mended < MENDED and sum(t.count('"') for t in taken) % 2:
                report.note("a quote that is not closed", place)
                row = next(csv.reader(taken[:1], delimiter=delimiter, quoting=csv.QUOTE_NONE))
                lines, number, mended = chain(taken[1:], lines), number - len(taken) + 1, mended + 1
                taken = []
                yield place, row
                break
            taken = []
            if row:
                yield place, row
        else:
            return


def _delimiter(lines: Sequence[str], delimiters: str) -> str:
    """The most frequent delimiter of the first line. If it has none, because it is a title, the
    first that two consecutive lines have equally often, and more than once.
    """
    found = max(delimiters, key=lines[0].count)
    if found in lines[0]:
        return found
    pairs = ((one, other, d) for one, other in pairwise(lines) for d in delimiters)
    return next((d for one, other, d in pairs if 1 < one.count(d) == other.count(d)), found)


def _open_csv(path: Path, name: str, report: ReadReport) -> TextIO:
    """Open a file as text. A large one must be UTF-8."""
    with suppress(TooLarge):
        return io.StringIO(common.read_decoded(path, name, report), newline="")
    return common.open_text(path, newline="")


def _typed(value: str) -> str | int | float | None:
    """A field as a number if it looks like one; None if it is empty."""
    if number := _NUMBER.fullmatch(value):
        return float(value) if number[1] else int(value)
    return value or None
