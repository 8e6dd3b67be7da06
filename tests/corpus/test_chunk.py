"""Chunking loses no text, cuts no sentence, and keeps functions whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from revela.corpus.chunk import chunk, sentences
from revela.types import Document

WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=300)
PROSE = st.lists(
    st.sampled_from(
        [
            "One two three.",
            "Is it so?",
            "No!",
            "Dr. No came.",
            "A b c d e f g h",
            "\n\n",
            "3.5 is e.g. a number.",
        ]
    ),
    max_size=40,
).map(" ".join)


@given(WORDS | PROSE)
def test_sentences_joined_are_the_text(text):
    assert "".join(sentences(text)) == text


@given(WORDS | PROSE, st.integers(1, 30), st.sampled_from(["prose", "code"]))
def test_chunks_lose_no_word_and_are_never_too_long(text, max_words, kind):
    chunks = chunk(Document("d", text, kind=kind), 3, max_words)
    assert "".join("".join(c.text for c in chunks).split()) == "".join(text.split())
    assert all(0 < len(c.text.split()) <= max_words and c.document == 3 for c in chunks)


@given(PROSE, st.integers(10, 60))
def test_no_sentence_that_fits_is_cut(text, max_words):
    allowed, position = set(), 0
    for piece in sentences(text):
        inside = range(len(piece)) if len(piece.split()) > max_words else [0]
        allowed.update(position + i for i in inside)
        position += len(piece)
    position = 0
    for c in chunk(Document("d", text), 0, max_words):
        position = text.index(c.text, position)
        assert position in allowed
        position += len(c.text)


def test_sentence_ends():
    text = 'Dr. Smith et al. saw 3.5 mg, i.e. little. "Why?" he asked. See Fig. 2. It works.'
    text += "\n\nA new paragraph"
    assert [s.strip() for s in sentences(text)] == [
        "Dr. Smith et al. saw 3.5 mg, i.e. little.",
        '"Why?" he asked.',
        "See Fig. 2.",
        "It works.",
        "A new paragraph",
    ]


def test_functions_stay_whole():
    first = "@decorator\ndef first(a):\n    b = a\n\n    return b\n\n\n"
    second = "class Second:\n    def method(self):\n        return 1\n\n"
    source = first + second + "    def other(self):\n        return 2\n"
    pieces = [c.text for c in chunk(Document("m.py", source, kind="code"), 0, 9)]
    assert pieces[0] == first
    assert any(p.strip().startswith("def other") for p in pieces)
    assert "".join(pieces) == source


def test_other_languages_split_at_the_margin():
    source = "int f() {\n  return 1;\n}\n\nint g() {\n\n  return 2;\n}\n"
    assert [c.text for c in chunk(Document("m.c", source, kind="code"), 0, 6)] == [
        "int f() {\n  return 1;\n}\n\n",
        "int g() {\n\n  return 2;\n}\n",
    ]
