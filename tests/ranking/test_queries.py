"""Queries taken from the text: titles, sentences and docstrings."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from conftest import make_rows
from revela.ranking.queries import (
    is_natural,
    sentence_queries,
    with_authors_words,
    with_first_sentences,
    with_telling_sentences,
    with_titles,
)
from revela.types import Chunk, Document

REST = "It lies between the left atrium and the left ventricle, and closes in systole."
PASSAGE = f"The mitral valve has two leaflets. {REST}"
BEES = "蜜蜂通过舞蹈告诉同伴花丛的位置。它们住在蜂巢里面的蜂房中。好。"
BARE = "One sentence alone is left as it is."


TITLES = [
    ("Valves of the heart", f"Valves of the heart\n\n{PASSAGE}", f"\n\n{PASSAGE}"),
    ("", PASSAGE, PASSAGE),
    ("Art", "Article 5 of the law", "Article 5 of the law"),
    ("Art", "Article 5 is on art: Art, apart", "Article 5 is on art: , apart"),
    ("part", "apart, a partner and a part", "apart, a partner and a "),
    ("花", "花丛之间", "丛之间"),
    ("cafe", "cafe\u0301 and tea", "cafe\u0301 and tea"),
    ("C++", "C++ in brief", " in brief"),
    ("Bees", "Bees", "Bees"),
]


@pytest.mark.parametrize(("title", "text", "left"), TITLES)
def test_a_title_is_taken_out_of_the_text_and_not_out_of_a_word(title, text, left):
    (chunk,) = with_titles([Chunk(0, text)], [Document("a", text, title)])
    assert (chunk.query, chunk.text) == (title, left)


FIRST_SENTENCES = [
    (PASSAGE, "The mitral valve has two leaflets.", REST),
    (BARE, "", BARE),
    (BEES, "蜜蜂通过舞蹈告诉同伴花丛的位置。", "它们住在蜂巢里面的蜂房中。好。"),
]


@pytest.mark.parametrize(("text", "query", "left"), FIRST_SENTENCES)
def test_a_first_sentence_is_taken_out_of_the_text(text, query, left):
    assert list(with_first_sentences([Chunk(0, text)])) == [Chunk(0, left, query)]


def test_the_most_telling_sentence_has_the_rare_words():
    common = "This is what we did here and there. "
    rare = "Zebrafish{0} larvae lack notochord{0} vacuoles."
    texts = [f"{common}{rare.format(i)} We did this and that here." for i in range(5)]
    for i, chunk in enumerate(with_telling_sentences([Chunk(i, t) for i, t in enumerate(texts)])):
        assert chunk.query == rare.format(i) and "larvae" not in chunk.text
    others = [Chunk(1, "蜜蜂通过舞蹈告诉同伴花丛的位置了。")] * 3
    assert next(with_telling_sentences([Chunk(0, BEES), *others])).query.startswith("它们")


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
    bare = "def f(x):\n    return x\n"
    documents = [
        Document("m.py", SOURCE, kind="code"),
        Document("t", PASSAGE, "Valves of the heart"),
        Document("p", PASSAGE),
        Document("bare.py", bare, kind="code"),
    ]
    texts = [(0, SOURCE[:60]), (0, SOURCE[60:]), (1, PASSAGE), (2, PASSAGE), (3, bare)]
    chunks = [Chunk(*owned) for owned in texts]
    area = "def area(width, height):\n    return width * height"
    telling = list(with_telling_sentences(chunks))[3]
    assert telling.query and telling.query not in telling.text
    assert list(with_authors_words(chunks, documents)) == [
        Chunk(0, area, "The area of a rectangle, in square metres."),
        Chunk(0, "def volume(self):\n    return 1", "How much fits into the box."),
        Chunk(1, PASSAGE, "Valves of the heart"),
        telling,
        chunks[4],
    ]


TELLING = """
import json, sys
from revela.ranking.queries import with_telling_sentences
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


def test_a_text_without_sentences_gives_a_piece_unless_it_is_code():
    rng = np.random.default_rng(0)
    names = ["".join(rng.choice(list("abcdefgh"), 12)) for _ in range(60)]
    assert len(sentence_queries([" ".join(names)], 1)[0]) == 1
    assert not sentence_queries([" ".join(f"{name} = {name}();" for name in names)], 1)[0]


def test_a_sentence_that_several_documents_have_is_not_drawn():
    banner = "This manual is a part of the whole set of manuals."
    drawn, _ = sentence_queries([f"{banner} {row['text']}" for row in make_rows(60)], 60)
    assert len(drawn) == 60 and not any("manual" in query for query, _ in drawn.values())


SENTENCES = [
    ("Bees dance to show the way.", True),
    ("这座城市的房屋建于上个世纪，至今仍然屹立不倒。", True),
    ("इस शहर के घर पिछली सदी में बनाए गए थे।", True),
    ("Set `depth` to a number of your own.", True),
    ("## How bees dance in the hive.", False),
    ("How bees dance in the hive", False),
    ("[![build](https://a.b/c.svg)](https://a.b) shows the state of it.", False),
    ("See https://example.org/page for more of this.", False),
    ("```sh\nmake all the things now.", False),
    ("if (a[i] != b[j] && c > 0) { return x(); } // so.", False),
    ("Too few words.", False),
]


@pytest.mark.parametrize(("text", "natural"), SENTENCES)
def test_sentences_that_a_person_wrote_as_such(text, natural):
    assert is_natural(text) == natural
