"""Read Word, PowerPoint, Excel, OpenDocument and e-books.

A file is one document of text or Markdown.

mammoth, python-pptx and openpyxl lose the least: kreuzberg dropped speaker notes and a chapter, and
calamine allocates memory for every empty cell before the last.
"""

from __future__ import annotations

import posixpath
import re
import xml.etree.ElementTree as ET
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote

from revela.text.headings import first_heading
from revela.text.readers import common
from revela.text.readers.common import DamagedFile, ReadReport, UnsupportedFile
from revela.text.readers.html import extract_fragment
from revela.text.readers.rows import Fields
from revela.text.readers.table_lines import sheet_tables, table_lines
from revela.text.readers.text import plain_title
from revela.types import Document

_NO_VALUE = re.compile(rb"<f\b[^>]*(?:/>|>[^<]*</f>)\s*(?:<v\s*/>|<v></v>|</c>)")  # of a formula
_MERGED = re.compile(rb'<mergeCell ref="([A-Z]+\d+:[A-Z]+\d+)"')
# The parts of a number's format other than digits, and a whole format.
_LITERAL = re.compile(
    r'"(?P<quoted>[^"]*)"|\\.|[_*].|\[(?:\$(?P<currency>[^-\]]*))?[^\]]*\]|[^#0?.,A-Za-z]'
)
_ANY = re.sub(r"\?P<\w+>", "?:", _LITERAL.pattern)
_NUMBER_FORMAT = re.compile(
    rf"(?P<before>(?:{_ANY})*)(?P<digits>[#0?,]+(?:\.[#0?]*)?)(?P<after>(?:{_ANY})*)"
)
_AROUND = ("header", "footer", "header-left", "footer-left")
_NOT_SHOWN = ("annotation", "note-citation")
# Mammoth's parser takes time quadratic in the length of a run.
_LONG_RUN = re.compile(rb">[^<]{%d}" % 2**22)
_HEADING = re.compile(r"<h([1-6])\b[^<>]*(?<!/)>", re.I)


def read_docx(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """Read paragraphs, lists, tables, text boxes and notes; headers and footers come last."""
    import mammoth

    no_image = mammoth.images.img_element(lambda image: {})
    style = "p[style-name='Title'] => h1:fresh"
    with _unzipped(path) as (handle, parts):
        around = _around(parts)
        main = [parts.read(part) for part in parts.namelist() if part.startswith("word/document")]
        if any(_LONG_RUN.search(part) for part in main):
            raise DamagedFile("a run of over 4 MB of text: split it")
        if any(b"<m:oMath" in part for part in main):
            report.note("Word with equations, which are not read", name)
        page = mammoth.convert_to_html(handle, style_map=style, convert_image=no_image)
        title = _title_in(parts, "docProps/core.xml")
    yield _titled(name, _joined([_markdown(page.value), *around], "Word"), title)


def _around(parts: zipfile.ZipFile) -> list[str]:
    """The paragraphs of headers and footers, each once, without those that are page numbers."""
    found = dict[str, None]()
    for part in sorted(parts.namelist()):
        if re.fullmatch(r"word/(header|footer)\d*\.xml", part):
            for paragraph in ET.fromstring(parts.read(part)).iterfind(".//{*}p"):
                found["".join(text.text or "" for text in paragraph.iterfind(".//{*}t"))] = None
    return [text for text in found if any(map(str.isalpha, text))]


def read_pptx(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """Read slides, each with a heading, with tables and speaker notes."""
    from pptx import Presentation

    with _unzipped(path) as (handle, parts):
        texts = [text for slide in Presentation(handle).slides for text in _slide(slide)]
        title = _title_in(parts, "docProps/core.xml")
    yield _titled(name, _joined(texts, "PowerPoint"), title)


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
            rows = ([cell.text for cell in row.cells] for row in shape.table.rows)
            yield "\n".join(table_lines(map(_cells, rows)))


def read_xlsx(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """Read sheets, each with a heading and a line per row."""
    import openpyxl

    with _unzipped(path) as (handle, parts):
        names = [part for part in parts.namelist() if part.startswith("xl/worksheets/")]
        pages = {part: parts.read(part) for part in names}
        if count := sum(len(_NO_VALUE.findall(page)) for page in pages.values()):
            remark = "formulas without a value: open the file in Excel and save it"
            report.note(remark, f"{name}: {count:,}")
        sheets = openpyxl.load_workbook(handle, read_only=True, data_only=True).worksheets
        texts = (_sheet(sheet, pages.get(sheet._worksheet_path, b"")) for sheet in sheets)
        text = _joined(texts, "Excel")
        title = _title_in(parts, "docProps/core.xml")
    yield Document(name, text, plain_title(title))


def _sheet(sheet: Any, page: bytes) -> str:
    """The text of a sheet, whose merged cells are read from its XML."""
    from openpyxl.utils import range_boundaries

    found = (range_boundaries(ref.decode()) for ref in _MERGED.findall(page))
    merged = [(top - 1, first - 1, bottom - 1, last - 1) for first, top, last, bottom in found]
    sheet.reset_dimensions()  # they may be wrong
    rows = (_cells(map(_shown, row)) for row in sheet.iter_rows())
    text = "\n\n".join(sheet_tables(rows, merged))
    return f"# {sheet.title}\n\n{text}" if text else ""


def _shown(cell: Any) -> object:
    """A cell's value; a number as its format shows it.

    >>> from types import SimpleNamespace as Cell
    >>> _shown(Cell(value=0.195, number_format="0.0%"))
    '19.5%'
    >>> _shown(Cell(value=-1200.5, number_format='#,##0.00" kg"'))
    '-1,200.50 kg'
    """
    value = cell.value
    if type(value) not in (int, float):
        return value
    positive, *negative = cell.number_format.split(";")
    form = _NUMBER_FORMAT.fullmatch(negative[0] if negative and value < 0 else positive)
    plain = f"{value:.10g}" if isinstance(value, float) else value
    if not form or form["digits"].endswith(","):  # of thousands
        return plain
    number = Decimal(repr(abs(value) if negative else value)) * (100 if "%" in form[0] else 1)
    whole, _, part = form["digits"].partition(".")
    try:
        number = number.quantize(Decimal(1).scaleb(-len(part)), ROUND_HALF_UP)
    except InvalidOperation:  # over 28 digits
        return plain
    width = number.is_signed() + whole.count("0") + len(part) + bool(part)
    digits = f"{number:0{width}{',' * (',' in whole)}f}"
    spare = len(part) - part.count("0")  # digits that are shown if they are not 0
    digits = digits[: len(digits) - spare] + digits[len(digits) - spare :].rstrip("0")
    before, after = (_LITERAL.sub(_literal, form[name]) for name in ("before", "after"))
    return f"{before}{digits.rstrip('.')}{after}"


def _literal(found: re.Match[str]) -> str:
    """What a part of a number's format shows: nothing for a colour or the width of a space."""
    sign = found[0]
    return found["quoted"] or found["currency"] or ("" if sign[0] in '_*["' else sign[-1])


def _cells(cells: Iterable[object]) -> list[str]:
    """Each cell as one line of text; a date without its time of day."""
    texts = ("" if cell is None else " ".join(str(cell).split()) for cell in cells)
    return [text.removesuffix(" 00:00:00") for text in texts]


def read_epub(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """Read the chapters of an e-book, in order."""
    with _unzipped(path) as (_, book):
        container = ET.fromstring(book.read("META-INF/container.xml"))
        package = next(container.iterfind(".//{*}rootfile")).attrib["full-path"]
        about = ET.fromstring(book.read(package))
        text = _joined(_chapters(book, package, about, name, report), "EPUB")
        yield _titled(name, text, about.findtext(".//{*}title") or "")


def _chapters(
    book: zipfile.ZipFile, package: str, about: ET.Element, name: str, report: ReadReport
) -> Iterator[str]:
    files = {item.get("id"): item.get("href", "") for item in about.iterfind(".//{*}item")}
    for chapter in about.iterfind(".//{*}itemref"):
        href = unquote(files.get(chapter.get("idref"), ""))
        where = f"{name}, {href or chapter.get('idref')}"
        try:
            page = book.read(posixpath.normpath(posixpath.join(posixpath.dirname(package), href)))
            yield _markdown(common.decoded(page, where, report))
        except (DamagedFile, KeyError, zipfile.BadZipFile, zlib.error, EOFError):
            report.skip("damaged or missing chapter", where)


def read_odf(path: Path, name: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """Read text, sheets or slides of OpenDocument (LibreOffice)."""
    with _unzipped(path) as (_, parts):
        body = ET.fromstring(parts.read("content.xml")).find("{*}body")
        styles = ET.fromstring(parts.read("styles.xml")) if "styles.xml" in parts.namelist() else ()
        around = (part for style in styles for part in style.iter() if _local(part.tag) in _AROUND)
        texts = [*_blocks(body), *dict.fromkeys(text for part in around for text in _blocks(part))]
        text = _joined(texts, "OpenDocument")
        title = _title_in(parts, "meta.xml")
    yield _titled(name, text, title)


def _blocks(parent: ET.Element | None) -> Iterator[str]:
    for element in parent if parent is not None else ():
        kind, named = _local(element.tag), {_local(key): v for key, v in element.attrib.items()}
        if kind == "h":
            yield f"{'#' * min(6, int(named.get('outline-level', 1)))} {_inline(element)}"
        elif kind == "p":
            yield _inline(element)
        elif kind == "list-item":
            yield "- " + "\n".join(_blocks(element))
        elif kind == "list":
            yield "\n".join(_blocks(element))
        elif kind == "table":
            lines = "\n\n".join(sheet_tables([*_odf_cells(row)] for row in _odf_rows(element)))
            is_sheet = parent is not None and _local(parent.tag) == "spreadsheet"
            yield f"# {named.get('name', '')}\n\n{lines}" if is_sheet and lines else lines
        elif kind not in ("tracked-changes", "sequence-decls", "forms", "table-of-content"):
            yield from _blocks(element)


def _odf_rows(parent: ET.Element) -> Iterator[ET.Element]:
    """The rows of a table and of its groups of rows, without those of tables in its cells."""
    for child in parent:
        if _local(child.tag) == "table-row":
            yield child
        elif _local(child.tag) != "table":
            yield from _odf_rows(child)


def _odf_cells(row: ET.Element) -> Iterator[str]:
    for cell in row:
        repeated = next((v for key, v in cell.items() if key.endswith("columns-repeated")), "1")
        text = " ".join(" ".join(_blocks(cell)).split())
        # The last cell stands for the rest of the row.
        yield from [text] * (min(int(repeated), 100) if text else min(int(repeated), 1000))


def _inline(element: ET.Element) -> str:
    """The text of a paragraph, without comments; its notes are in brackets."""
    spaces = {"s": " ", "tab": "\t", "line-break": "\n"}
    parts = [element.text or ""]
    for child in element:
        kind = _local(child.tag)
        inner = spaces.get(kind) or ("" if kind in _NOT_SHOWN else _inline(child))
        inner = f" ({inner})" if kind == "note" else inner
        parts += [inner, child.tail or ""]
    return "".join(parts)


def _local(tag: str) -> str:
    return tag.rpartition("}")[2]


def _title_in(parts: zipfile.ZipFile, part: str) -> str:
    """The title in the metadata of a zipped document."""
    with suppress(KeyError, ET.ParseError, zipfile.BadZipFile):
        return ET.fromstring(parts.read(part)).findtext(".//{*}title") or ""
    return ""


def _titled(name: str, text: str, title: str) -> Document:
    """A document with the title of its metadata, or else with its first heading as title."""
    return Document(name, text, plain_title(title) or plain_title(first_heading(text)))


def _markdown(page: str) -> str:
    """The text of HTML, with Markdown headings."""
    return extract_fragment(_HEADING.sub(lambda tag: tag[0] + "#" * int(tag[1]) + " ", page))


@contextmanager
def _unzipped(path: Path) -> Iterator[tuple[BinaryIO, zipfile.ZipFile]]:
    """Open a zipped file, and its parts; DamagedFile if it is a zip bomb."""
    with common.open_seekable(path) as handle, zipfile.ZipFile(handle) as parts:
        unpacked = sum(part.file_size for part in parts.infolist())
        if unpacked > common.MAX_BYTES + handle.seek(0, 2):  # pictures do not grow when unpacked
            raise DamagedFile(f"over {common.MAX_BYTES >> 20} MB unpacked: split it")
        yield handle, parts


def _joined(parts: Iterable[str], format: str) -> str:
    """Join the parts of a file; UnsupportedFile if they have no text."""
    if text := "\n\n".join(filter(None, map(str.strip, parts))):
        return text
    raise UnsupportedFile(f"{format} without text")
