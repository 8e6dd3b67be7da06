"""Parquet, Arrow and CSV: rows become documents, bad ones are told apart, and a missing column is
answered with those there are.
"""

from __future__ import annotations

import csv
import datetime
import gzip
import io
import math
import os
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import SENTENCE
from revela.errors import RevelaError
from revela.text.load import Reading, read_corpus
from revela.text.readers import common, tables
from revela.text.readers.common import ReadReport
from revela.text.readers.rows import Fields
from revela.text.readers.table_lines import table_lines
from revela.types import Document
from tests.collection_folder import write_lines

FIELDS = Fields("text", "title")
ROWS = [
    {"id": i, "title": f"T{i}", "text": f"{SENTENCE} Number {i}.", "other": 1.5} for i in range(30)
]


def arrow(path: Path, table: pa.Table) -> None:
    kind = pa.ipc.new_file if path.stem == "file" else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as sink, kind(sink, table.schema) as writer:
        writer.write_table(table)


def comma_separated(path: Path, table: pa.Table) -> None:
    with path.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.writer(handle, delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writerows([table.column_names, *(row.values() for row in table.to_pylist())])


WRITERS = {
    "a.parquet": lambda path, table: pq.write_table(table, path, row_group_size=7),
    **dict.fromkeys(("stream.arrow", "file.arrow"), arrow),
    **dict.fromkeys(("a.csv", "a.tsv"), comma_separated),
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
def test_rows_become_documents(tmp_path, name, packed):
    WRITERS[name](tmp_path / name, pa.Table.from_pylist(ROWS))
    if packed:
        raw = (tmp_path / name).read_bytes()
        pack = (
            gzip.compress if packed == ".gz" else partial(pa.compress, codec="zstd", asbytes=True)
        )
        (tmp_path / (name + packed)).write_bytes(pack(raw))
        (tmp_path / name).unlink()
    documents, report = read_corpus([tmp_path])
    assert list(documents) == [Document(str(r["id"]), r["text"], r["title"]) for r in ROWS]
    assert not report.skipped


@pytest.mark.parametrize("name", WRITERS)
def test_a_missing_column_is_answered_with_those_there_are(tmp_path, name):
    WRITERS[name](tmp_path / name, pa.Table.from_pylist(ROWS))
    said = 'no column "body"; name one with --text-field'
    with pytest.raises(RevelaError, match=rf"{name}: {said} \(has id, title, text, other\)"):
        read_corpus([tmp_path / name], Reading(text_field="body"))
    (tmp_path / "b.txt").write_text(SENTENCE)  # in a folder the table is left out and named
    documents, report = read_corpus([tmp_path], Reading(text_field="body"))
    assert len(documents) == 1 and not report.bad
    assert report.examples[said] == [f"{name} (has id, title, text, other)"]


def test_a_table_without_a_header_does_not_flood_the_message(tmp_path):
    (tmp_path / "a.tsv").write_text("\t".join(["word " * 100] * 50) + "\n")
    with pytest.raises(RevelaError, match=r"\(has word .*\.\.\., \.\.\.\)") as found:
        read_corpus([tmp_path / "a.tsv"], Reading(text_field="body"))
    assert len(str(found.value)) < 1000


def test_a_column_of_another_type_is_named(tmp_path):
    pq.write_table(pa.table({"text": [[1], [2]]}), tmp_path / "a.parquet")
    with pytest.raises(RevelaError, match=r'column "text" is not text.*list<'):
        read_corpus([tmp_path / "a.parquet"])


@pytest.mark.parametrize("column", ["id", "text"])
def test_two_columns_of_one_name_are_named(tmp_path, column):
    names = ["id", "text", column]
    pq.write_table(pa.table([pa.array([SENTENCE])] * 3, names), tmp_path / "a.parquet")
    with pytest.raises(RevelaError, match=f'parquet: two columns "{column}": rename one of them'):
        read_corpus([tmp_path / "a.parquet"])


def test_an_id_and_a_title_may_be_binary(tmp_path):
    row = {"id": b"k1", "title": "Süd".encode(), "text": SENTENCE}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    assert read_corpus([tmp_path])[0][0] == Document("k1", SENTENCE, "Süd")


def test_a_row_without_text_is_bad_and_the_others_are_read(tmp_path):
    rows = [*ROWS[:3], {**ROWS[3], "text": None}, *ROWS[4:]]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    documents, report = read_corpus([tmp_path], max_bad_share=0.1)
    assert len(documents) == 29 and report.examples == {'no text field "text"': ["a.parquet:4"]}


def test_a_string_that_is_not_utf8_is_damage(tmp_path):
    raw = pa.array([SENTENCE.encode(), b"\xff\xfe"], pa.binary())
    table = pa.table({"text": pa.Array.from_buffers(pa.string(), 2, raw.buffers())})
    pq.write_table(table, tmp_path / "a.parquet")
    arrow(tmp_path / "a.arrow", table)
    said = r"encrypted \.arrow \(a\.arrow: .* encrypted \.parquet \(a\.parquet"
    with pytest.raises(RevelaError, match=said):
        read_corpus([tmp_path])


@pytest.mark.parametrize("keep", [0.0, 0.2, 0.9])
@pytest.mark.parametrize("name", ["a.parquet", "stream.arrow", "file.arrow"])
def test_a_truncated_file_is_named(tmp_path, name, keep):
    WRITERS[name](tmp_path / name, pa.Table.from_pylist(ROWS * 100))
    raw = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(raw[: int(len(raw) * keep)])
    said = rf"damaged or encrypted \.(parquet|arrow): {name}.*--max-bad-share"
    with pytest.raises(RevelaError, match=said):
        read_corpus([tmp_path], max_bad_share=0)


def csv_documents(raw: bytes, path: Path, report: ReadReport) -> list[Document]:
    path.write_bytes(raw)
    return list(tables.read_csv(path, path.name, FIELDS, report))


def test_a_large_csv_without_a_column_of_text_is_named(reads, monkeypatch):
    monkeypatch.setattr(common, "MAX_BYTES", 1000)
    rows = "\n".join(["kind,says", *(f"bee,{SENTENCE}" for _ in range(50))])
    packed = gzip.compress(rows.encode())
    documents, report = reads({"a.csv.gz": packed, "b.txt": SENTENCE})
    assert [d.id for d in documents] == ["b.txt"]
    assert report.examples == {"over 0 MB: split it": ["a.csv.gz"]}


def test_bad_csv_rows_are_told_apart(tmp_path):
    raw = b"id,text\n1,one\n2,two,three\n3,f\xfcnf\n4\n5,five\n"
    for lines_above in (b"", b"\n\n", b"sep=,\n"):
        report, count = ReadReport(), lines_above.count(b"\n")
        found = csv_documents(lines_above + raw, tmp_path / "a.csv", report)
        assert [d.text for d in found] == ["one", "fünf", "five"] and report.bad == 2
        assert report.examples == {
            "read as windows-1252": ["a.csv"],
            "row of 3 fields under a header of 2": [f"a.csv:{3 + count}"],
            "row of 1 fields under a header of 2": [f"a.csv:{5 + count}"],
        }


def test_a_quote_that_nobody_closed_costs_no_row(tmp_path, monkeypatch):
    report = ReadReport()
    raw = b'text,id\r\n"a,\r\nb","1"\r\n"b,2\r\n"c ""d""",3\r\n' + b"e,4\r\n" * 50
    found = csv_documents(raw, tmp_path / "a.csv", report)
    assert [d.text for d in found] == ["a,\r\nb", '"b', 'c "d"', *["e"] * 50]
    assert report.examples == {"a quote that is not closed": ["a.csv:4"]} and not report.bad
    monkeypatch.setattr(common, "MAX_BYTES", 100)
    with pytest.raises(csv.Error, match="field larger than field limit"):
        csv_documents(b'text,id\n"b,2\n' + b"c,3\n" * 50, tmp_path / "a.csv", report)


HEADED = 'kind;What it eats\nbat;moths, mostly\nbee;"nectar\nand pollen"\n'


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (HEADED, ["kind: bat; What it eats: moths, mostly\n"
                  "kind: bee; What it eats: nectar and pollen"]),
        ("Id,Text,Title\n7,They hear echoes.,Bats\n", ["They hear echoes."]),
        ("id|text\n7|They hear, in the dark.\n", ["They hear, in the dark."]),
        ("sep=;\nid;text\n7;They hear\n", ["They hear"]),
        ("id,text,text\n7,They hear,nothing\n", ["They hear"]),
        ("id,text\n\n,They hear\n", ["They hear"]),
        ("", []),
    ],
)  # fmt: skip
@pytest.mark.parametrize("codec", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_tables_as_people_have_them(tmp_path, content, expected, codec, line_end):
    report = ReadReport()
    found = csv_documents(content.replace("\n", line_end).encode(codec), tmp_path / "a.csv", report)
    assert [d.text for d in found] == expected and not report.bad
    assert all(d.id for d in found) and len(report.noted) == (codec == "utf-16") + (
        "text,text" in content
    )


def test_a_table_of_numbers_is_data(reads):
    table = "query-id\tcorpus-id\tscore\n" + "q1\td7\t1\n" * 20
    documents, report = reads({"a.txt": SENTENCE, "test.tsv": table})
    assert len(documents) == 1 and report.lines()[1:] == ["not read: 1 .tsv (table of numbers)"]


def test_a_label_stays_beside_its_value():
    rows = [["Room", "Summer", "Winter"], ["Oslo", "120", ""], ["Rome", "90", "70"]]
    assert table_lines(rows) == ["Room: Oslo; Summer: 120", "Room: Rome; Summer: 90; Winter: 70"]
    assert table_lines([["Name:", "Anna"], ["Age", "7"]]) == ["Name: Anna", "Age: 7"]
    assert table_lines([["Item", "Price"], ["wax", "3 €"]], 1) == ["Item: wax; Price: 3 €"]
    assert table_lines([["1", "2", "3"], ["a", "b", "c"]]) == ["1 | 2 | 3", "a | b | c"]
    wide = [["A", "B", "C"], [*["word " * 12] * 3]]
    assert [line.split(":")[0] for line in table_lines(wide)[0].split("\n")] == ["A", "B", "C"]


CELLS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]) | st.sampled_from('\r\n",'))


@given(st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=20))
def test_csv_gives_back_what_was_written(tmp_path_factory, rows):
    buffer = io.StringIO(newline="")
    csv.writer(buffer, lineterminator="\r\n").writerows([("text", "title"), *rows])
    path = tmp_path_factory.mktemp("csv") / "a.csv.gz"
    found = csv_documents(gzip.compress(buffer.getvalue().encode()), path, ReadReport())
    assert [(d.text, d.title) for d in found] == rows


def test_a_row_group_may_be_larger_than_memory(tmp_path):
    rows = pa.table({"text": [os.urandom(2250).hex() for _ in range(10_000)]})  # 45 MB
    pq.write_table(rows, tmp_path / "a.parquet", row_group_size=10**6)
    usual = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(usual)
    pa.set_memory_pool(pool)
    try:
        found = tables.read_parquet(tmp_path / "a.parquet", "a", FIELDS, ReadReport())
        assert sum(1 for _ in found) == 10_000 and 0 < pool.max_memory() < 2**24
    finally:
        pa.set_memory_pool(usual)


def write_rows(path: Path, rows: list[dict]) -> None:
    if path.suffix == ".jsonl":
        write_lines(path, rows)
    else:
        WRITERS[path.name](path, pa.Table.from_pylist(rows))


@pytest.mark.parametrize("name", [*WRITERS, "a.jsonl"])
def test_metadata_comes_along_when_it_is_asked_for(tmp_path, name):
    rows = [
        {"text": SENTENCE, "year": 2020 + i, "share": i / 8, "lang": lang, "code": "007"}
        for i, lang in enumerate((None, "en", "de"))
    ]
    write_rows(tmp_path / name, rows)
    asked = ["year", "lang", "share", "code", "none"]
    documents, _ = read_corpus([tmp_path], distinct=False, metadata=asked)
    assert [d.metadata for d in documents] == [
        {k: v for k, v in row.items() if k != "text" and v is not None} for row in rows
    ]
    assert [type(d.metadata["year"]) for d in documents] == [int] * 3
    documents, _ = read_corpus([tmp_path], distinct=False)
    assert [d.metadata for d in documents] == [{}] * 3


def test_metadata_of_other_kinds_are_kept_as_text(tmp_path):
    row = {"text": SENTENCE, "tags": ["a", "b"], "day": datetime.date(2026, 1, 2)}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    assert read_corpus([tmp_path], metadata=["tags", "day"])[0][0].metadata == {
        "tags": '["a", "b"]',
        "day": "2026-01-02",
    }


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_a_number_that_is_none_is_missing(tmp_path, name):
    shares = [0.5, math.nan, math.inf, -math.inf]
    rows = [{"text": f"{SENTENCE} {i}", "share": share} for i, share in enumerate(shares)]
    write_rows(tmp_path / name, rows)
    documents, _ = read_corpus([tmp_path], distinct=False, metadata=["share"])
    assert [d.metadata for d in documents] == [{"share": 0.5}, {}, {}, {}]


HEADER, PAID = "Day;Sum;For;Name", ["1.5.;12,50;honey;Ann", "2.5.;3,00;wax;Bo"]
STATEMENT = [
    "Day: 1.5.; Sum: 12,50; For: honey; Name: Ann",
    "Day: 2.5.; Sum: 3,00; For: wax; Name: Bo",
]


ABOVE = [
    ([], []),
    (["Statement of May"], ["Statement of May"]),
    (["Statement of May;;;", ";;;"], ["Statement of May"]),
    (["Account;12 34", "Holder;Ann", ""], ["Account: 12 34", "Holder: Ann"]),
]


@pytest.mark.parametrize(("above", "lines"), ABOVE)
def test_lines_above_the_header_are_no_headings(reads, above, lines):
    ((document,), _) = reads({"a.csv": "\n".join([*above, HEADER, *PAID])})
    assert document.text.split("\n") == lines + STATEMENT


def test_a_column_alone_is_not_split(reads):
    table = "text\nBees; wasps; and all of them\nOwls; and many more of them\n"
    assert len(reads({"a.csv": table})[0]) == 2
