"""Words are one unit of length in every script; a fast path counts them as a plain loop does."""

from __future__ import annotations

import gzip
import json
import re
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import SHARED
from revela.text.words import (
    LONGEST,
    MARKS,
    PIECE,
    count_terms,
    count_words,
    joined,
    runs,
    terms,
    words,
)

SOME = "ab1.,(「」。 \n\u3000蜜蜂カがー\u3099กิำน์ខ្ញុំမြန်ကို་བོहिन्दी한글é\u0301\u200d👩👍🏽𑀓𑀺\ud800Ａ１"
TEXTS = st.text(max_size=80) | st.text(st.sampled_from(SOME), max_size=300)
LONG = st.tuples(TEXTS, st.sampled_from(["A", "ab+/", "ACGT", "e\u0301", "😀"]), TEXTS).map(
    lambda t: t[0] + t[1] * 90 + t[2]
)


def is_mark(character: str) -> bool:
    return unicodedata.category(character).startswith("M") or character in "\u0e33\u200d"


@given(TEXTS | LONG)
def test_words_joined_are_the_text(text):
    found = words(text)
    assert "".join(found) == (text if text.strip() else "")
    assert all(word.strip() for word in found)
    assert count_words(text) == len(found)


@given(TEXTS | LONG)
def test_no_mark_is_separated_from_its_base(text):
    place = 0
    for word in words(text)[:-1]:
        place += len(word)
        assert not is_mark(text[place]) or text[place - 1].isspace()


@given(st.text(st.characters(max_codepoint=0x4FF), max_size=200))
def test_where_words_are_spaced_they_are_those_between_white_space(text):
    if all(len(word) <= LONGEST for word in text.split()):
        assert [word.strip() for word in words(text)] == text.split()
    assert terms(text.encode("ascii", "ignore").decode()) == re.findall(
        r"\w+", text.encode("ascii", "ignore").decode()
    )


def test_every_mark_of_unicode_is_known():
    marks = (chr(code) for code in range(sys.maxunicode + 1))
    missed = [m for m in marks if unicodedata.category(m)[0] == "M" and not re.match(MARKS, m)[0]]
    assert not missed


NUMBER_OF_WORDS = [
    ("蜂は花の場所を踊りで教える。", 7),
    ("「蜂」は", 2),
    ("GDP增长5%。", 3),
    ("ＧＤＰ　２０２４", 2),
    ("กรุงเทพมหานคร", 3),  # 12 characters and a vowel sign
    ("ที่นี่ ที่นั่น", 2),
    ("ខ្ញុំស្រលាញ់", 1),  # four clusters
    ("मैं हिन्दी बोलता हूँ", 4),
    ("한국어를 배우고 있습니다", 3),
    ("👩‍👩‍👧 😀", 2),
    ("A" * 1000, (1000 - LONGEST) // PIECE + 1),
    ("", 0),
    (" \n", 0),
]


@pytest.mark.parametrize(("text", "expected"), NUMBER_OF_WORDS)
def test_the_number_of_words(text, expected):
    assert count_words(text) == expected


def test_terms_leave_punctuation_out_and_keep_marks():
    assert terms("हिन्दी, 東京都! e\u0301t") == ["हिन्दी", "東", "京", "都", "e\u0301t"]
    assert count_terms(terms("one two, three")) == 3
    assert count_terms(terms("東京都の人口")) == 3
    assert count_terms(terms("GDP 東京都")) == 3


def test_runs_overlap_and_leave_grammar_out():
    assert runs("東京都のGDPです") == ["東京", "京都"]
    assert runs("ที่กรุงเทพ")[0] == "ที่กรุงเ"
    assert runs("only Latin") == []


def test_no_space_comes_between_characters():
    assert joined(words(" 蜜蜂在花丛\n中 跳舞  now ")[:-1]) == "蜜蜂在花丛 中 跳舞"


def texts_of(language: str) -> dict[str, str]:
    path = SHARED / "data" / "languages" / f"xquad_{language}" / "corpus.jsonl.gz"
    if not path.exists():
        pytest.skip(f"XQuAD ({path.parent.name}) is not here")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return {row["_id"]: row["text"] for row in map(json.loads, lines)}


@pytest.mark.parametrize("language", ["zh", "th", "de", "ru", "ar", "tr"])
def test_a_translation_has_about_as_many_words(language):
    english = sum(map(count_words, texts_of("en").values()))
    assert 0.8 < sum(map(count_words, texts_of(language).values())) / english < 1.05
