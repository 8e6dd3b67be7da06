"""What documents become in an index: metadata columns, ids, titles without text."""

from __future__ import annotations

import json
import re

import pytest
from letters import Letters, begun, build, extend, rows_of
from tqdm import tqdm

from revela.errors import RevelaError
from revela.searching import changes, ingest
from revela.searching.locations import file_of
from revela.searching.rows import metadata_columns
from revela.types import Document


def with_metadata(*values):
    return [
        Document(f"d{i}", "abc def.", metadata={} if value is None else {"field": value})
        for i, value in enumerate(values)
    ]


COLUMNS = [
    ((1, 2, None), "int64"),
    ((1, 2.5), "double"),
    ((True, None), "bool"),
    (("a", "b"), "string"),
    (("a", 1), "string"),
    ((True, 1), "string"),
    ((2**70, 1), "string"),
]


@pytest.mark.parametrize(("values", "kind"), COLUMNS)
def test_a_metadata_column_is_of_numbers_if_all_its_values_are(tmp_path, values, kind):
    docs = with_metadata(*values)
    assert metadata_columns(docs, ["field"]) == {"field": kind}
    made = build(tmp_path / "index", docs, metadata=["field"])
    found = {hit.id: hit.metadata.get("field") for hit in made.search("abc", 9)}
    assert found == {
        d.id: json.dumps(v) if kind == "string" and v is not None and not isinstance(v, str) else v
        for d, v in zip(docs, values, strict=True)
    }


@pytest.mark.parametrize(("first", "bad"), [(1, "many"), (1, 2**63), (1, -(2**70)), (0.5, 10**400)])
def test_added_metadata_must_fit(tmp_path, first, bad):
    made = build(tmp_path / "index", with_metadata(first, first), metadata=["field"])
    with pytest.raises(RevelaError, match=r"field of document d0 is .*, where .* holds") as refused:
        extend(made, with_metadata(bad))
    assert repr(bad)[:5] in str(refused.value) and len(str(refused.value)) < 400
    fitting = 7 if first == 1 else 2**70  # a double holds it
    assert extend(made, with_metadata(fitting)).replaced == 1
    assert {h.id for h in made.search("abc", 9, where={"field": {"gt": 6}})} == {"d0"}


def test_a_field_that_no_document_has_is_refused():
    with pytest.raises(RevelaError, match='no document has a field "yaer"'):
        metadata_columns(with_metadata(1), ["yaer"])


def test_an_id_twice_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(RevelaError, match='two documents have the id "d0"'):
        build(tmp_path / "index", [Document("d0", "abc."), Document("d0", "def.")])


def test_ids_may_hold_quotes_and_a_title_may_stand_alone(tmp_path):
    docs = [Document("it's", "abc."), Document('"; drop', "def."), Document("é/ü\\", "", "ghgh")]
    made = build(tmp_path / "index", docs)
    assert extend(made, [*docs[1:], Document("it's", "hhh.")]).replaced == 1
    assert rows_of(made) == [('"; drop', 0, "def."), ("it's", 0, "hhh."), ("é/ü\\", 0, "ghgh ")]
    assert made.delete(["it's"]) == 1 and made.search("ghgh", 1, "lexical")[0].title == "ghgh"


def test_titles_alone_are_words_of_the_bar(tmp_path):
    index = begun(tmp_path / "index")
    assert index.add([Document("a", "", "ghgh abab"), Document("b", "", "hh")], progress=True).new
    assert index.search("ghgh", 1)[0].id == "a"


class FewWords(Letters):
    """Reads six words of a passage."""

    def cut_to_fit(self, heads, texts, part=1):
        size = 6 // part
        room = [size - len(head.split()) for head in heads]
        return [
            [" ".join(text.split()[i : i + n]) for i in range(0, len(text.split()), n)] or [""]
            for text, n in zip(texts, room, strict=True)
        ]


class TwoWords(Letters):
    """Reads two words of a passage."""

    def cut_to_fit(self, heads, texts, part=1):
        return [re.findall(r"\s*\S+\s+\S+\s*|\s*\S+\s*", text) or [""] for text in texts]


def test_rows_know_the_line_or_page_they_begin_on(tmp_path):
    text = "\n\nOne two.\r\n\r\n\fThree\nfour\nfive.\n\n\n\fEight"
    docs = [Document(name, text) for name in ("a.md", "b.pdf", "c", "d.jsonl:3")]
    for encoder, lines, pages in [
        (Letters(), [3, 5, 10], [1, 2, 3]),
        (TwoWords(), [3, 5, 7, 10], [1, 2, 2, 3]),
    ]:
        index = build(tmp_path / type(encoder).__name__, docs, encoder)
        found = [[(hit.line, hit.page) for hit in index.chunks(d.id)] for d in docs]
        assert found[0] == [(line, None) for line in lines]
        assert found[1] == [(None, page) for page in pages]
        assert found[2] == found[3] == [(None, None)] * len(lines)
        rows = index.table.lance.to_arrow().to_pylist()
        assert {row["chunks"] for row in rows} == {len(lines)}  # of each document, as it was cut


def test_the_file_of_an_id_is_below_its_sources(tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("in/a.txt", "in/rows.csv", "out.txt", "one.jsonl"):
        (tmp_path / name).write_text("x")
    sources = [tmp_path / "in", tmp_path / "one.jsonl", tmp_path / "gone"]
    for name, file in [
        ("a.txt", "in/a.txt"), ("rows.csv:12", "in/rows.csv"), ("one.jsonl:3", "one.jsonl"),
        ("../out.txt", None), (str(tmp_path / "out.txt"), None), ("a" * 5000, None), ("", None),
        ("a\0b", None), ("d12", None),
    ]:  # fmt: skip
        assert file_of(sources, name) == (tmp_path / file if file else None), name


def test_chunks_that_the_model_does_not_read_to_the_end_are_cut(tmp_path):
    docs = [
        Document("a", "ab ab ab. cd cd cd.", "two words"),
        Document("b", "ab ab ab. gh gh", "one two three four five six"),
        Document("c", "ab"),
        Document("d", "", "one two three four"),
    ]
    encoder = FewWords()
    index = begun(tmp_path / "index", encoder, chunk_words=9)
    added = index.add(docs)
    assert rows_of(index) == [
        ("a", 0, "two words ab ab ab. cd"),
        ("a", 1, "two words cd cd."),
        ("b", 0, "one two three four five six"),
        ("b", 1, "one two three ab ab ab."),
        ("b", 2, "one two three gh gh"),
        ("c", 0, "ab"),
        ("d", 0, "one two three four"),
    ]
    assert added.cut == 2 and added.chunks == len(index) == 7
    assert {(h.title, h.text) for h in index.search("gh", 1)} == {("one two three", "gh gh")}
    assert encoder.seen and max(len(text.split()) for text in encoder.seen) <= 6


def test_headings_are_titles_of_rows_and_no_part_of_their_texts(tmp_path):
    docs = [Document("a.md", "# abc\n\nabcd efgh.\n\n## def\n\nefgh abcd.", "hhh")]
    index = build(tmp_path / "index", docs)
    assert rows_of(index) == [
        ("a.md", 0, "hhh # abc\n\n"),
        ("a.md", 1, "hhh > abc abcd efgh.\n\n"),
        ("a.md", 2, "hhh > abc ## def\n\n"),
        ("a.md", 3, "hhh > abc > def efgh abcd."),
    ]
    (hit,) = index.search("def efgh", 1)
    assert hit.title in ("hhh > abc > def", "hhh > abc") and not hit.text.startswith(("hhh", ">"))
    assert extend(index, docs).unchanged == 1


def test_before_a_long_run_it_says_how_long_the_rest_takes(tmp_path, monkeypatch, caplog):
    class Slow(tqdm):
        @property
        def format_dict(self):
            return super().format_dict | {"elapsed": 90.0}

    monkeypatch.setattr(changes, "tqdm", Slow)
    monkeypatch.setattr(ingest, "BATCH", 100)
    docs = [Document(f"d{i}", "abba bab. " * 10) for i in range(4)]
    caplog.set_level("INFO", "revela")
    with begun(tmp_path / "index").changes() as made:
        made.put(docs, progress=True)
    wanted = "encoding takes about 4.5 minutes more"  # one of four parts took 1.5 minutes
    assert [message for message in caplog.messages if "takes" in message] == [wanted]
