"""Queries taken from the text: titles, sentences and docstrings."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from conftest import make_rows
from revela.training.queries.from_text import (
    with_authors_words,
    with_first_sentences,
    with_telling_sentences,
    with_titles,
)
from revela.types import Chunk, Document

PASSAGE = (
    "The mitral valve has two leaflets. "
    "It lies between the left atrium and the left ventricle, and closes in systole."
)


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


@pytest.mark.parametrize(
    ("title", "text", "left"),
    [
        ("Art", "Article 5 of the law", "Article 5 of the law"),
        ("Art", "Article 5 is on art: Art, apart", "Article 5 is on art: , apart"),
        ("part", "apart, a partner and a part", "apart, a partner and a "),
        ("花", "花丛之间", "丛之间"),
        ("cafe", "cafe\u0301 and tea", "cafe\u0301 and tea"),
        ("C++", "C++ in brief", " in brief"),
        ("Bees", "Bees", "Bees"),
    ],
)
def test_a_title_is_not_taken_out_of_a_word(title, text, left):
    (chunk,) = with_titles([Chunk(0, text)], [Document("a", text, title)])
    assert (chunk.query, chunk.text) == (title, left)


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
        (0, "The area of a rectangle, in square metres."),
        (0, "How much fits into the box."),
        (1, "Valves of the heart"),
    ]
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
import json, sys
from revela.training.queries.from_text import with_telling_sentences
from revela.types import Chunk
chunks = [Chunk(i, text) for i, text in enumerate(json.load(sys.stdin))]
print([c.query for c in with_telling_sentences(chunks)])
"""


def test_the_most_telling_sentence_is_the_same_in_every_process():
    texts = json.dumps([row["text"] for row in make_rows(60, sentences=5)])
    found = set()
    for seed in "01":
        command = [sys.executable, "-c", TELLING]
        given = dict(input=texts, text=True, env={**os.environ, "PYTHONHASHSEED": seed})
        found.add(subprocess.check_output(command, **given))
    assert len(found) == 1 and len(found.pop()) > 1000


def test_sentences_of_chinese_are_queries():
    text = "蜜蜂通过舞蹈告诉同伴花丛的位置。它们住在蜂巢里面的蜂房中。好。"
    first = next(iter(with_first_sentences([Chunk(0, text)])))
    assert first.query == "蜜蜂通过舞蹈告诉同伴花丛的位置。"
    assert first.text == "它们住在蜂巢里面的蜂房中。好。"
    others = [Chunk(1, "蜜蜂通过舞蹈告诉同伴花丛的位置了。")] * 3
    assert next(iter(with_telling_sentences([Chunk(0, text), *others]))).query.startswith("它们")
