"""PDF: text page by page, and one sentence for what has none or cannot be opened."""

from __future__ import annotations

import io
import re
import sys

import pytest

from revela.corpus.load import read_corpus
from revela.corpus.readers.pdf import join_words
from revela.errors import RevelaError


def pdf(pages: list[str], title: str = "") -> bytes:
    """A PDF as its specification has it, with a page of Helvetica for each string."""
    kids = " ".join(f"{5 + 2 * i} 0 R" for i in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Count {len(pages)} /Kids [{kids}] >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
        f"<< /Title ({title}) >>",
    ]
    for i, text in enumerate(pages):
        content = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET"
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {6 + 2 * i} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>"
        )
        objects.append(f"<< /Length {len(content)} >>\nstream\n{content}\nendstream")
    out, places = "%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += f"{number} 0 obj\n{body}\nendobj\n"
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    root = f"<< /Size {len(objects) + 1} /Root 1 0 R /Info 4 0 R >>"
    trailer = f"trailer\n{root}\nstartxref\n{len(out)}\n%%EOF"
    return f"{out}xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}{trailer}".encode()


def test_pages_are_joined(tmp_path):
    pytest.importorskip("pypdf", reason="needs the pdf extra")
    (tmp_path / "a.pdf").write_bytes(
        pdf(["The first page speaks of invoices.", "The second one of archives."], "On paper")
    )
    document = read_corpus([tmp_path])[0][0]
    assert (document.id, document.title) == ("a.pdf", "On paper")
    assert document.text == "The first page speaks of invoices.\n\n\fThe second one of archives."


def test_words_and_titles_of_a_pdf(tmp_path):
    pytest.importorskip("pypdf", reason="needs the pdf extra")
    lines = ("The echo-", "location of bats is well-", "known, and well-known are in-", "and out-",
             "puts, X-", "Ray and e-", "mail.")  # fmt: skip
    page = ") Tj 0 -14 Td (".join(lines)
    (tmp_path / "a.pdf").write_bytes(pdf([page, ""], "Microsoft Word - bats.docx"))
    ((document,), report) = read_corpus([tmp_path])
    assert document.text == (
        "The echolocation of bats is well-known, and well-known are in-\nand outputs, X-\nRay and "
        "e-mail."
    )
    assert document.title == ""
    assert report.examples == {"PDF with pages without text, which may be scans": ["a.pdf, page 2"]}


def test_a_table_of_numbers_is_a_line_for_each_row(tmp_path):
    pytest.importorskip("pypdf", reason="needs the pdf extra")
    rows = [("Room", "Summer price", "Winter"), ("Oslo", "120", "80"), ("Ulm", "", "60")]
    row = "{}) Tj 150 0 Td ({}) Tj 150 0 Td ({}) Tj -300 -14 Td ("
    page = f"Prices) Tj 0 -14 Td ({''.join(row.format(*cells) for cells in rows)}By the night."
    (tmp_path / "a.pdf").write_bytes(pdf([page]))
    assert re.sub(r"\s*\n\s*", "\n", read_corpus([tmp_path])[0][0].text) == (
        "Prices\nRoom: Oslo; Summer price: 120; Winter: 80\nRoom: Ulm; Winter: 60\nBy the night."
    )


def test_columns_of_prose_are_no_table(tmp_path):
    pytest.importorskip("pypdf", reason="needs the pdf extra")
    left = ["Bees dance in 1920 and so", "they tell in 1930 where", "the 40 flowers are"]
    row = "{}) Tj 200 0 Td ({}) Tj 200 0 Td ({}) Tj -400 -14 Td ("
    page = "".join(row.format(line, line.upper(), line.title()) for line in left)
    (tmp_path / "a.pdf").write_bytes(pdf([page]))
    assert ": " not in read_corpus([tmp_path])[0][0].text


def test_what_is_filled_into_a_form_is_read(tmp_path):
    pypdf = pytest.importorskip("pypdf", reason="needs the pdf extra")
    from pypdf.generic import ArrayObject, DictionaryObject, NameObject, TextStringObject

    writer = pypdf.PdfWriter(clone_from=io.BytesIO(pdf(["Please fill in this form."])))
    given = {"/T": "f1", "/TU": "Colour of the hive", "/V": "green"}
    field = DictionaryObject({NameObject(k): TextStringObject(v) for k, v in given.items()})
    field[NameObject("/FT")] = NameObject("/Tx")
    fields = {NameObject("/Fields"): ArrayObject([writer._add_object(field)])}
    writer.root_object[NameObject("/AcroForm")] = DictionaryObject(fields)
    writer.write(tmp_path / "a.pdf")
    (document,) = read_corpus([tmp_path])[0]
    assert document.text == "Please fill in this form.\n\nColour of the hive: green"


def test_a_pdf_without_text_and_a_broken_one_are_named(tmp_path):
    pytest.importorskip("pypdf", reason="needs the pdf extra")
    (tmp_path / "scan.pdf").write_bytes(pdf([""]))
    (tmp_path / "torn.pdf").write_bytes(b"%PDF-1.4 and no more")
    (tmp_path / "b.txt").write_text("A text file of more than five words.")
    documents, report = read_corpus([tmp_path], max_bad_share=0.5)
    assert len(documents) == 1 and report.bad == 1
    assert report.examples["PDF without text; run OCR on it first"] == ["scan.pdf"]
    assert report.examples["damaged or encrypted .pdf"][0].startswith("torn.pdf: ")
    with pytest.raises(
        RevelaError,
        match=r"scan\.pdf: PDF without text; run OCR on it first",
    ):
        read_corpus([tmp_path / "scan.pdf"])


def test_without_the_extra_one_sentence_says_so(tmp_path, monkeypatch):
    (tmp_path / "a.pdf").write_bytes(pdf(["The first page speaks of invoices."]))
    (tmp_path / "b.txt").write_text("A text file of more than five words.")
    monkeypatch.setitem(sys.modules, "pypdf", None)
    reason = "PDF, which needs pypdf: run pip install 'revela-retriever[pdf]'"
    with pytest.raises(RevelaError, match=re.escape(f"a.pdf: {reason}")):
        read_corpus([tmp_path / "a.pdf"])
    documents, report = read_corpus([tmp_path])
    assert len(documents) == 1 and not report.skipped
    assert report.lines()[1] == "not read: 1 .pdf (pip install 'revela-retriever[pdf]')"


@pytest.mark.parametrize(
    ("text", "joined"),
    [
        ("The echo-\nlocation of bats.", "The echolocation of bats."),
        ("A long-\nterm plan, long in the term.", "A long-term plan, long in the term."),
        ("It is with-\nout an end; go out with me, without her.", "It is without an end;"),
        ("A long\u00ad\nterm plan, long in the term.", "A longterm plan, long in the term."),
    ],
)
def test_a_hyphen_between_two_words_of_the_text_stays(text, joined):
    assert join_words(text).startswith(joined)
