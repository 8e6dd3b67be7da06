"""PDF files by pypdf (the pdf extra): a file is a document, its pages joined."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from revela.corpus.readers.common import (
    DamagedFile,
    ReadReport,
    UnsupportedFile,
    open_seekable,
    reader_extra,
)
from revela.corpus.readers.rows import Fields
from revela.types import Document


def read_pdf(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """The text of all pages as one document."""
    with reader_extra("pdf", "PDF"):
        from pypdf import PdfReader
    # It warns of every small fault that it repairs.
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    with open_seekable(path) as handle:
        try:
            reader = PdfReader(handle)
            pages = [page.extract_text() for page in reader.pages]
            title = str((reader.metadata and reader.metadata.title) or "")
        except OSError:
            raise
        except Exception as error:  # a broken file gives KeyError, RecursionError, pypdf's own ...
            raise DamagedFile("damaged or encrypted PDF", type(error).__name__) from error
    text = "\n\n".join(page.strip() for page in pages if page.strip())
    if not text:
        raise UnsupportedFile("PDF without text; run OCR on it first")
    # A font without a character table can give halves of surrogate pairs.
    text, title = (part.encode("utf-8", "replace").decode() for part in (text, title))
    yield Document(name, text, " ".join(title.split()))
