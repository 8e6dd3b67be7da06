"""Read sources into documents. The ending of a file selects a reader; text may have any ending.

To add a format, write a reader ``(path, name, fields, report) -> documents`` in a file here, and
add its ending to ``READERS`` and the format to ``FORMATS``. ``name`` is the document's id, or the
prefix of several documents' ids. A reader raises DamagedFile or UnsupportedFile for a file, and
reports the rows that it skips. It need not handle the errors of its library.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from revela.errors import RevelaError, first_line
from revela.files import atomic_write
from revela.text.dates import iso_date
from revela.text.endings import suffix
from revela.text.readers import common
from revela.text.readers.common import DamagedFile, ReadReport, UnsupportedFile
from revela.text.readers.folders import holds_text, walk_files
from revela.text.readers.guarded import Reader, guard
from revela.text.readers.html import read_html
from revela.text.readers.hub import PREFIX, read_dataset, read_hub
from revela.text.readers.json_files import read_json, read_jsonl, read_notebook
from revela.text.readers.latex import read_latex
from revela.text.readers.mail import read_eml, read_mbox
from revela.text.readers.office import read_docx, read_epub, read_odf, read_pptx, read_xlsx
from revela.text.readers.pdf import read_pdf
from revela.text.readers.rows import Fields, document_of
from revela.text.readers.rtf import read_rtf
from revela.text.readers.tables import read_arrow, read_csv, read_parquet
from revela.text.readers.text import read_subtitles, read_text
from revela.types import Document, items_of

VERSION = 10  # raise it when readers or chunking change the text of the same file

READERS: dict[str, Reader] = {
    **dict.fromkeys((".html", ".htm", ".xhtml"), guard(read_html)),
    **dict.fromkeys((".jsonl", ".ndjson"), read_jsonl),
    ".json": read_json,
    ".ipynb": read_notebook,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    **dict.fromkeys((".csv", ".tsv"), read_csv),
    **dict.fromkeys((".srt", ".vtt"), read_subtitles),
    ".pdf": guard(read_pdf),
    **dict.fromkeys((".docx", ".docm"), guard(read_docx)),
    **dict.fromkeys((".pptx", ".pptm"), guard(read_pptx)),
    **dict.fromkeys((".xlsx", ".xlsm"), guard(read_xlsx)),
    **dict.fromkeys((".odt", ".ods", ".odp"), guard(read_odf)),
    ".epub": guard(read_epub),
    ".rtf": guard(read_rtf),
    **dict.fromkeys((".tex", ".ltx"), read_latex),
    **dict.fromkeys((".eml", ".mht", ".mhtml"), read_eml),
    **dict.fromkeys((".mbox", ".mbx"), read_mbox),
}
FORMATS = (
    "text of any ending, Markdown, HTML, source code, notebooks, JSONL, JSON, Parquet, Arrow, CSV, "
    "TSV, PDF, Word, PowerPoint, Excel, OpenDocument, RTF, EPUB, LaTeX or mail (.eml, .mbox); "
    ".gz or .zst of each"
)


@dataclass(frozen=True)
class File:
    """A file of a corpus.

    Attributes:
        name: id of its document, or prefix of its documents' ids.
        given_by_name: whether the user named it, rather than its folder; it must then have a
            supported format.
    """

    path: Path
    name: str
    given_by_name: bool = False


@dataclass(frozen=True)
class DocumentSource:
    """A source without a path: texts, documents or a dataset of a program, or one of the hub.

    Attributes:
        name: for messages and the model card.
    """

    name: str
    read: Callable[[Fields, ReadReport], Iterator[Document]]

    def __str__(self) -> str:
        return self.name


Source = Path | DocumentSource


def sources_of(corpus: Any) -> list[Source]:
    """The sources of a corpus: a path or hub:owner/name, as a string or Path; texts, Documents and
    Paths; or a dataset of the library datasets.

    Raises:
        RevelaError: it is empty, has other items, or its first text is a path.
    """
    if isinstance(corpus, str | Path):
        return [Path(corpus)]
    if hasattr(corpus, "with_format"):
        if isinstance(corpus, Mapping):
            raise RevelaError(f"this dataset has the splits {', '.join(corpus)}: give one of them")
        return [DocumentSource("dataset", partial(read_dataset, corpus, "dataset"))]
    items = list(items_of(corpus, "corpus", (str, Path, Document)))
    sources: list[Source] = [item for item in items if isinstance(item, Path)]
    if texts := [item for item in items if not isinstance(item, Path)]:
        sources.append(DocumentSource("texts", partial(_read_texts, texts)))
        first = texts[0]
        if isinstance(first, str) and (first.startswith(PREFIX) or os.path.exists(first)):  # noqa: PTH110
            raise RevelaError(f"{first} is a path, but strings in a list are texts: give a Path")
    if not sources:
        raise RevelaError("corpus is empty: give texts, documents or paths")
    return sources


def write_source(source: DocumentSource, fields: Fields, file: Path) -> Path:
    """Write the documents of a source as JSONL with these fields; returns the file."""
    with atomic_write(file) as temporary, temporary.open("w", encoding="utf-8") as lines:
        for document in source.read(fields, ReadReport()):
            row = {"id": document.id, fields.title: document.title, fields.text: document.text}
            lines.write(json.dumps(row) + "\n")  # a lone surrogate is escaped, and then reported
    return file


def _read_texts(items: Sequence[Any], fields: Fields, report: ReadReport) -> Iterator[Document]:
    """The items as documents; the id of a text is its index."""
    for i, item in enumerate(items):
        row = {fields.text: item}
        one = item if isinstance(item, Document) else document_of(row, str(i), fields, report)
        if one is not None:
            yield one


def read_sources(
    sources: Iterable[Source | str], fields: Fields, report: ReadReport
) -> Iterator[Document]:
    """Every document of every source, in order of source, path and row."""
    listed = list[File | DocumentSource]()  # at once, as no row may have the id of a file
    for source in sources:
        if (name := str(source)).startswith(PREFIX):
            source = DocumentSource(name, partial(read_hub, name))
        listed += [source] if isinstance(source, DocumentSource) else files_of(source, report)
    for one in listed:
        if isinstance(one, File):
            yield from read_file(one, fields, report)
        else:
            yield from map(_cleaned, one.read(fields, report))


def files_of(source: Path | str, report: ReadReport) -> Iterator[File]:
    """The files of a file or folder, in order of their paths. A name that looks like an earlier
    one, or like the id of a row of an earlier file, gets a number.
    """
    path = Path(source)
    expected = f"give a folder, a file ({FORMATS}), or hub:owner/name"
    if not path.exists():
        raise RevelaError(f"{path} does not exist: {expected}")
    if path.is_dir():
        names = set[str]()
        for file in walk_files(path, report):
            if holds_text(file, report, suffix(file) in READERS):
                name = shown = common.display_path(file.relative_to(path))
                numbers = count(2)
                while common.is_of_file(name, names):
                    name = f"{shown} ({next(numbers)})"
                names.add(name)
                yield File(file, name)
    else:
        names = {name := common.display_path(Path(path.name))}
        yield File(path, name, given_by_name=True)
    report.names |= names


def _cleaned(document: Document) -> Document:
    return replace(document, text=common.squeeze(common.without_data(document.text)))


def _with_date(documents: Iterable[Document], path: Path) -> Iterator[Document]:
    """Add the type of the file, and the date in ISO 8601: the document's own, or else that of the
    file's last change.
    """
    about = {"type": suffix(path).removeprefix("."), "date": ""}
    with suppress(OSError, OverflowError, ValueError):  # a time after the year 9999
        about["date"] = date.fromtimestamp(path.stat().st_mtime).isoformat()
    for document in documents:
        day = iso_date(document.metadata.get("date")) or about["date"]
        yield replace(document, metadata={**about, **document.metadata, "date": day})


def read_file(file: File, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """The documents of a file."""
    path, name = file.path, file.name
    reader = READERS.get(suffix(path), read_text)
    before = common.size_and_time(path)
    try:
        documents = map(_cleaned, reader(path, name, fields, report))
        yield from _with_date(documents, path) if fields.for_search else documents
    except UnsupportedFile as error:
        if file.given_by_name:
            raise RevelaError(f"{path}: {error}") from error
        if error.short:
            report.leave_unread(path, error.short)
        else:
            report.skip(error.reason, f"{name} ({error.detail})" if error.detail else name)
        if not error.by_programs:
            report.count_bytes(path, read=False)
    except RevelaError:
        raise
    except Exception as error:  # libraries raise many kinds for broken files
        report.count_bytes(path, read=False)
        if isinstance(error, DamagedFile):
            report.skip(str(error), name, bad=True)
        elif isinstance(error, OSError) and error.errno:
            report.skip(common.unreadable_because(error), name, bad=True)
        else:
            where = f"{name}: {first_line(error)[:80]}"
            report.skip(f"damaged or encrypted {suffix(path) or 'file'}", where, bad=True)
    else:
        report.count_bytes(path, read=True)
    if common.size_and_time(path) != before:
        raise common.FileChanged(
            f"{path} changed while it was read: wait until nothing writes to it, or give a copy, "
            "and run again"
        )
