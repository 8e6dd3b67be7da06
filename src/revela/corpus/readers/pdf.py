"""PDF files by pypdf, which is an extra: a file is a document, its pages joined."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path

from revela.corpus.readers.opened import Damaged, Unsuited, opened
from revela.corpus.readers.rows import Fields
from revela.corpus.report import Report
from revela.types import Document


def read_pdf(path: Path, name: str, fields: Fields, report: Report) -> Iterator[Document]:
    if importlib.util.find_spec("pypdf") is None:
        raise Unsuited("PDF, which takes pip install 'revela[pdf]'")
    from pypdf import PdfReader

    logging.getLogger("pypdf").setLevel(
        logging.CRITICAL
    )  # it warns of every small fault that it mends
    with opened(path) as handle:
        try:
            reader = PdfReader(handle)
            pages = [page.extract_text() for page in reader.pages]
            title = str((reader.metadata and reader.metadata.title) or "")
        except OSError:
            raise
        except Exception as error:  # whatever a broken file makes its parser raise: KeyError, RecursionError, its own errors
            raise Damaged("damaged or encrypted PDF", type(error).__name__) from error
    text = "\n\n".join(page.strip() for page in pages if page.strip())
    if not text:
        raise Unsuited("PDF without text; run it through character recognition first")
    # A font without a table of characters can give halves of surrogate pairs.
    yield Document(
        name,
        text.encode("utf-8", "replace").decode(),
        " ".join(title.encode("utf-8", "replace").decode().split()),
    )
