"""PDF: text page by page, and one sentence for what has none or cannot be opened."""

from __future__ import annotations

import gzip
import os
import random
import re

import pytest

from conftest import SENTENCE
from revela.errors import RevelaError
from revela.text.load import read_corpus
from revela.text.readers.pdf import join_words

FONT = "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"


def pdf(pages, title="", font=FONT, page="", more=(), catalog=""):
    """A PDF as its specification has it, with a page for each string.

    A string is shown in Helvetica; one with an operator (ET) is a page's content. ``page`` and
    ``catalog`` are further entries; ``more`` are objects, numbered from 5.
    """
    numbers = [5 + len(more) + 2 * i for i in range(len(pages))]
    kids = " ".join(f"{number} 0 R" for number in numbers)
    objects = [
        f"<< /Type /Catalog /Pages 2 0 R {catalog} >>",
        f"<< /Type /Pages /Count {len(pages)} /Kids [{kids}] >>",
        font,
        f"<< /Title ({title}) >>",
        *more,
    ]
    for number, text in zip(numbers, pages, strict=True):
        content = text if " ET" in text else f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET"
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {number + 1} 0 R "
            f"/Resources << /Font << /F1 3 0 R >> >> {page} >>"
        )
        objects.append(f"<< /Length {len(content)} >>\nstream\n{content}\nendstream")
    out, places = "%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += f"{number} 0 obj\n{body}\nendobj\n"
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    root = f"<< /Size {len(objects) + 1} /Root 1 0 R /Info 4 0 R >>"
    trailer = f"trailer\n{root}\nstartxref\n{len(out)}\n%%EOF"
    body = f"{out}xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}{trailer}"
    return body.encode("latin-1")


def shown(*lines):
    """The content of a page with a string at each of (x, y)."""
    moves = (f"1 0 0 1 {x} {y} Tm ({text}) Tj" for x, y, text in lines)
    return f"BT /F1 12 Tf {' '.join(moves)} ET"


@pytest.fixture
def text_of(reads):
    """The text of a PDF that is made of these arguments."""
    return lambda *given, **more: reads({"a.pdf": pdf(*given, **more)}, min_words=1)[0][0].text


def test_pages_are_joined(reads):
    pages = ["The first page speaks of invoices.", "The second one of archives."]
    ((document,), _) = reads({"a.pdf": pdf(pages, "On paper")})
    assert (document.id, document.title) == ("a.pdf", "On paper")
    assert document.text == "\n\n\f".join(pages)


def test_words_and_titles_of_a_pdf(reads):
    lines = ("The echo-", "location of bats is well-", "known, and well-known are in-", "and out-",
             "puts, X-", "Ray and e-", "mail.")  # fmt: skip
    page = ") Tj 0 -14 Td (".join(lines)
    ((document,), report) = reads({"a.pdf": pdf([page, ""], "Microsoft Word - bats.docx")})
    assert document.text == (
        "The echolocation of bats is well-known, and well-known are in-\nand outputs, X-\nRay and "
        "e-mail."
    )
    assert document.title == ""
    assert report.examples == {"PDF with pages without text, which may be scans": ["a.pdf, page 2"]}


def test_a_table_of_numbers_is_a_line_for_each_row(text_of):
    rows = [("Room", "Summer price", "Winter"), ("Oslo", "120", "80"), ("Ulm", "", "60")]
    row = "{}) Tj 150 0 Td ({}) Tj 150 0 Td ({}) Tj -300 -14 Td ("
    page = f"Prices) Tj 0 -14 Td ({''.join(row.format(*cells) for cells in rows)}By the night."
    assert re.sub(r"\s*\n\s*", "\n", text_of([page])) == (
        "Prices\nRoom: Oslo; Summer price: 120; Winter: 80\nRoom: Ulm; Winter: 60\nBy the night."
    )


def test_columns_of_prose_are_no_table(text_of):
    left = ["Bees dance in 1920 and so", "they tell in 1930 where", "the 40 flowers are"]
    row = "{}) Tj 200 0 Td ({}) Tj 200 0 Td ({}) Tj -400 -14 Td ("
    page = "".join(row.format(line, line.upper(), line.title()) for line in left)
    assert ": " not in text_of([page])


def test_a_table_may_have_a_column_of_sentences(text_of):
    rows = [("Part", "Use in the house", "In stock")]
    rows += [(f"NW-{i}", "holds the door of a room that is open all day", str(i)) for i in (7, 8)]
    cells = [
        (x, 700 - 14 * y, cell)
        for y, row in enumerate(rows)
        for x, cell in zip((72, 150, 420), row, strict=True)
    ]
    assert text_of([shown(*cells)]).splitlines() == [
        f"Part: NW-{i}; Use in the house: holds the door of a room that is open all "
        f"day; In stock: {i}"
        for i in (7, 8)
    ]


WORDS = ["The", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]
ADVANCE = {  # of Helvetica, in thousandths
    **dict.fromkeys("abdeghnopqu", 556), **dict.fromkeys("ckvxyzs", 500),
    **dict.fromkeys("ft ", 278), **dict.fromkeys("ijl", 222), "T": 611, "m": 833, "r": 333,
    "w": 722,
}  # fmt: skip


def width(text, size=12):
    return sum(ADVANCE[letter] for letter in text) * size / 1000


def test_words_set_one_by_one_have_spaces(text_of):
    places, x = [], 72
    for word in WORDS:
        places.append((x, 700, word))
        x += width(word) + 3
    assert text_of([shown(*places)]) == " ".join(WORDS)


@pytest.mark.parametrize("spacing", [0.4, 0.8])
def test_letters_set_one_by_one_are_words(text_of, spacing):
    """As Chrome prints a page with letter-spacing."""
    drawn = ""
    for line, y in (WORDS, 40), (WORDS[::-1], 60):
        drawn += f" BT /F1 16 Tf 1 0 0 -1 20 {y} Tm"
        before = 0
        for letter in " ".join(line):
            drawn += f" {before:.2f} 0 Td ({letter}) Tj"
            before = width(letter, 16) + spacing
        drawn += " ET"
    page = f".24 0 0 -.24 0 792 cm q 3.125 0 0 3.125 0 0 cm{drawn} Q"
    assert text_of([page]) == f"{' '.join(WORDS)}\n{' '.join(WORDS[::-1])}"


HEBREW = "".join(f"<{65 + i:02x}> <{0x5D0 + i:04x}> " for i in range(26))
TO_UNICODE = (
    "/CIDInit /ProcSet findresource begin 12 dict begin begincmap 1 begincodespacerange <00> <ff> "
    f"endcodespacerange 26 beginbfchar {HEBREW} endbfchar endcmap end end"
)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_what_is_written_from_right_to_left(text_of, one_by_one):
    line = "CBA ZYX 42 UT"  # as it looks, from left to right; letters stand for Hebrew ones
    sizes = dict.fromkeys("ABXY", 667) | dict.fromkeys("CU", 722) | dict.fromkeys("ZT", 611)
    sizes |= {" ": 278, "4": 556, "2": 556}
    x, drawn = 72.0, []
    for letter in line:
        drawn.append((round(x, 2), 700, letter))
        x += sizes[letter] * 12 / 1000
    font = f"{FONT[:-2]} /ToUnicode 5 0 R >>"
    more = [f"<< /Length {len(TO_UNICODE)} >>\nstream\n{TO_UNICODE}\nendstream"]
    given = [shown(*drawn) if one_by_one else shown((72, 700, line))]
    as_read = "".join(chr(0x5D0 + ord(c) - 65) if c.isalpha() else c for c in "TU 42 XYZ ABC")
    assert text_of(given, font=font, more=more) == as_read


def test_chinese_without_its_font_in_the_file(text_of):
    said = "房租每月五号之前转账给房东"
    system = "<< /Registry (Adobe) /Ordering (GB1) /Supplement 2 >>"
    more = [
        f"<< /Type /Font /Subtype /CIDFontType0 /BaseFont /STSong-Light /CIDSystemInfo {system} "
        "/FontDescriptor 6 0 R >>",
        "<< /Type /FontDescriptor /FontName /STSong-Light /Flags 6 /ItalicAngle 0 /Ascent 752 "
        "/Descent -271 /CapHeight 737 /StemV 58 /FontBBox [-25 -254 1000 880] >>",
    ]
    font = (
        "<< /Type /Font /Subtype /Type0 /BaseFont /STSong-Light /Encoding /UniGB-UCS2-H "
        "/DescendantFonts [5 0 R] >>"
    )
    page = f"BT /F1 12 Tf 72 700 Td <{said.encode('utf-16-be').hex()}> Tj ET"
    assert text_of([page], font=font, more=more) == said


def test_columns_are_read_one_after_the_other(text_of):
    left, right = ([(x, 700 - 14 * y, f"{side} line {y}.") for y in range(4)]
                   for x, side in ((72, "Left"), (330, "Right")))  # fmt: skip
    expected = [f"{side} line {y}." for side in ("Left", "Right") for y in range(4)]
    assert text_of([shown(*left, *right)]).splitlines() == expected


@pytest.mark.parametrize(("turn", "rotate"), [(0, 0), (90, 90), (180, 180), (270, 270), (90, 0)])
def test_turned_pages_are_read_from_top_to_bottom(text_of, turn, rotate):
    matrix = {0: "1 0 0 1 100 500", 90: "0 1 -1 0 300 100", 180: "-1 0 0 -1 500 300",
              270: "0 -1 1 0 300 600"}[turn]  # fmt: skip
    rows = [("Room", "Summer", "Winter"), ("Oslo", "120", "80"), ("Ulm", "70", "60")]
    cells = [(100 * x, -14 * y, cell) for y, row in enumerate(rows) for x, cell in enumerate(row)]
    page = f"q {matrix} cm {shown((0, 28, 'The prices of'), (0, 14, 'this year are'), *cells)} Q"
    assert text_of([page], page=f"/Rotate {rotate}").splitlines() == [
        "The prices of",
        "this year are",
        "Room: Oslo; Summer: 120; Winter: 80",
        "Room: Ulm; Summer: 70; Winter: 60",
    ]


def test_what_is_filled_into_a_form_is_read(text_of):
    box = "/Type /Annot /Subtype /Widget /Rect [72 600 200 620]"
    more = [
        f"<< {box} /FT /Tx /T (f1) /TU (Colour of the hive) /V (green\\nand blue) >>",
        f"<< {box} /FT /Ch /Ff 131072 /T (town) /Opt [(Hull) (York)] /V (Hull) >>",
        f"<< {box} /FT /Btn /T (agree) /V /Yes >>",
        f"<< {box} /FT /Tx /T (empty) >>",
    ]
    fields = "[5 0 R 6 0 R 7 0 R 8 0 R]"
    text = text_of(
        ["Please fill in this form."],
        page=f"/Annots {fields}", catalog=f"/AcroForm << /Fields {fields} >>", more=more,
    )  # fmt: skip
    assert text == "Please fill in this form.\n\nColour of the hive: green and blue\ntown: Hull"


def test_a_password_is_named(reads):
    """The standard handler with keys of 40 bits (ISO 32000-1, 7.6.3), and hashes of no password."""
    about = f"/Filter /Standard /V 1 /R 2 /P -4 /O <{'00' * 32}> /U <{'00' * 32}>"
    whole = pdf(["Bees dance."], more=[f"<< {about} >>"])
    entry = b"/Encrypt 5 0 R /ID [<01> <01>] /Info"
    report = reads({"a.pdf": whole.replace(b"/Info", entry), "b.txt": SENTENCE})[1]
    (place,) = report.examples["damaged or encrypted .pdf"]
    assert place.startswith("a.pdf: ") and "password" in place


def test_a_page_that_is_damaged_costs_no_other(reads):
    whole = pdf(["The first page speaks of invoices.", "The second of archives.", "The last."])
    torn = whole.replace(b"7 0 obj\n<< /Type /Page", b"7 0 obj\n<< /Type /Xage")
    ((document,), report) = reads({"a.pdf": torn})
    assert document.text == "The first page speaks of invoices.\n\n\f\n\n\fThe last."
    assert report.examples == {"damaged page": ["a.pdf, page 2"]}


def test_damage_is_one_sentence(reads):
    whole, rng = pdf(["The first page speaks of invoices."] * 3), random.Random(0)
    files = {"whole.pdf": whole}
    for i in range(40):
        torn = bytearray(whole if i % 2 else whole[: rng.randrange(len(whole))])
        for _ in range(rng.choice((1, 10, 100))):
            torn[rng.randrange(len(torn))] = rng.randrange(256)
        files[f"{i}.pdf"] = bytes(torn)
    documents, report = reads(files, distinct=False)
    assert "whole.pdf" in {document.id for document in documents}
    told = {place.split(":")[0] for places in report.examples.values() for place in places}
    assert told and len(documents) + sum(report.skipped.values()) >= 41


@pytest.mark.parametrize("name", ["Über uns\n2.pdf", os.fsdecode(b"caf\xe9.pdf"), "a.pdf.gz"])
def test_files_of_any_name(reads, name):
    whole = pdf(["The first page speaks of invoices."])
    ((document,), _) = reads({name: gzip.compress(whole) if name.endswith(".gz") else whole})
    assert document.text == "The first page speaks of invoices."


def test_a_pdf_without_text_and_a_broken_one_are_named(reads, tmp_path):
    files = {"scan.pdf": pdf([""]), "torn.pdf": b"%PDF-1.4 and no more", "b.txt": SENTENCE}
    documents, report = reads(files, max_bad_share=0.5)
    assert len(documents) == 1 and report.bad == 1
    said = "PDF without text; run OCR on it first"
    assert report.examples[said] == ["scan.pdf"]
    assert report.examples["damaged or encrypted .pdf"][0].startswith("torn.pdf: ")
    with pytest.raises(RevelaError, match=rf"scan\.pdf: {said}"):
        read_corpus([tmp_path / "scan.pdf"])


HYPHENS = [
    ("The echo-\nlocation of bats.", "The echolocation of bats."),
    ("A long-\nterm plan, long in the term.", "A long-term plan, long in the term."),
    ("It is with-\nout an end; go out with me, without her.", "It is without an end;"),
    ("Well-\nknown are bats, and well-known.", "Well-known are bats, and well-known."),
    ("A well-\nknown fact.", "A wellknown fact."),
    ("Die Befehls-\nsequenz: des Befehls Sequenz.", "Die Befehlssequenz: des"),
    ("A long\u00ad\nterm plan, long in the term.", "A longterm plan, long in the term."),
]


@pytest.mark.parametrize(("text", "joined"), HYPHENS)
def test_a_hyphen_between_two_words_of_the_text_stays(text, joined):
    assert join_words(text).startswith(joined)


def marked(text, *glyphs):
    """Glyphs that show a text, with the steps to them."""
    moves = " ".join(f"{step} 0 Td ({glyph}) Tj" for step, glyph in glyphs)
    return f"/Span <</ActualText <FEFF{text.encode('utf-16-be').hex()}>>> BDC {moves} EMC"


@pytest.mark.parametrize("rows", [0, 2])
def test_the_text_of_several_glyphs_is_read_once(text_of, rows):
    """As Chrome prints Thai: the last mark of a letter begins after the next letter."""
    bee = marked("ผึ้", (0, "m"), (5, "."), (8.4, "."))
    content = f"{bee} -.1 0 Td (n) Tj {marked('ตั', (8.9, 'n'), (8, '.'))} 5 0 Td (n) Tj"
    content += f" {marked('ผึ้', (14, 'm'), (13.3, '.'))} 0 0 Td (n) Tj"
    numbers = " ".join(f"1 0 0 1 72 {700 - 20 * row} Tm (hive {row} 12) Tj" for row in range(rows))
    lines = text_of([f"BT /F1 16 Tf 1 0 0 1 72 740 Tm {content} {numbers} ET"]).split("\n")
    assert lines == ["ผึ้nตัn ผึ้n", *(f"hive {row} 12" for row in range(rows))]
