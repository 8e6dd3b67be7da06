"""Queries: what is kept of a model's output, what is taken from a text, and a file that survives a
kill.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from revela.corpus.queries import (
    Answer,
    QueryFile,
    documents_with_chunks,
    judged,
    with_authors_words,
    with_first_sentences,
    with_telling_sentences,
    with_titles,
    without_repeats,
    write_queries,
)
from revela.errors import RevelaError
from revela.types import Chunk, Document

PASSAGE = "The mitral valve has two leaflets. It lies between the left atrium and the left ventricle, and closes in systole."


@pytest.mark.parametrize(
    ("output", "answer"),
    [
        ("Which valve closes when it contracts?</question> More.", Answer("Which valve closes when it contracts?")),
        ("<question>\nWhat  lies between\nthe two chambers? And why?", Answer("What lies between the two chambers?")),
        ("", Answer(rejected="empty")),
        ("  </question>", Answer(rejected="empty")),
        ("The mitral valve has two leaflets.", Answer(rejected="not a question")),
        ("Why so?", Answer(rejected="too short or too long")),
        ("How do bees tell one another where flowers are?", Answer(rejected="repeats an example")),
        ("What is the name of the main method used?", Answer(rejected="says nothing of the passage")),
        ("What is the main topic of this passage?", Answer(rejected="speaks of the passage")),
        ("Lies between the left atrium and the left ventricle?", Answer(rejected="copied")),
        ("It lies between the left atrium?", Answer(rejected="copied")),
    ],
)  # fmt: skip
def test_what_is_kept_of_an_output(output, answer):
    assert judged(output, PASSAGE) == answer


def test_the_file_keeps_answers_and_goes_on_after_a_kill(tmp_path):
    path = tmp_path / "corpus.queries.jsonl"
    passages = [f"{PASSAGE} Number {i}." for i in range(5)]
    asked: list[str] = []

    def write(prompts):
        asked.extend(prompts)
        if len(asked) > 4:
            raise KeyboardInterrupt
        return ["Which valve closes when the ventricle contracts?", "no"][: len(prompts)]

    with pytest.raises(KeyboardInterrupt):
        write_queries(passages, QueryFile(path, "m"), write, 2, lambda _: None)
    with path.open("a") as handle:
        handle.write('{"passage": "cut sho')  # killed in the middle of a line
    again = QueryFile(path, "m")
    assert len(again.answers) == 4 and sorted(a.rejected for a in again.answers.values()) == [
        "",
        "",
        "not a question",
        "not a question",
    ]
    done: list[int] = []
    write_queries(
        [*passages, passages[0]],
        again,
        lambda prompts: ["Which valve is it that closes there?"] * len(prompts),
        2,
        done.append,
    )
    assert done == [1] and all(again.get(p) is not None for p in passages)
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 5
    assert QueryFile(path, "another model").answers == {}


def test_a_question_to_several_passages_is_one_to_none():
    answers = [
        Answer("What is a valve for?"),
        Answer("What is a Valve for?"),
        Answer("What is an atrium for?"),
        Answer(rejected="empty"),
    ]
    assert [a.query for a in without_repeats(answers)] == ["", "", "What is an atrium for?", ""]


@pytest.mark.parametrize(
    "content",
    [
        b'{"text": "a corpus"}\n',
        b'{"text": "a corpus", "title": "on one line"}',  # no newline at its end
        b"notes\nof mine, and no newline",
        b'{"passage": "p", "by": "m", "query": "", "rejected": "empty"}\nnotes',
        b"\x8c\xff\n{",
    ],
)
def test_a_file_of_something_else_is_refused_and_left_as_it_is(tmp_path, content):
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(RevelaError, match=r"x\.jsonl:\d is not a line of queries"):
        QueryFile(path, "m")
    assert path.read_bytes() == content


def test_a_line_that_was_cut_short_is_dropped_when_an_answer_comes(tmp_path):
    path = tmp_path / "x.jsonl"
    QueryFile(path, "m").add(["one"], [Answer("Which one is it?")])
    first = path.read_bytes()
    path.write_bytes(first + first[:20])
    again = QueryFile(path, "m")
    assert path.read_bytes() == first + first[:20]
    again.add(["two"], [Answer(rejected="empty")])
    again.add(["three"], [Answer(rejected="empty")])
    assert path.read_bytes().startswith(first) and len(QueryFile(path, "m").answers) == 3


def test_titles_and_first_sentences_are_taken_out_of_the_text():
    documents = [Document("a", PASSAGE, "Valves of the heart"), Document("b", PASSAGE)]
    chunks = [Chunk(0, f"Valves of the heart\n\n{PASSAGE}"), Chunk(1, PASSAGE)]
    titled = list(with_titles(chunks, documents))
    assert [c.query for c in titled] == ["Valves of the heart", ""]
    assert titled[0].text.strip() == PASSAGE and titled[1].text == PASSAGE
    first = list(
        with_first_sentences([Chunk(0, PASSAGE), Chunk(0, "One sentence alone is left as it is.")])
    )
    assert first[0].query == "The mitral valve has two leaflets." and first[0].text.startswith(
        "It lies"
    )
    assert first[1].query == "" and first[1].text == "One sentence alone is left as it is."


def test_the_most_telling_sentence_has_the_rare_words():
    common = "This is what we did here and there. "
    chunks = [
        Chunk(
            i,
            common + f"Zebrafish{i} larvae lack notochord{i} vacuoles. We did this and that here.",
        )
        for i in range(5)
    ]
    for i, chunk in enumerate(with_telling_sentences(chunks)):
        assert (
            chunk.query == f"Zebrafish{i} larvae lack notochord{i} vacuoles."
            and "larvae" not in chunk.text
        )


SOURCE = '''
def area(width, height):
    """The area of a rectangle, in square metres."""
    return width * height


class Box:
    def volume(self):
        """How much fits into the box.

        In litres.
        """
        return 1

    def silent(self):
        return 2
'''


def test_authors_words_are_docstrings_then_titles_then_a_telling_sentence():
    documents = [
        Document("m.py", SOURCE, kind="code"),
        Document("t", PASSAGE, "Valves of the heart"),
        Document("p", PASSAGE),
    ]
    documents.append(Document("bare.py", "def f(x):\n    return x\n", kind="code"))
    texts = (
        [SOURCE[:60], SOURCE[60:]],
        [f"Valves of the heart\n\n{PASSAGE}"],
        [PASSAGE],
        [documents[3].text],
    )
    chunks = [Chunk(i, text) for i, several in enumerate(texts) for text in several]
    found = list(with_authors_words(chunks, documents))
    assert [(c.document, c.query) for c in found[:3]] == [
        (0, "The area of a rectangle, in square metres."), (0, "How much fits into the box."), (1, "Valves of the heart")
    ]  # fmt: skip
    assert [c.text for c in found[:2]] == [
        "def area(width, height):\n    return width * height",
        "def volume(self):\n    return 1",
    ]
    assert found[2].text.strip() == PASSAGE
    assert (
        found[3] == list(with_telling_sentences(chunks))[3]
        and found[3].query
        and found[3].query not in found[3].text
    )
    assert found[4] == chunks[4] and len(found) == 5


TELLING = """
from conftest import make_rows
from revela.corpus.queries import with_telling_sentences
from revela.types import Chunk
print([c.query for c in with_telling_sentences([Chunk(i, row["text"]) for i, row in enumerate(make_rows(60, sentences=5))])])
"""


def test_the_most_telling_sentence_is_the_same_in_every_process():
    found = set()
    for seed in "012":
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path]),
        }
        done = subprocess.run(
            [sys.executable, "-c", TELLING],
            capture_output=True,
            text=True,
            env=environment,
            check=True,
        )
        found.add(done.stdout)
    assert len(found) == 1


def test_documents_are_drawn_until_there_are_enough_chunks():
    owners = [0] * 3 + [1] * 4 + [2] * 3 + [3] * 9
    assert documents_with_chunks(owners, 0, 0) == {0, 1, 2, 3}
    for seed in range(5):
        chosen = documents_with_chunks(owners, 7, seed)
        assert chosen and (len(chosen) == 1 or sum(o in chosen for o in owners) <= 7)
        assert chosen == documents_with_chunks(owners, 7, seed)
