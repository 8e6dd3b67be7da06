"""Names of files are searched; passages without words are not; strings that an answer must have."""

from __future__ import annotations

import base64
import random

import pytest
from letters import Letters, begun, build

from revela.ranking.steps import Confidence
from revela.searching.index_search import IndexStore
from revela.searching.word_search import Words
from revela.text.analyzer import file_name_words, searched
from revela.text.words import has_words
from revela.types import Document

NAMES = ["holiday plan.txt", "holidayPlan.md", "holiday_plan.pdf", "2024/holiday-plan.docx"]
OTHERS = [
    Document("trip.txt", "The holiday is long. Anna has a plan for each day of the holiday."),
    Document("b.txt", "The garden opens at nine in the morning."),
    Document("d7", "A plan of the library."),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", ["hybrid", "lexical"])
def test_the_file_that_has_the_query_as_its_name_comes_first(tmp_path, name, mode):
    own = Document(name, "Mira is away in May.", "Absences" if "." in name[-4:] else "")
    index = build(tmp_path / "index", [*OTHERS, own])
    ending = name.rpartition(".")[2]
    for query in ("holiday plan", "Holiday Plans", "plan holiday", f"holiday plan.{ending}"):
        hits = index.search(query, mode=mode)
        assert hits[0].id == name, query
    assert hits[0].score <= (1 if mode == "hybrid" else 99)
    assert {hit.id for hit in index.search("holiday", mode="lexical")} == {name, "trip.txt"}
    early = Words([*OTHERS, own], 120)
    assert name in {hit.id for hit in early.search("holiday plan")}


def test_a_file_without_ending_has_a_name_and_a_row_has_none(tmp_path):
    assert file_name_words("src/Makefile") == ("Makefile", "")
    assert file_name_words("a/b_c-2024-06-05.md")[0] == "b c 2024-06-05"
    for row in ("d12", "4983", "table.csv:7", "data/rows.jsonl:12", "MED-10", "g"):
        assert searched(row, "A text.") == "A text."
    index = build(tmp_path / "index", [Document("Makefile", "all: build"), *OTHERS])
    assert index.search("makefile")[0].id == "Makefile"


def test_a_copy_whose_name_is_asked_for_comes_first(tmp_path):
    docs = [Document("r (1).txt", "We met."), Document("r.txt", "We met."), *OTHERS]
    index = build(tmp_path / "index", docs)
    assert index.search("r (1)")[0].id == "r (1).txt"
    original, copy = index.search("met", 2, explain=True)
    assert (original.id, copy.id) == ("r.txt", "r (1).txt")
    for hit in (original, copy):
        of = hit.explanation
        parts = of.weight * of.vectors + (1 - of.weight) * (of.words or 0)
        assert hit.score == pytest.approx(parts)


def test_a_name_with_a_date_is_found_by_that_day_only(tmp_path):
    days = ["2024-05-06", "2024-06-05", "2024-06-15"]
    index = build(tmp_path / "index", [Document(f"{day}.md", "We met.") for day in days])
    for mode in ("hybrid", "lexical"):
        assert [index.search(day, mode=mode)[0].id for day in days] == [f"{day}.md" for day in days]


UNSURE = [
    ("meeting of 2024-06-05", "meeting of 2024-05-06", "perhaps"),
    ("meeting of 2024-06-05", "meeting of 2024/06/05", "sure"),
    ("release 1.2.3", "The release 3.2.1 is out.", "perhaps"),
    ("release 1.2.3", "The release v1.2.3 is out.", "sure"),
    ("invoice 4711", "The invoice 4712 is late.", "perhaps"),
    ("invoice 4711", "The invoice 4711 is late.", "sure"),
    ("write to anna@b.org", "We write to b@anna.org.", "perhaps"),
    ("top 10 rules", "The top ten rules.", "sure"),
]


@pytest.mark.parametrize(("query", "text", "answer"), UNSURE)
def test_a_hit_without_the_query_string_is_never_sure(tmp_path, monkeypatch, query, text, answer):
    monkeypatch.setattr(IndexStore, "confidences", {"none": Confidence(-9.0, 1.0, 0.0)})
    index = build(tmp_path / "index", [Document("d1", text), *OTHERS], language="en")
    hits = index.search(query)
    assert hits[0].id == "d1" and hits.answer == answer


ENCODED = base64.b64encode(random.Random(0).randbytes(600)).decode()


@pytest.mark.parametrize(
    "text",
    ["\n".join(ENCODED[i : i + 64] for i in range(0, 800, 64)), "----", "12.5 | 3.4 | 7",
     "9f86d081884c7d659a2feaa0c55ad015", "{}();", "https://a.b/" + ENCODED[:90]],
)  # fmt: skip
def test_a_passage_without_words_is_no_candidate_of_vectors(tmp_path, text):
    encoder = Letters()
    index = build(tmp_path / "index", [Document("d1", f"{text} {text}"), *OTHERS], encoder)
    rows = {row["id"]: row["vector"] for row in index.table.lance.search().to_list()}
    assert not any(rows["d1"]) and all(any(rows[d.id]) for d in OTHERS)
    assert not any(ENCODED[:20] in seen for seen in encoder.seen)
    for mode in ("dense", "hybrid"):
        assert {hit.id for hit in index.search("a bad cab", 99, mode)} == {d.id for d in OTHERS}
    if "12.5" in text:
        assert index.search("12.5", mode="lexical")[0].id == "d1", "numbers are found by words"


@pytest.mark.parametrize(
    "text", ["a b", "x = f(y)", "这座城市", "भारत", "Price: 12.50 €, 3 pieces", "NW1007 abba3", "Ω"]
)
def test_what_has_words(text):
    assert has_words(text) and not has_words(ENCODED)


def test_a_folder_of_notes_is_filtered_by_its_front_matter(tmp_path):
    (tmp_path / "notes").mkdir()
    for name, project in (("a", "Apollo"), ("b", "Zeus"), ("c", "")):
        front = f"---\nproject: {project}\nlayout: wide\n---\n\n"
        (tmp_path / "notes" / f"{name}.md").write_text(f"{front}The bees make wax.\n")
    index = begun(tmp_path / "index", columns={"project": "string"}, chunk_words=120)
    index.sync(tmp_path / "notes")
    assert [hit.id for hit in index.search("bees", where={"project": "Zeus"})] == ["b.md"]
    assert [hit.id for hit in index.search("bees", where={"project": None})] == ["c.md"]
    assert index.search("Apollo", mode="lexical")[0].metadata == {"project": "Apollo"}
    assert not index.search("wide", mode="lexical")
