"""Judged queries as training reads them, and what is said of files that are not as they should."""

from __future__ import annotations

import json
import logging

import pytest

from revela.errors import RevelaError
from revela.text.judgements import pair_rows, read_judgements
from revela.types import Chunk, Document
from tests.collection_folder import write_collection

DOCUMENTS = [Document(f"d{i}", f"text {i}", f"title {i}" * (i % 2)) for i in range(5)]
HEAD = "query-id\tcorpus-id\tscore\n"


@pytest.fixture
def folder(tmp_path):
    """q0 asks for d1 and d3, q1 for d3, q2 says the same as q1, q3 finds nothing."""
    grades = {("q0", "d1"): 1, ("q0", "d3"): 2, ("q1", "d3"): 1, ("q2", "d3"): 1, ("q2", "d0"): 1}
    grades |= {("q3", "d2"): 0, ("q1", "gone"): 1}
    texts = {"q0": "zero", "q1": "one", "q2": "one", "q3": "three"}
    return write_collection(tmp_path, [], texts, grades, "train")


@pytest.mark.parametrize("others", [False, True])
def test_a_row_for_each_pair_and_the_documents_of_a_row_together(folder, others, caplog):
    with caplog.at_level(logging.INFO, "revela"):
        rows = list(pair_rows(DOCUMENTS, [folder], others))
    pairs = [Chunk(0, "text 0", "one"), Chunk(1, "title 1 text 1", "zero")]
    pairs += [Chunk(3, "title 3 text 3", "zero"), Chunk(3, "title 3 text 3", "one")]
    rest = [Chunk(2, "text 2"), Chunk(4, "text 4")]
    assert rows == pairs + (rest if others else [])
    (said,) = caplog.messages
    assert said.startswith(f"4 pairs of {folder}; 1 left out, whose documents were not read")


@pytest.mark.parametrize("head", ["", HEAD])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_byte_order_mark_is_no_part_of_an_id(folder, encoding, head):
    file = folder / "qrels" / "train.tsv"
    file.write_text(f"{head}q0\td1\t1\n", encoding)
    assert read_judgements(folder, "train")[1] == {"q0": {"d1": 1}}


@pytest.mark.parametrize("between", ["\t", " ", " 0 ", "\t0\t"])
@pytest.mark.parametrize("space", ["\u2028", "\u2029", "\x85", "\xa0", "\x0c", "\x1c"])
def test_an_id_may_have_any_character_that_ends_no_column(folder, space, between):
    query, document = f"q{space}0", f"d{space}1"
    (folder / "queries.jsonl").write_text(json.dumps({"_id": query, "text": "zero"}) + "\n")
    file = folder / "qrels" / "train.tsv"
    score = between.replace("0", "") or " "
    file.write_text(f"{query}{between}{document}{score}2\n", "utf-8")
    assert read_judgements(folder, "train")[1] == {query: {document: 2}}


SAME = [
    ("qrels/train.tsv", lambda text: text.replace("\n", "\r\n") + "\r\n"),  # a blank line
    ("qrels/train.tsv", lambda text: text + "q0\td1\t1.0\n"),  # again, as a float
    ("queries.jsonl", lambda text: text + text),
]


@pytest.mark.parametrize(("name", "change"), SAME)
def test_what_says_the_same_is_the_same(folder, name, change):
    expected = read_judgements(folder, "train")
    (folder / name).write_text(change((folder / name).read_text()))
    assert read_judgements(folder, "train") == expected


def appended(line):
    return lambda text: text + line


def replaced(old, new):
    return lambda text: text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("qrels/train.tsv", None, r"train\.tsv does not exist: a BEIR-layout folder has its judge"),
        ("queries.jsonl", None, r"is not a BEIR-layout folder: it has no queries\.jsonl"),
        ("qrels/train.tsv", lambda _: HEAD, r"qrels/train\.tsv is empty"),
        ("qrels/train.tsv", lambda _: HEAD + "q0\tgone\t1\n",
         r"no relevant document .* \(first: gone\)"),
        ("qrels/train.tsv", lambda _: HEAD + "nobody\td0\t1\n",
         r"has 1 query-id that queries\.jsonl lac"),
        ("qrels/train.tsv", lambda _: HEAD + "q0\td0\t0\n", "no query has a relevant document"),
        ("qrels/train.tsv", appended("q0 d2\n"), r"train\.tsv:9: expected query-id"),
        ("qrels/train.tsv", appended("q0\td2\tyes\n"), r"train\.tsv:9: expected query-id"),
        ("qrels/train.tsv", appended("q0\td2\t0.5\n"),
         r"train\.tsv:9: the score 0\.5 is not an integer"),
        ("qrels/train.tsv", appended("q0\td2\tinf\n"), "the score inf is not an integer"),
        ("qrels/train.tsv", appended("q0\td1\t0\n"),
         r"train\.tsv:9 gives d1 the score 0 for q0, and an earlier line the score 1: keep one"),
        ("queries.jsonl", appended('{"_id": "q0", "text": "nought"}\n'),
         r'queries\.jsonl has two texts for _id "q0"'),
        ("queries.jsonl", replaced('"one"', r'"one \ud800"'),
         r"queries\.jsonl: line 2 .* surrogates not allowed"),
        ("queries.jsonl", replaced('"_id": "q1"', '"id": "q1"'),
         r"queries\.jsonl: line 2 cannot be read \(KeyError"),
        ("queries.jsonl", replaced('"zero"', '" "'), r"no text for 1 of the judged .*: q0\)"),
        ("queries.jsonl", replaced('"zero"', "null"), r"no text for 1 of the judged .*: q0\)"),
    ],
)  # fmt: skip
def test_bad_judgements_are_one_sentence(folder, name, change, sentence):
    if change is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(change((folder / name).read_text()))
    with pytest.raises(RevelaError, match=sentence):
        pair_rows(DOCUMENTS, [folder], False)
