"""Sources -> documents: one reader a format, each ``(path, name, fields, report) -> documents``,
chosen by a file's ending.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from revela.corpus.readers.html import read_html
from revela.corpus.readers.hub import PREFIX, read_hub
from revela.corpus.readers.jsonl import read_jsonl
from revela.corpus.readers.opened import (
    CODE,
    PROSE,
    READ_ERRORS,
    Damaged,
    Steady,
    Trouble,
    Unsuited,
    suffix,
    walked,
    whole_text,
)
from revela.corpus.readers.pdf import read_pdf
from revela.corpus.readers.rows import Fields
from revela.corpus.readers.stackexchange import read_posts
from revela.corpus.readers.tables import read_arrow, read_csv, read_parquet
from revela.corpus.report import Report
from revela.errors import RevelaError
from revela.types import Document


def read_text(path: Path, name: str, fields: Fields, report: Report) -> Iterator[Document]:
    """A text file, or one of source code: a document."""
    yield Document(name, whole_text(path), "", "code" if suffix(path) in CODE else "prose")


Reader = Callable[[Path, str, Fields, Report], Iterator[Document]]
READERS: dict[str, Reader] = {
    **dict.fromkeys(sorted(PROSE | CODE), read_text),
    ".html": read_html,
    ".htm": read_html,
    ".xhtml": read_html,
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".csv": read_csv,
    ".tsv": read_csv,
    ".xml": read_posts,
    ".pdf": read_pdf,
}
KNOWN = "text, Markdown, HTML, source code, JSONL, Parquet, Arrow, CSV, TSV, PDF or a StackExchange Posts.xml; .gz of each"


def read_sources(
    sources: Iterable[Path | str], fields: Fields, report: Report
) -> Iterator[Document]:
    """Every document of every source, in order of source, path and row.

    Args:
        sources: files, folders (searched), and datasets of the hub as hub:owner/name.
        fields: what the fields of a row are called.
        report: told of everything that is left out.

    Raises:
        RevelaError: a source is missing or of no known kind, or a file changes while it is read.
    """
    for source in sources:
        if str(source).startswith(PREFIX):
            yield from read_hub(str(source), fields, report)
            continue
        path = Path(source)
        if not path.exists():
            raise RevelaError(
                f"{path} does not exist: give a folder, a file ({KNOWN}), or hub:owner/name"
            )
        if path.is_dir():
            for file in walked(path, report):
                if _is_wanted(file):
                    yield from _read(file, file.relative_to(path).as_posix(), fields, report)
        elif suffix(path) in READERS:
            yield from _read(path, path.name, fields, report, asked_for=True)
        else:
            raise RevelaError(
                f"{path}: unknown ending; give a folder, a file ({KNOWN}), or hub:owner/name"
            )


def _is_wanted(file: Path) -> bool:
    """XML is settings and data more often than text; of a folder's, only a StackExchange dump's
    posts are read.
    """
    ending = suffix(file)
    return (
        ending in READERS
        and file.is_file()
        and (ending != ".xml" or file.name.lower().startswith("posts.xml"))
    )


def _read(
    path: Path, name: str, fields: Fields, report: Report, asked_for: bool = False
) -> Iterator[Document]:
    steady = Steady(path)
    try:
        yield from READERS[suffix(path)](path, name, fields, report)
    except Unsuited as error:
        if asked_for:
            raise RevelaError(f"{path}: {error}") from error
        report.skip(error.reason, _named(name, error))
    except Damaged as error:
        report.skip(error.reason, _named(name, error), bad=True)
    except READ_ERRORS as error:
        known = isinstance(error, OSError) and error.strerror
        report.skip(
            f"unreadable, {known.lower()}" if known else "damaged gzip, its rest lost",
            name,
            bad=True,
        )
    steady.check()


def _named(name: str, trouble: Trouble) -> str:
    return f"{name} ({trouble.detail})" if trouble.detail else name
