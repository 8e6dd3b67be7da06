"""Small files that are large inside: they are named or read in part, and the others are read."""

from __future__ import annotations

import csv
import gzip
import random
import re
import resource
import signal
import sys
import time
import zlib

import openpyxl
import pytest
from bad_readers import SENTENCE, read_and_abort, read_for_ever, read_into_memory, read_with_remarks

from revela.text.load import read_corpus
from revela.text.readers import guarded, table_lines
from revela.text.readers.guarded import GROWN
from tests.text.readers.test_office import docx, odf
from tests.text.readers.test_pdf import pdf

IN_PART = "read in part: over 20 characters per byte of the file"


@pytest.fixture
def folder(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.docx").write_bytes(b"")
    return tmp_path


@pytest.fixture
def read_by(monkeypatch):
    """Read a folder with one of these readers for Word, in a process of its own."""
    monkeypatch.setattr(guarded, "PROCESS", guarded.GuardedProcess())

    def read(reader, folder):
        from revela.text import readers

        monkeypatch.setitem(readers.READERS, ".docx", guarded.guard(reader))
        return read_corpus([folder], max_bad_share=1, distinct=False)

    return read


ENDS = "needs over 1 GB of memory to read, or crashes its reader: split it"


@pytest.mark.parametrize("reader", [read_and_abort, read_into_memory])
def test_a_file_that_ends_the_process_is_named_and_the_next_is_read(folder, read_by, reader):
    ((document,), report) = read_by(reader, folder)
    assert (document.id, document.text) == ("b.docx", SENTENCE)
    assert report.examples == {ENDS: ["a.docx"]} and report.bad == 1


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers of processor time")
def test_a_file_that_takes_for_ever_is_named_and_the_next_is_read(folder, read_by, monkeypatch):
    monkeypatch.setattr(guarded, "SECONDS", 0.5)
    ((document,), report) = read_by(read_for_ever, folder)
    assert document.id == "b.docx"
    assert report.examples == {"takes too much processor time to read: split it": ["a.docx"]}


def test_what_a_reader_reports_and_raises_reaches_the_report(folder, read_by):
    for name in "cd":
        (folder / f"{name}.docx").write_bytes(b"text")
    (folder / "e.txt").write_text(SENTENCE)
    ((document,), report) = read_by(read_with_remarks, folder)
    assert document.id == "e.txt"
    assert report.examples == {
        "a remark": ["a.docx", "b.docx", "c.docx", "d.docx"],
        "a damaged page": [f"{name}.docx, page 2" for name in "abcd"],
        "no text in it": ["a.docx"],
        "over a limit: split it": ["b.docx"],
        "unreadable, permission denied": ["c.docx"],
        "damaged or encrypted .docx": ["d.docx: 'word/document.xml'"],
    }
    assert report.bad == 7 and report.bytes_unread == 8


def test_one_process_reads_many_files(tmp_path, monkeypatch):
    monkeypatch.setattr(guarded, "PROCESS", guarded.GuardedProcess())
    started = []
    start = guarded.GuardedProcess._start
    monkeypatch.setattr(
        guarded.GuardedProcess, "_start", staticmethod(lambda: started.append(1) or start())
    )
    for number in range(5):
        docx(tmp_path / f"{number}.docx", f"{SENTENCE} {number}")
        (tmp_path / f"{number}.pdf").write_bytes(pdf([f"{SENTENCE} {number}"]))
    assert len(read_corpus([tmp_path], distinct=False)[0]) == 10 and len(started) == 1
    guarded.PROCESS._process.kill()  # by the system, say: the next file starts another
    guarded.PROCESS._process.wait()
    assert len(read_corpus([tmp_path], distinct=False)[0]) == 10 and len(started) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="needs limits of memory")
def test_a_pdf_that_unpacks_to_more_than_memory_is_one_sentence(tmp_path):
    line = b"BT /F1 12 Tf 72 720 Td (Bees dance here.) Tj ET\n" * 20_000
    packer = zlib.compressobj(9)
    packed = b"".join(packer.compress(line) for _ in range(500)) + packer.flush()
    whole = pdf(["@ ET"])
    whole = whole.replace(
        b"<< /Length 4 >>", b"<< /Length %d /Filter /FlateDecode >>" % len(packed)
    )
    (tmp_path / "a.pdf").write_bytes(whole.replace(b"@ ET", packed))
    (tmp_path / "b.pdf").write_bytes(pdf(["The page of b speaks of invoices."]))
    documents, report = read_corpus([tmp_path], max_bad_share=0.5)
    assert [document.id for document in documents] == ["b.pdf"]
    assert report.bad == 1 and report.examples == {ENDS: ["a.pdf"]}


def words(seed, count=50):
    rng = random.Random(seed)
    return " ".join(
        rng.choice("aeiou") + "".join(rng.choices("bdfgklmnprst", k=5)) for _ in range(count)
    )


def write_ods(path):
    """A row of cells that each stand for a thousand."""
    cell = "table:table-cell"
    row = "".join(
        f"<{cell} table:number-columns-repeated='1000'><text:p>{words(number)}</text:p></{cell}>"
        for number in range(100)
    )
    row = f"<table:table-row>{row}</table:table-row>"
    odf(path, f'<table:table table:name="s">{row}</table:table>', "spreadsheet")


def write_xlsx(path):
    """Many cells that share one long text."""
    book = openpyxl.Workbook(write_only=True)
    sheet = book.create_sheet("s")
    text = words(0, 300)
    for _ in range(60):
        sheet.append([text] * 60)
    book.save(path)


def write_html(path):
    cell = "<td colspan=50 rowspan=50>{}</td>"
    rows = ("".join(cell.format(words(10 * i + j)) for j in range(5)) for i in range(20))
    path.write_text(f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>")


@pytest.mark.parametrize(
    "name, write", [("a.ods", write_ods), ("a.xlsx", write_xlsx), ("a.html", write_html)]
)
def test_cells_that_are_repeated_are_read_in_part(tmp_path, name, write):
    write(tmp_path / name)
    (tmp_path / "note.txt").write_text(SENTENCE)
    (grown, note), report = read_corpus([tmp_path])
    assert note.text == SENTENCE and len(grown.text) == GROWN
    assert report.examples == {IN_PART: [name]}


def test_a_run_of_megabytes_in_a_word_file_is_named(tmp_path):
    docx(tmp_path / "a.docx", "the lighthouse" + " " * 32_000_000 + "keeper")
    docx(tmp_path / "b.docx", SENTENCE, "c" * 2_000_000)
    begin = time.process_time() + resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    (document,), report = read_corpus([tmp_path])
    seconds = time.process_time() + resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - begin
    assert document.id == "b.docx" and seconds < 5
    assert report.examples == {
        "a run of over 4 MB of text: split it": ["a.docx"],
        IN_PART: ["b.docx"],
    }


@pytest.mark.parametrize(
    ("name", "blank"),
    [("a.txt.gz", " "), ("a.rtf.gz", " "), ("a.md.gz", " \n"), ("a.csv.gz", " \n")],
)
def test_megabytes_of_white_space_are_squeezed(reads, name, blank):
    text = f"the lighthouse{blank * 2_000_000}keeper"
    text = {"a.rtf.gz": f"{{\\rtf1 {text}}}", "a.csv.gz": f'a,b\nc,"{text}"'}.get(name, text)
    begin = time.process_time()
    (document,), report = reads({name: gzip.compress(text.encode())}, min_words=1)
    assert time.process_time() - begin < 5 and len(document.text) < 300 and not report.noted
    assert re.search(r"the lighthouse\s+keeper", document.text)


def test_a_survey_is_read_column_by_column(tmp_path):
    """80 long questions, and rows with a word for each; the last has one answer of its own."""
    rng = random.Random(0)
    with (tmp_path / "a.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow([f"Question {n}: {'how satisfied are you ' * 4}" for n in range(80)])
        for _ in range(300):
            rows.writerow([rng.choice(["agree", "neutral", "disagree"]) for _ in range(80)])
        rows.writerow([*["agree"] * 79, "the lighthouse keeper was rude"])
    (document,), report = read_corpus([tmp_path])
    assert len(document.text) < (tmp_path / "a.csv").stat().st_size
    last = document.text.splitlines()[-1]
    assert last.startswith("Question 79: ") and "the lighthouse keeper was rude" in last
    assert report.examples == {"table with long headings, read column by column": ["a.csv"]}


def test_a_survey_in_a_sheet_is_read_column_by_column():
    rows = [[f"Question {n}: how satisfied are you?" for n in range(20)]]
    rows += [["yes", "no", "yes", *["no"] * 17] for _ in range(3000)]
    (text,) = table_lines.sheet_tables(rows)
    assert text.splitlines()[2:4] == [
        "Question 2: how satisfied are you?: yes",
        "Question 3: how satisfied are you?: no",
    ]
    rows[1:] = [[f"a word that is grade {n}"] * 20 for n in range(3000)]
    (text,) = table_lines.sheet_tables(rows)
    assert text.count("Question 19: ") == 3000  # as long as the cells


def test_questions_too_long_for_headings_are_headings_of_a_survey():
    question = "how satisfied are you with the way in which we answer your requests"
    rows = [[f"Question {n}: {question}" for n in range(20)], *[["agree"] * 20 for _ in range(900)]]
    assert list(table_lines.sheet_tables(rows)) == [
        "\n".join(f"Question {n}: {question}: agree" for n in range(20))
    ]
    (few,) = table_lines.sheet_tables(rows[:5])
    assert few.splitlines()[1] == " | ".join(["agree"] * 20)


def test_a_table_as_long_as_its_cells_is_read_row_by_row(tmp_path):
    with (tmp_path / "a.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["Name of the customer", "Town and country", "Remarks"])
        rows.writerows(
            [words(3 * n, 2), words(3 * n + 1, 2), words(3 * n + 2, 9)] for n in range(9000)
        )
    (document,), report = read_corpus([tmp_path])
    assert len(document.text) > 2**20 and not report.noted
    assert len(document.text.splitlines()) == 9000
