"""Word, PowerPoint, Excel, e-books and notebooks: all of their text, in order, or one sentence."""

from __future__ import annotations

import datetime
import json
import zipfile

import pytest

from conftest import SENTENCE
from revela.errors import RevelaError
from revela.text.load import read_corpus
from revela.text.readers import common
from revela.text.readers.text import plain_title

WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
TYPES = "http://schemas.openxmlformats.org/package/2006/content-types"
LINKS = "http://schemas.openxmlformats.org/package/2006/relationships"
OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument"
BOOK = "urn:oasis:names:tc:opendocument:xmlns:container"
MAIN = "application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"


def zipped(path, parts, compression=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in parts.items():
            file.writestr(name, content)


def docx(path, *paragraphs, style="Heading1", compression=zipfile.ZIP_DEFLATED):
    """A Word file; a paragraph that begins with # is a heading, a tuple a row of a table."""

    def xml(part):
        if isinstance(part, tuple):
            cells = "".join(f"<w:tc>{xml(cell)}</w:tc>" for cell in part)
            return f"<w:tbl><w:tr>{cells}</w:tr></w:tbl>"
        is_heading = part.startswith("# ")
        look = f'<w:pPr><w:pStyle w:val="{style}"/></w:pPr>' if is_heading else ""
        return f"<w:p>{look}<w:r><w:t>{part.removeprefix('# ')}</w:t></w:r></w:p>"

    body = "".join(map(xml, paragraphs))
    parts = {
        "[Content_Types].xml": f'<Types xmlns="{TYPES}"><Default Extension="rels" ContentType="'
        'application/vnd.openxmlformats-package.relationships+xml"/><Override '
        f'PartName="/word/document.xml" ContentType="{MAIN}"/></Types>',
        "_rels/.rels": f'<Relationships xmlns="{LINKS}"><Relationship Id="a" Type="{OFFICE}" '
        'Target="word/document.xml"/></Relationships>',
        "word/document.xml": f'<w:document xmlns:w="{WORD}"><w:body>{body}</w:body></w:document>',
    }
    zipped(path, parts, compression)


def pptx(path, *slides):
    """Slides of (title, text, row of a table, notes)."""
    from pptx import Presentation

    shown = Presentation()
    for title, text, cells, notes in slides:
        slide = shown.slides.add_slide(shown.slide_layouts[1])
        slide.shapes.title.text, slide.placeholders[1].text = title, text
        group = slide.shapes.add_group_shape()
        group.shapes.add_textbox(0, 0, 99, 99).text_frame.text = f"grouped {text}"
        table = slide.shapes.add_table(1, len(cells), 0, 0, 99, 99).table
        for cell, content in zip(table.rows[0].cells, cells, strict=True):
            cell.text = content
        slide.notes_slide.notes_text_frame.text = notes
    shown.save(path)


def xlsx(path, sheets, far=None, merged=(), formats=()):
    """Sheets of rows by name; ``far``: what the last cell of all says; cells that are merged, and
    formats of the cells of the first row.
    """
    import openpyxl

    book = openpyxl.Workbook()
    book.remove(book.active)
    for name, rows in sheets.items():
        sheet = book.create_sheet(name)
        for row in rows:
            sheet.append(row)
        for cells in merged:
            sheet.merge_cells(cells)
        for cell, form in zip(sheet[1], formats, strict=False):
            cell.number_format = form
    if far:
        sheet["XFD1048576"] = far
    book.save(path)


def epub(path, chapters, folder="OEBPS/"):
    """Chapters by the name of their file, in the order of reading."""
    items = "".join(f'<item id="{i}" href="{name}"/>' for i, name in enumerate(chapters))
    spine = "".join(f'<itemref idref="{i}"/>' for i in range(len(chapters)))
    parts = {
        "META-INF/container.xml": f'<container xmlns="{BOOK}"><rootfiles><rootfile '
        f'full-path="{folder}a.opf"/></rootfiles></container>',
        f"{folder}a.opf": '<package xmlns="http://www.idpf.org/2007/opf"><manifest>'
        f"{items}</manifest><spine>{spine}</spine></package>",
    }
    for name, body in sorted(chapters.items()):
        page = f"<html><head><title>x</title></head><body>{body}</body></html>"
        parts[folder + name.replace("%20", " ")] = page
    zipped(path, parts)


OPEN = "urn:oasis:names:tc:opendocument:xmlns"


def odf(path, body, kind="text", title=""):
    """A file of LibreOffice."""
    names = ("office", "table", "text")
    spaces = " ".join(f'xmlns:{name}="{OPEN}:{name}:1.0"' for name in names)
    about = f'<m xmlns:d="http://purl.org/dc/elements/1.1/"><d:title>{title}</d:title></m>'
    content = f"<office:body><office:{kind}>{body}</office:{kind}></office:body>"
    content = f"<office:document-content {spaces}>{content}</office:document-content>"
    zipped(path, {"content.xml": content, "meta.xml": about})


def notebook(path, *cells):
    """Cells of (kind, source)."""
    printed = [{"output_type": "stream", "text": ["never read\n"]}]
    made = [{"cell_type": kind, "source": text, "outputs": printed} for kind, text in cells]
    path.write_text(json.dumps({"cells": made, "nbformat": 4}))


def changed(path, change):
    """A zipped file in which each part is what ``change`` makes of its name and content, if that is
    not None.
    """
    with zipfile.ZipFile(path) as old:
        parts = {name: change(name, old.read(name)) for name in old.namelist()}
    zipped(path, {name: content for name, content in parts.items() if content is not None})


def text_of(path, title=""):
    documents, report = read_corpus([path])
    assert len(documents) == 1 and not report.skipped and not report.unread
    assert (documents[0].id, documents[0].title) == (path.name, title)
    return documents[0].text


def test_word_with_headings_and_tables(tmp_path):
    rows = ("мёд", "двенадцать")
    last = "Последней идёт медовуха."
    docx(tmp_path / "a.docx", "# Пчёлы", "Пчёлы танцуют &amp; поют.", rows, last)
    expected = ["# Пчёлы", "Пчёлы танцуют & поют.", "мёд: двенадцать", last]
    assert text_of(tmp_path / "a.docx", "Пчёлы").split("\n\n") == expected
    docx(tmp_path / "b.docx", "# Über alles", SENTENCE, style="Title")
    assert text_of(tmp_path / "b.docx").startswith("Über alles\n")  # of a style that has no name


def test_slides_in_order_with_groups_tables_and_notes(tmp_path):
    slides = (
        ("Bees", "They dance.", ("kind", "drone"), "Say it slowly."),
        (*("蜜蜂", "它们跳舞。", ("花", "蜜"), "Thank the walrus."),),
    )
    pptx(tmp_path / "a.pptx", *slides)
    assert text_of(tmp_path / "a.pptx", "Bees").split("\n\n") == [
        *("# Bees", "They dance.", "grouped They dance.", "kind: drone", "Say it slowly."),
        *("# 蜜蜂", "它们跳舞。", "grouped 它们跳舞。", "花: 蜜", "Thank the walrus."),
    ]


def test_sheets_with_numbers_and_days_and_a_cell_far_away(tmp_path):
    rows = [["honey", 12.5, datetime.date(2024, 3, 1)], [], [None, 3, "two\nlines"]]
    xlsx(tmp_path / "a.xlsx", {"Prices": rows, "Empty": [], "Größe": [["yak", True]]}, "a walrus")
    assert text_of(tmp_path / "a.xlsx") == (
        "# Prices\n\nhoney | 12.5 | 2024-03-01\n\n3 | two lines\n\n# Größe\n\nyak: True\n\na walrus"
    )


HEAD, PARTS = ["Part", "Shelf", "Left"], [["NW-1", "C4", 212], ["NW-2", "A1", 9]]
LINES = "Part: NW-1; Shelf: C4; Left: 212\nPart: NW-2; Shelf: A1; Left: 9"


@pytest.mark.parametrize(
    ("rows", "merged", "lines"),
    [
        ([["The stock"], HEAD, *PARTS], ["A1:C1"], f"The stock\n{LINES}"),
        ([["Stock", None, None, "May"], [*HEAD, "Hall"], ["NW-1", "C4", 2, "H1"]], ["A1:C1"],
         "Stock: May\nPart: NW-1; Shelf: C4; Left: 2; Hall: H1"),
        ([HEAD, [], *PARTS], [], f"Part | Shelf | Left\n\n{LINES}"),
        ([HEAD, PARTS[0], [], PARTS[1], [], ["All", None, 221]], [],
         LINES.replace("\n", "\n\n") + "\n\nAll: 221"),
        ([[None, "Summer", "Winter"], ["Oslo", 120, 80]], [], "Oslo; Summer: 120; Winter: 80"),
        ([["Room", "Summer", None, "Winter"], [None, "low", "high"], ["Oslo", 1, 2, 3]],
         ["A1:A2", "B1:C1", "D1:D2"], "Room: Oslo; Summer low: 1; Summer high: 2; Winter: 3"),
        ([HEAD, PARTS[0], [None, "A1", 9], ["NW-2", "A2", 3]], ["A2:A3"],
         f"{LINES.replace('NW-2', 'NW-1')}\nPart: NW-2; Shelf: A2; Left: 3"),
        ([["A long note"], [], []], ["A1:C3"], "A long note"),
        ([[*HEAD, None, "Room", "Beds", "Price"], [*PARTS[0], None, "Ulm", 2, 70], PARTS[1]], [],
         f"{LINES}\n\nRoom: Ulm; Beds: 2; Price: 70"),
    ],
)  # fmt: skip
def test_rows_stand_below_their_headings(tmp_path, rows, merged, lines):
    xlsx(tmp_path / "a.xlsx", {"Sheet": rows}, merged=merged)
    assert text_of(tmp_path / "a.xlsx") == f"# Sheet\n\n{lines}"


NORTH, QUARTERS = ["North", 1, 2, 3, 4], ["Q1", "Q2", "Q1", "Q2"]
BY_YEAR = "Region: North; 2023 Q1: 1; 2023 Q2: 2; 2024 Q1: 3; 2024 Q2: 4"
YEARS = [2023, None, 2024, None]


@pytest.mark.parametrize(
    ("rows", "merged", "line"),
    [
        ([["Region", *YEARS], [None, *QUARTERS], NORTH], ["B1:C1", "D1:E1"], BY_YEAR),
        ([["Sales", "May"], [None, *YEARS], ["Region", *QUARTERS], NORTH], [], BY_YEAR),
        ([["Sales"], ["in euros"], [], ["Region", *YEARS], ["Region", *QUARTERS], NORTH],
         ["B4:C4", "D4:E4"], BY_YEAR),
        ([["Sales"], ["in euros"], [], ["Region", *YEARS], [None, *QUARTERS], NORTH], [], BY_YEAR),
        ([["Region", "Sales"], [None, *YEARS], [None, *QUARTERS], NORTH], [],
         BY_YEAR.replace(" 20", " Sales 20")),
        ([["Region", "Sales"], [None, *YEARS], [None, *QUARTERS], NORTH],
         ["B1:E1", "B2:C2", "D2:E2"], BY_YEAR.replace(" 20", " Sales 20")),
        ([["Region", 2023, 2023, 2024, 2024], [None, *QUARTERS], NORTH], [], BY_YEAR),
        ([["Region", *YEARS, "All"], [None, *QUARTERS, None], [*NORTH, 10]], [],
         f"{BY_YEAR}; All: 10"),
        ([[None, *YEARS], ["Region", *QUARTERS, "All"], [*NORTH, 10]], [], f"{BY_YEAR}; All: 10"),
        ([["Sold", *YEARS], ["Region", *QUARTERS], NORTH], ["B1:C1", "D1:E1"], f"Sold {BY_YEAR}"),
        ([[None, "Day", None, "Night"], ["Room", "who", "when", "who", "when"],
          ["Hall", "Ann", "at six", "Bo", "at two"]], [],
         "Room: Hall; Day who: Ann; Day when: at six; Night who: Bo; Night when: at two"),
        ([["Region", 2023, 2024], ["North", 1, 2]], [], "Region: North; 2023: 1; 2024: 2"),
        ([["Unit", datetime.date(2024, 1, 1), datetime.date(2024, 2, 1)], ["IT", 12, 13]], [],
         "Unit: IT; 2024-01-01: 12; 2024-02-01: 13"),
        ([["Anna", 1980, 2010], ["Bo", 1970, 1999]], [], "Bo | 1970 | 1999"),
        ([["bolt", "M4", None, None], [None, "M5", "zinc", "red"], ["nut", "M6", "tin", "x"]],
         [], "nut | M6 | tin | x"),
        ([["North", 5, None, 6], [None, 1, 2, 3], ["South", 1, 2, 3]], [], "South | 1 | 2 | 3"),
    ],
)  # fmt: skip
def test_rows_of_headings_are_joined(tmp_path, rows, merged, line):
    xlsx(tmp_path / "a.xlsx", {"Sheet": rows}, merged=merged)
    assert text_of(tmp_path / "a.xlsx").splitlines()[-1] == line


NUMBERS = [
    (0.1 + 0.2, "General", "0.3"),
    (0.195, "0%", "20%"),
    (1200.5, "#,##0.00\\ [$€-407]", "1,200.50 €"),
    (1234567, '"CHF" #,##0', "CHF 1,234,567"),
    (-7.25, "#,##0.00_);(#,##0.00)", "(7.25)"),
    (-7.25, "#,##0.00_-;[Red]-#,##0.00_-", "-7.25"),
    (42, "00000", "00042"),
    (2.5, '0" kg"', "3 kg"),
    (45.678, "0.##", "45.68"),
    (1.5, "# ?/?", "1.5"),
    (12000, "0.00E+00", "12000"),
    (1.989e30, "0.00", "1.989e+30"),
    (-5, "000", "-005"),
    (datetime.date(2024, 3, 1), "d.m.yy", "2024-03-01"),
    ("0042", "@", "0042"),
]


@pytest.mark.parametrize(("value", "form", "shown"), NUMBERS)
def test_numbers_are_shown_as_in_their_cells(tmp_path, value, form, shown):
    xlsx(tmp_path / "a.xlsx", {"Sheet": [[value, "of all"]]}, formats=[form])
    text = text_of(tmp_path / "a.xlsx").removeprefix("# Sheet\n\n")
    assert text in (f"{shown} | of all", f"{shown}: of all")


@pytest.mark.parametrize("folder", ["OEBPS/", ""])
def test_chapters_of_a_book_in_the_order_of_reading(tmp_path, folder):
    chapters = {
        "b%20one.xhtml": "<h1 class='c'>One</h1><p>The first speaks of bees.</p>",
        "a.xhtml": "<h2>Zwei</h2><p>Die zweite von Bären &amp; Zebras.</p>",
    }
    epub(tmp_path / "a.epub", chapters, folder)
    assert text_of(tmp_path / "a.epub", "One") == (
        "# One\n\nThe first speaks of bees.\n\n## Zwei\n\nDie zweite von Bären & Zebras."
    )


@pytest.mark.parametrize("codec", ["utf-8", "utf-16", "cp1252"])
def test_chapters_are_xhtml(tmp_path, codec):
    head = "<head><title/><script src='a.js'/></head><body><h3 id='x'/>"
    page = f"<?xml version='1.0' encoding='{codec}'?>\n<html>{head}<h2>Zwei</h2>"
    body = "<p>Bären<a id='p1'/> tanzen.</p><![CDATA[Sie hören.]]></body>"
    chapter = f"{page}{body}</html>".encode(codec)
    epub(tmp_path / "a.epub", {"a.xhtml": "A first chapter."})
    changed(tmp_path / "a.epub", lambda name, old: chapter if name.endswith(".xhtml") else old)
    assert text_of(tmp_path / "a.epub") == "## Zwei\n\nBären tanzen.\n\nSie hören."


def test_headers_and_footers_are_read_and_equations_named(tmp_path):
    docx(tmp_path / "a.docx", "Bees dance in the hive.")
    w = f'xmlns:w="{WORD}"'
    letter = f"<w:hdr {w}><w:p><w:r><w:t>Hive </w:t></w:r><w:r><w:t>NW-7</w:t></w:r></w:p></w:hdr>"
    number = f"<w:ftr {w}><w:p><w:r><w:t>12</w:t></w:r></w:p></w:ftr>"
    equation = b'<m:oMath xmlns:m="m"/></w:body>'
    changed(tmp_path / "a.docx", lambda _, old: old.replace(b"</w:body>", equation))
    with zipfile.ZipFile(tmp_path / "a.docx", "a") as parts:
        for part, text in {"header1": letter, "header2": letter, "footer1": number}.items():
            parts.writestr(f"word/{part}.xml", text)
    ((document,), report) = read_corpus([tmp_path / "a.docx"], min_words=1)
    assert document.text == "Bees dance in the hive.\n\nHive NW-7"
    assert report.examples == {"Word with equations, which are not read": ["a.docx"]}


def test_formulas_that_nobody_has_computed_are_counted(tmp_path):
    rows = [["honey", 12], ["wax", "=B1*2"], ["all of it", "=SUM(B1:B2)"]]
    xlsx(tmp_path / "a.xlsx", {"Prices": rows})
    ((document,), report) = read_corpus([tmp_path / "a.xlsx"])
    assert document.text == "# Prices\n\nhoney: 12\nwax\nall of it"
    assert report.examples == {
        "formulas without a value: open the file in Excel and save it": ["a.xlsx: 2"]
    }


def test_one_bad_chapter_costs_no_other(tmp_path):
    chapters = {"a.xhtml": "<p>Bats hear.</p>", "b.xhtml": "gone", "c.xhtml": "<p>Owls too.</p>"}
    title = b"<metadata><title>Night animals</title></metadata><manifest>"

    def damaged(name, old):
        old = old.replace(b"<manifest>", title)
        old = old.replace(b"<spine>", b"<spine><itemref idref='none'/>")
        return None if name.endswith("b.xhtml") else old

    epub(tmp_path / "a.epub", chapters)
    changed(tmp_path / "a.epub", damaged)
    ((document,), report) = read_corpus([tmp_path / "a.epub"], min_words=1)
    assert (document.text, document.title) == ("Bats hear.\n\nOwls too.", "Night animals")
    assert report.examples == {"damaged or missing chapter": ["a.epub, none", "a.epub, b.xhtml"]}


@pytest.mark.parametrize("title", ["", "On dances"])
def test_open_document(tmp_path, title):
    """A heading, a list with a note, and a table."""
    cell = "<table:table-cell><text:p>{}</text:p></table:table-cell>"
    row = "<table:table-row>{}</table:table-row>"
    rows = [("Room", "Summer", "Winter"), ("Oslo", "120", "80")]
    table = "".join(row.format("".join(map(cell.format, cells))) for cells in rows)
    note = "<text:note-citation>1</text:note-citation><text:note-body><text:p>Often.</text:p>"
    body = (
        '<text:h text:outline-level="2">Of <text:span>bees</text:span></text:h><text:list>'
        f"<text:list-item><text:p>They<text:s/>dance<text:note>{note}</text:note-body></text:note>."
        f'</text:p></text:list-item></text:list><table:table table:name="T">{table}</table:table>'
    )
    inner = f"<table:table>{row.format(cell.format('Bath'))}</table:table>"
    outer = row.format(f"{cell.format('Rome')}<table:table-cell>{inner}</table:table-cell>")
    body += f"<table:table><table:table-header-rows>{outer}</table:table-header-rows></table:table>"
    odf(tmp_path / "a.odt", body, title=title)
    expected = (
        "## Of bees\n\n- They dance (Often.).\n\nRoom: Oslo; Summer: 120; Winter: 80\n\nRome: Bath"
    )
    assert text_of(tmp_path / "a.odt", title) == expected


def test_rich_text(tmp_path):
    (tmp_path / "a.rtf").write_bytes(
        rb"{\rtf1\ansi\ansicpg1251\uc1{\fonttbl{\f0 Arial;}}{\info{\title On bees}}{\*\x hidden}"
        rb"\pard The {\b bees} \'cf\'f7\'e5\'eb\'fb \u1087?\u1095?\par\line They"
        rb" da\-nce{\footnote\pard Often.}\{\}.\par"
        b"\r\n{\\pict 0102}A\\~cell\\cell b\\cell\\row}"
    )
    expected = "The bees Пчелы пч\n\nThey dance Often.{}.\n\nA\u00a0cell | b"
    assert text_of(tmp_path / "a.rtf", "On bees") == expected


def test_titles_that_programs_give_are_none():
    for title in ("Untitled", "(anonymous)", "Microsoft Word - a1.docx", "Slide 1", "a_b.dvi"):
        assert plain_title(title) == "", title
    assert plain_title("Untitled love\n") == "Untitled love"


def test_notebooks_are_read_without_what_they_printed(tmp_path):
    cells = ("markdown", ["# Bats\n", "They hear."]), ("code", "a\n```\nb"), ("raw", None)
    notebook(tmp_path / "a.ipynb", *cells)
    text = text_of(tmp_path / "a.ipynb", "Bats")
    assert text == "# Bats\nThey hear.\n\n````\na\n```\nb\n````"


def test_broken_and_empty_ones_are_named(tmp_path):
    docx(tmp_path / "a.docx", SENTENCE)
    docx(tmp_path / "empty.docx", "")
    whole = (tmp_path / "a.docx").read_bytes()
    for name in ("torn.docx", "torn.pptx", "torn.xlsx", "torn.epub"):
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    (tmp_path / "other.xlsx").write_bytes(whole)
    (tmp_path / "other.epub").write_bytes(whole)
    (tmp_path / "new.ipynb").write_text('{"cells": []}')
    documents, report = read_corpus([tmp_path], max_bad_share=1)
    assert [d.id for d in documents] == ["a.docx"] and report.bad == 6
    assert report.examples["Word without text"] == ["empty.docx"]
    bad = [place.split(":")[0] for place in report.examples["damaged or encrypted .xlsx"]]
    assert bad == ["other.xlsx", "torn.xlsx"]
    assert report.examples["notebook without text"] == ["new.ipynb"]
    with pytest.raises(RevelaError, match=r"empty\.docx: Word without text"):
        read_corpus([tmp_path / "empty.docx"])


def test_what_unpacks_to_much_more_than_it_is_is_damaged(tmp_path):
    docx(tmp_path / "bomb.docx", SENTENCE)
    with zipfile.ZipFile(tmp_path / "bomb.docx", "a", zipfile.ZIP_DEFLATED) as parts:
        parts.writestr("word/media/image1.bmp", bytes(common.MAX_BYTES + 2**20))
    docx(tmp_path / "large.docx", SENTENCE, "b" * 30_000, compression=zipfile.ZIP_STORED)
    documents, report = read_corpus([tmp_path], max_bad_share=0.5)
    assert [d.id for d in documents] == ["large.docx"]
    assert report.examples == {"over 64 MB unpacked: split it": ["bomb.docx"]} and report.bad == 1
