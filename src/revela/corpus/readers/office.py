"""PDF (the pdf extra), Word, PowerPoint, Excel (the office extra) and e-books: one document of text
or Markdown per file.

mammoth, python-pptx and openpyxl lose least: kreuzberg dropped speaker notes and a chapter, and
calamine allocates memory for every empty cell before the last.
"""

from __future__ import annotations

import logging
import posixpath
import re
import xml.etree.ElementTree as ET
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote

from revela.corpus.readers import common
from revela.corpus.readers.common import (
    DamagedFile,
    ReadReport,
    UnsupportedFile,
    open_seekable,
    reader_extra,
    without_surrogates,
)
from revela.corpus.readers.html import decode_page, extract_fragment
from revela.corpus.readers.rows import Fields
from revela.types import Document

_HEADING = re.compile(r"<h([1-6])\b[^<>]*(?<!/)>", re.I)


def read_pdf(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """The text of all pages, with a form feed between them."""
    with reader_extra("pdf", "PDF"):
        from pypdf import PdfReader
    # pypdf warns of every fault that it repairs.
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    with open_seekable(path) as handle:
        reader = PdfReader(handle)
        text = _joined(
            (page.extract_text() for page in reader.pages), "PDF", "; run OCR on it first", True
        )
        title = str((reader.metadata and reader.metadata.title) or "")
    # A font without a character table can give halves of surrogate pairs.
    text, title = map(without_surrogates, (text, title))
    yield Document(name, text, " ".join(title.split()))


def read_docx(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """Paragraphs, lists, tables, text boxes and notes."""
    with reader_extra("office", "Word"):
        import mammoth
    no_image = mammoth.images.img_element(lambda image: {})
    style = "p[style-name='Title'] => h1:fresh"
    with _open_zipped(path) as handle:
        page = mammoth.convert_to_html(handle, style_map=style, convert_image=no_image)
    yield Document(name, _joined([_markdown(page.value)], "Word"))


def read_pptx(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """Slides, a heading each, with tables and speaker notes."""
    with reader_extra("office", "PowerPoint"):
        from pptx import Presentation
    with _open_zipped(path) as handle:
        parts = (part for slide in Presentation(handle).slides for part in _slide(slide))
        yield Document(name, _joined(parts, "PowerPoint"))


def _slide(slide: Any) -> Iterator[str]:
    title = slide.shapes.title
    if title is not None and title.text.strip():
        yield f"# {' '.join(title.text.split())}"
    yield from _shapes(s for s in slide.shapes if title is None or s != title)
    if slide.has_notes_slide and (notes := slide.notes_slide.notes_text_frame):
        yield notes.text


def _shapes(shapes: Iterable[Any]) -> Iterator[str]:
    for shape in shapes:
        if hasattr(shape, "shapes"):  # a group
            yield from _shapes(shape.shapes)
        elif shape.has_text_frame:
            yield shape.text_frame.text
        elif getattr(shape, "has_table", False):
            yield "\n".join(_row(cell.text for cell in row.cells) for row in shape.table.rows)


def read_xlsx(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """Sheets, a heading each, with a line per row and tabs between cells."""
    with reader_extra("office", "Excel"):
        import openpyxl
    with _open_zipped(path) as handle:
        sheets = openpyxl.load_workbook(handle, read_only=True, data_only=True).worksheets
        yield Document(name, _joined(map(_sheet, sheets), "Excel"))


def _sheet(sheet: Any) -> str:
    sheet.reset_dimensions()  # they may be wrong
    text = "\n".join(filter(None, map(_row, sheet.iter_rows(values_only=True))))
    return f"# {sheet.title}\n\n{text}" if text else ""


def _row(cells: Iterable[object]) -> str:
    texts = ("" if cell is None else " ".join(str(cell).split()) for cell in cells)
    return "\t".join(texts).strip()


def read_epub(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """The chapters of an e-book in their order."""
    with _open_zipped(path) as handle, zipfile.ZipFile(handle) as book:
        yield Document(name, _joined(_chapters(book), "EPUB"))


def _chapters(book: zipfile.ZipFile) -> Iterator[str]:
    container = ET.fromstring(book.read("META-INF/container.xml"))
    package = next(container.iterfind(".//{*}rootfile")).attrib["full-path"]
    about = ET.fromstring(book.read(package))
    files = {item.get("id"): item.get("href", "") for item in about.iterfind(".//{*}item")}
    for chapter in about.iterfind(".//{*}itemref"):
        href = unquote(files[chapter.get("idref")])
        page = book.read(posixpath.join(posixpath.dirname(package), href))
        yield _markdown(decode_page(page))


def _markdown(page: str) -> str:
    """The text of HTML, with Markdown headings."""
    return extract_fragment(_HEADING.sub(lambda tag: tag[0] + "#" * int(tag[1]) + " ", page))


def _open_zipped(path: Path) -> BinaryIO:
    """Open a zipped file; DamagedFile if it is a zip bomb."""
    handle = open_seekable(path)
    with zipfile.ZipFile(handle) as members:
        unpacked = sum(member.file_size for member in members.infolist())
    if unpacked > common.MAX_BYTES + handle.seek(0, 2):  # pictures unpack to their own size
        raise DamagedFile(f"over {common.MAX_BYTES >> 20} MB unpacked")
    handle.seek(0)
    return handle


def _joined(parts: Iterable[str], format: str, advice: str = "", pages: bool = False) -> str:
    """Join the parts of a file; UnsupportedFile if they have no text. ``pages`` stay countable."""
    texts = [part.strip() for part in parts]
    if any(texts):
        return "\n\n\f".join(texts) if pages else "\n\n".join(filter(None, texts))
    raise UnsupportedFile(f"{format} without text{advice}")
