"""Moved passages: where answers are inserted, ranks against a loop, and folders without answers."""

from __future__ import annotations

import json

import numpy as np
import pytest

from revela.corpus.readers import common
from revela.errors import RevelaError
from revela.evaluation.moved_passage import (
    Answer,
    Answered,
    Moved,
    inserted,
    load_answers,
    move_all,
    moved_passage,
    places,
    scores_by_place,
    untouched,
)
from revela.retriever.tokens import TokenWindow

FILLER = [
    " ".join(f"{topic}{i % 6}" for i in range(60))
    for topic in ("ocean", "engine", "garden", "planet")
]
PASSAGES = [f"violin{i} castle{i} recipe{i}." for i in range(4)]


def write(folder, articles=True):
    """Two articles of three passages and a single one, or four documents with an answer each."""
    (folder / "qrels").mkdir(parents=True)
    rows = []
    if articles:
        for n, title in enumerate(("A", "B")):
            rows += [
                (f"{title}0", title, FILLER[n]),
                (f"{title}1", title, PASSAGES[n]),
                (f"{title}2", title, FILLER[n + 2]),
            ]
        rows.append(("C0", "C", PASSAGES[3]))
        judged = ["A1", "B1", "C0"]
    else:
        rows = [(f"d{n}", "", f"{FILLER[n]} {PASSAGES[n]} {FILLER[n]}") for n in range(4)]
        judged = ["d0", "d1", "d2"]
    (folder / "corpus.jsonl").write_text(
        "".join(json.dumps({"_id": i, "title": t, "text": x}) + "\n" for i, t, x in rows)
    )
    (folder / "queries.jsonl").write_text(
        "".join(json.dumps({"_id": f"q{n}", "text": f"where is {n}"}) + "\n" for n in range(3))
    )
    (folder / "qrels" / "test.tsv").write_text(
        "".join(f"q{n}\t{d}\t1\n" for n, d in enumerate(judged))
    )
    return folder


def answers_file(folder, *rows):
    names = ("query-id", "corpus-id", "text")
    (folder / "answers.jsonl").write_text(
        "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)
    )
    return folder


def test_passages_of_one_title_make_an_article_with_the_judged_one_as_its_answer(tmp_path):
    found = load_answers(write(tmp_path / "c"), join_titles=True)
    assert found.documents == [
        f"{FILLER[0]} {PASSAGES[0]} {FILLER[2]}",
        f"{FILLER[1]} {PASSAGES[1]} {FILLER[3]}",
        PASSAGES[3],
    ]
    assert found.answers == [
        Answer(0, PASSAGES[0], ("where is 0",)),
        Answer(1, PASSAGES[1], ("where is 1",)),
    ]  # C has no rest to move in


def test_a_file_says_where_answers_are(tmp_path):
    folder = answers_file(
        write(tmp_path / "c", articles=False),
        ("q0", "d0", PASSAGES[0]),
        ("q1", "d0", PASSAGES[0]),
        ("nobody", "d1", PASSAGES[1]),
    )
    found = load_answers(folder, join_titles=False)
    assert (
        found.answers == [Answer(0, PASSAGES[0], ("where is 0", "where is 1"))]
        and len(found.documents) == 4
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (None, r"c has no answers\.jsonl: write one with lines .*, or give --join-titles"),
        (
            ("q0", "d9", "x"),
            r"answers\.jsonl:1 is no answer in a document of corpus\.jsonl \(KeyError: 'd9'\)",
        ),
        (
            ("q0", "d0", "not there"),
            r"answers\.jsonl:1: document d0 does not hold the answer word for word",
        ),
        (
            ("nobody", "d0", PASSAGES[0]),
            "c has no answer that could be moved: answers.jsonl names no judged query",
        ),
    ],
)
def test_no_answers_are_one_sentence(tmp_path, row, message):
    folder = write(tmp_path / "c", articles=False)
    if row:
        answers_file(folder, row)
    with pytest.raises(RevelaError, match=message):
        load_answers(folder, join_titles=False)


@pytest.mark.parametrize(
    ("bad", "why"),
    [(b"\xff", "'utf-8' codec"), (json.dumps("a" * 10**5).encode(), "line over 0 MB")],
)
def test_a_file_of_answers_that_cannot_be_read_is_one_sentence(tmp_path, monkeypatch, bad, why):
    folder = write(tmp_path / "c", articles=False)
    answers_file(folder, ("q0", "d0", PASSAGES[0]))
    with (folder / "answers.jsonl").open("ab") as handle:
        handle.write(bad)
    monkeypatch.setattr(common, "MAX_BYTES", 5 * 10**4)
    with pytest.raises(RevelaError, match=rf"answers\.jsonl cannot be read after line \d \({why}"):
        load_answers(folder, join_titles=False)


def test_passages_without_common_titles_are_no_articles(tmp_path):
    with pytest.raises(
        RevelaError, match="c has no answer that could be moved: its judged passages share no title"
    ):
        load_answers(write(tmp_path / "c", articles=False), join_titles=True)


@pytest.mark.parametrize("unit", ["tokens", "characters"])
def test_places_go_from_start_to_end_in_ninths(unit):
    spans = [(0, 2), (3, 20), (21, 22), (23, 24), (25, 26), (27, 28), (29, 30), (31, 32), (33, 90)]
    found = places(spans, unit)
    assert found[0] == 0 and found[-1] == 90
    assert found == (
        [0, 3, 21, 23, 25, 27, 29, 31, 33, 90] if unit == "tokens" else [10 * n for n in range(10)]
    )


def test_answers_stand_where_they_were_put_and_nowhere_else(tiny_tokenizer):
    text = f"{FILLER[0]} {PASSAGES[0]} {PASSAGES[1]} {FILLER[1]}"
    answered = Answered(
        "c", [text, FILLER[2]], [Answer(0, PASSAGES[0], ("a",)), Answer(0, PASSAGES[1], ("b",))]
    )
    window = TokenWindow(tiny_tokenizer, 90)
    moved = move_all(answered, window, 5, "tokens", 0)
    assert {m.answer.text for m in moved} == set(PASSAGES[:2])
    for m in moved:
        other = next(p for p in PASSAGES[:2] if p != m.answer.text)
        offsets = [t.index(m.answer.text) for t in m.texts]
        assert (
            offsets == sorted(set(offsets))
            and offsets[0] == 0
            and m.texts[-1].endswith(m.answer.text)
        )
        for t in m.texts:
            assert t.count(m.answer.text) == 1 and other not in t
            assert 80 <= len(tiny_tokenizer(t)["input_ids"]) <= 90
            assert "".join(t.replace(m.answer.text, "").split()) == "".join(
                m.texts[0].removeprefix(m.answer.text).split()
            )
    (rest,) = untouched(answered, moved, TokenWindow(tiny_tokenizer, 30))
    assert (
        FILLER[2].startswith(rest)
        and 10 < len(tiny_tokenizer(rest)["input_ids"]) <= 22
        and set(rest.split()) <= set(FILLER[2].split())
    )
    assert inserted("ab cd", " x ", [0, 2, 5]) == ["x ab cd", "ab x cd", "ab cd x"]


def test_answers_that_do_not_fit_are_one_sentence(tiny_tokenizer):
    answered = Answered(
        "c",
        [f"{PASSAGES[0]} {FILLER[0]}", FILLER[2]],
        [Answer(0, PASSAGES[0], ("a",)), Answer(1, FILLER[2], ("b",))],
    )
    with pytest.raises(
        RevelaError,
        match="c: 1 of 2 answers fit beside as much of their document into 90 tokens, and two are",
    ):
        move_all(answered, TokenWindow(tiny_tokenizer, 90), 5, "tokens", 0)


def test_ranks_are_a_loop():
    rng = np.random.default_rng(0)
    queries, passages, others = (
        rng.normal(size=(5, 3)),
        rng.normal(size=(10, 4, 3)),
        rng.normal(size=(6, 3)),
    )
    own = np.array([0, 0, 1, 2, 3])
    cosines, ranks = scores_by_place(queries, passages, others, own)
    for q in range(5):
        for p in range(10):
            rivals = [queries[q] @ d for d in (*passages[p], *others)]
            assert cosines[q, p] == pytest.approx(queries[q] @ passages[p, own[q]])
            assert ranks[q, p] == sorted(rivals, reverse=True).index(rivals[own[q]]) + 1


class Beginning:
    """Reads the first word only."""

    def encode_queries(self, texts, progress=False):
        return np.array([[int(t.startswith(c)) for c in "abz"] for t in texts], dtype=np.float32)

    encode_passages = encode_queries


def test_a_model_that_reads_only_the_beginning_is_found_out():
    moved = [
        Moved(
            Answer(i, c, (c, c)),
            [" ".join([*"zzzzzzzzz"[:p], c, *"zzzzzzzzz"[p:]]) for p in range(10)],
        )
        for i, c in enumerate("ab")
    ]
    found = moved_passage(moved, ["c"] * 200, Beginning())
    mrr = found["moved passage, MRR@100"]
    assert mrr.places[0].value == 1.0 and mrr.first_wins.value in (0.5, 1.0)
    assert found["moved passage, cosine"].drop.value == 1.0 and (mrr.rows, mrr.documents) == (4, 2)
