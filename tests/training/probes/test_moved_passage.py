"""Moved passages: where answers are inserted, and ranks against a loop."""

from __future__ import annotations

import numpy as np
import pytest

from conftest import MadeUpEncoder
from revela.errors import RevelaError
from revela.training.probes.moved_passage import (
    Answer,
    AnswerSet,
    MovedAnswer,
    cut_others,
    insert_at,
    load_answers,
    move_all,
    moved_passage,
    places,
    scores_by_place,
)
from revela.training.probes.places import TokenWindow
from tests.collection_folder import write_collection, write_lines

FILLER = [
    " ".join(f"{topic}{i % 6}" for i in range(60))
    for topic in ("ocean", "engine", "garden", "planet")
]
PASSAGES = [f"violin{i} castle{i} recipe{i}." for i in range(4)]
ARTICLES = [
    *(("A0", "A", FILLER[0]), ("A1", "A", PASSAGES[0]), ("A2", "A", FILLER[2])),
    *(("B0", "B", FILLER[1]), ("B1", "B", PASSAGES[1]), ("B2", "B", FILLER[3])),
    ("C0", "C", PASSAGES[3]),
]


def write(folder, rows, judged):
    documents = [dict(zip(("_id", "title", "text"), row, strict=True)) for row in rows]
    queries = {f"q{n}": f"where is {n}" for n in range(3)}
    return write_collection(folder, documents, queries, {(f"q{n}", d): 1 for n, d in judged})


def test_passages_of_one_title_make_an_article_with_the_judged_one_as_its_answer(tmp_path):
    judged = [(0, "A1"), (1, "B1"), (2, "C0"), (2, "A1")]
    found = load_answers(write(tmp_path / "c", ARTICLES, judged))
    assert found.documents == [
        f"{FILLER[0]} {PASSAGES[0]} {FILLER[2]}",
        f"{FILLER[1]} {PASSAGES[1]} {FILLER[3]}",
        PASSAGES[3],
    ]
    assert found.answers == [
        Answer(0, PASSAGES[0], ("where is 0", "where is 2"), len(FILLER[0]) + 1),
        Answer(1, PASSAGES[1], ("where is 1",), len(FILLER[1]) + 1),
    ]  # C has no rest to move in
    message = "has no answer to move: give each document as neighbouring passages"
    with pytest.raises(RevelaError, match=message):
        load_answers(write(tmp_path / "c", ARTICLES, [(0, "C0")]))


def test_passages_are_located_in_documents_in_any_case(tmp_path):
    sea = "One sea. The Salt (3 %) of a SEA. One sea."
    rows = [("d0", "", sea), ("d1", "T", "Hills."), ("d2", "", "The salt (3 %)")]
    folder = write(tmp_path / "c", rows, [(0, "d0"), (1, "d0"), (2, "d1")])
    given = {"q0": "one SEA.", "q1": " the salt (3 %)", "q2": "absent"}
    lines = [{"_id": query, "text": text} for query, text in given.items()]
    write_lines(folder / "passages.jsonl", lines)
    found = load_answers(folder)
    answers = [("One sea.", ("where is 0",), 0), ("The Salt (3 %)", ("where is 1",), 9)]
    assert found.documents == [sea, "T Hills.", "The salt (3 %)"]
    assert found.answers == [Answer(0, *answer) for answer in answers]
    write_lines(folder / "passages.jsonl", lines[2:])
    with pytest.raises(RevelaError, match=r"or give texts in passages\.jsonl that are in"):
        load_answers(folder)


def test_places_go_from_start_to_end_in_ninths_of_tokens():
    spans = [(0, 2), (3, 20), (21, 22), (23, 24), (25, 26), (27, 28), (29, 30), (31, 32), (33, 90)]
    assert places(spans) == [0, 3, 21, 23, 25, 27, 29, 31, 33, 90]
    assert insert_at("ab cd", " x ", [0, 2, 5]) == ["x ab cd", "ab x cd", "ab cd x"]


def test_answers_stand_where_they_were_put_and_nowhere_else(tiny_tokenizer):
    text = f"{FILLER[0]} {PASSAGES[0]} {PASSAGES[1]} {FILLER[1]}"
    answers = [Answer(0, PASSAGES[0], ("a",)), Answer(0, PASSAGES[1], ("b",))]
    answered = AnswerSet("c", [text, FILLER[2]], answers)
    moved = move_all(answered, TokenWindow(tiny_tokenizer, 90), 5, 0)
    assert {m.answer.text for m in moved} == set(PASSAGES[:2])
    for m in moved:
        answer = m.answer.text
        other = next(p for p in PASSAGES[:2] if p != answer)
        offsets = [t.index(answer) for t in m.texts]
        assert offsets == sorted(set(offsets)) and offsets[0] == 0
        assert m.texts[-1].endswith(answer)
        rest = m.texts[0].removeprefix(answer).split()
        for t in m.texts:
            assert t.count(answer) == 1 and other not in t
            assert 80 <= len(tiny_tokenizer(t)["input_ids"]) <= 90
            assert "".join(t.replace(answer, "").split()) == "".join(rest)
    (rest,) = cut_others(answered, moved, TokenWindow(tiny_tokenizer, 30))
    assert FILLER[2].startswith(rest) and set(rest.split()) <= set(FILLER[2].split())
    assert 10 < len(tiny_tokenizer(rest)["input_ids"]) <= 22


def test_answers_that_do_not_fit_are_one_sentence(tiny_tokenizer):
    answers = [Answer(0, PASSAGES[0], ("a",)), Answer(1, FILLER[2], ("b",))]
    answered = AnswerSet("c", [f"{PASSAGES[0]} {FILLER[0]}", FILLER[2]], answers)
    message = "c: 1 of 2 answers fit into 90 tokens with as much of their document, and two are"
    with pytest.raises(RevelaError, match=message):
        move_all(answered, TokenWindow(tiny_tokenizer, 90), 5, 0)


def test_ranks_are_a_loop(monkeypatch):
    monkeypatch.setattr("revela.training.probes.moved_passage.BLOCK", 4)
    rng = np.random.default_rng(0)
    queries, passages, others = (rng.normal(size=(*n, 3)) for n in ((5,), (10, 4), (6,)))
    own = np.array([0, 0, 1, 2, 3])
    cosines, ranks = scores_by_place(queries, passages, others, own)
    for q in range(5):
        for p in range(10):
            rivals = [queries[q] @ d for d in (*passages[p], *others)]
            assert cosines[q, p] == pytest.approx(queries[q] @ passages[p, own[q]])
            assert ranks[q, p] == sorted(rivals, reverse=True).index(rivals[own[q]]) + 1


class Beginning(MadeUpEncoder):
    """Reads the first word only."""

    def encode_queries(self, texts, progress=False):
        return np.array([[int(t.startswith(c)) for c in "abz"] for t in texts], dtype=np.float32)

    encode_passages = encode_queries


def test_a_model_that_reads_only_the_beginning_is_found_out():
    moved = [
        MovedAnswer(
            Answer(i, c, (c, c)),
            [" ".join([*"z" * p, c, *"z" * (9 - p)]) for p in range(10)],
            c if i else "z",
        )
        for i, c in enumerate("ab")
    ]
    found = moved_passage(moved, ["c"] * 200, Beginning())
    mrr = found["moved passage, MRR@100"]
    assert mrr.places[0].value == 1.0 and mrr.first_wins.value in (0.5, 1.0)
    assert found["moved passage, cosine"].drop.value == 1.0 and (mrr.rows, mrr.documents) == (4, 2)
    # Unmoved, b is first, and a, which begins otherwise, ties with the documents of no answer.
    assert found["moved passage, cosine"].unmoved == 0.5 and mrr.unmoved == 1.0
