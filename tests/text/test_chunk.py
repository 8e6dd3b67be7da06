"""Chunking loses no text, cuts no sentence, and keeps functions whole."""

from __future__ import annotations

import gzip
import json
import re
import time
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import SHARED
from revela.text.chunk import SPLIT_WORDS, chunk, chunk_all
from revela.text.sentences import sentences
from revela.text.words import count_words, words
from revela.types import Document

SCRIPTS = "ab. (「」。！？،؟।॥։\n\u3000蜜蜂カがとー\u3099กิำน์ខ្ញុំ។မြန်ကို།हिन्दी한글é\u0301\u200d👩\ufe00"
WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=300) | st.text(
    st.sampled_from(SCRIPTS), max_size=300
)
PIECES = [
    "One two three.",
    "Is it so?",
    "No!",
    "Dr. No came.",
    "A b c d",
    "\n\n",
    "3.5 is e.g. it.",
]
PROSE = st.lists(st.sampled_from(PIECES), max_size=40).map(" ".join)


@given(WORDS | PROSE)
def test_sentences_joined_are_the_text(text):
    assert "".join(sentences(text)) == text


@given(WORDS | PROSE, st.integers(1, 30), st.sampled_from(["prose", "code"]))
def test_chunks_lose_no_word_and_are_never_too_long(text, max_words, kind):
    chunks = chunk(Document("d", text, kind=kind), 3, max_words)
    assert "".join("".join(c.text for c in chunks).split()) == "".join(text.split())
    assert all(0 < count_words(c.text) <= max_words and c.document == 3 for c in chunks)


@given(WORDS | PROSE, st.integers(2, 9), st.sampled_from(["prose", "code"]))
def test_a_document_is_split_into_so_many_chunks_or_none(text, parts, kind):
    chunks = [c.text for c in chunk_all([Document("d", text, kind=kind)], 9, parts=parts)]
    assert not chunks or ("".join(chunks) == text and len(chunks) == parts)
    assert all(piece.strip() for piece in chunks)
    assert not chunks or len(words(text)) >= SPLIT_WORDS * parts


def test_a_split_ends_at_a_sentence_that_is_near_and_else_between_words():
    prose, run = "Bees dance at noon in the sun. " * 7 + "Do they? ", "word " * 40
    for text, ends in ((prose, (". ", "? ")), (run, ("d ",))):
        chunks = [c.text for c in chunk_all([Document("d", text)], 9, parts=4)]
        assert all(piece.endswith(ends) for piece in chunks)
        assert max(map(len, chunks)) < 1.6 * min(map(len, chunks))


@given(WORDS, st.integers(1, 9))
def test_no_chunk_begins_with_a_mark_of_the_character_before_it(text, max_words):
    place = 0
    for piece in chunk(Document("d", text), 0, max_words):
        place = text.index(piece.text, place)
        marked = unicodedata.category(text[place]).startswith("M") or text[place] == "\u0e33"
        assert not (marked and place and not text[place - 1].isspace())
        place += len(piece.text)


@given(PROSE, st.integers(10, 60))
def test_no_sentence_that_fits_is_cut(text, max_words):
    allowed, position = set(), 0
    for piece in sentences(text):
        inside = range(len(piece)) if count_words(piece) > max_words else [0]
        allowed.update(position + i for i in inside)
        position += len(piece)
    position = 0
    for c in chunk(Document("d", text), 0, max_words):
        position = text.index(c.text, position)
        assert position in allowed
        position += len(c.text)


@pytest.mark.parametrize("unit", [".", '"', ")", "\n", "?!", ". ", " .", ".\r\n", "。」", "\r\n "])
def test_a_long_run_of_marks_takes_no_time(unit):
    text = f"Bats hear echoes. {unit * 200_000}x"
    begin = time.process_time()
    assert "".join(sentences(text)) == text
    assert time.process_time() - begin < 5


def test_functions_stay_whole():
    first = "@decorator\ndef first(a):\n    b = a\n\n    return b\n\n\n"
    second = "class Second:\n    def method(self):\n        return 1\n\n"
    other = "    def other(self):\n        return 2\n"
    source = Document("m.py", first + second + other, kind="code")
    assert [c.text for c in chunk(source, 0, 9)] == [first, second, other]


def test_a_piece_without_white_space_is_cut():
    for text in ("QUJD" * 500, "ACGT" * 500, "a=1;b=[2];" * 300, "|x" * 900, "蜂" * 900, "ก" * 900):
        for kind in ("prose", "code"):
            cut = [c.text for c in chunk(Document("d.js", text, kind=kind), 0, 40)]
            assert "".join(cut) == text
            assert len(cut) > 4 and max(map(len, cut)) <= 350


CUTS = [
    ["กรุงเทพมหานครเป็นเมืองหลวง ", "และนครที่มีประชากรมากที่สุด ", "ของประเทศไทย"],
    ["蜜蜂通过舞蹈告诉同伴花的位置，", "舞蹈的角度表示方向，", "长度表示距离。"],
]


@pytest.mark.parametrize("expected", CUTS)
def test_a_long_sentence_is_cut_at_spaces_or_commas(expected):
    assert [c.text for c in chunk(Document("d", "".join(expected)), 0, 7)] == expected


@pytest.mark.parametrize("name", ["zh_laws", "ja_aozora"])
def test_real_text_is_cut_at_its_sentences(name):
    path = SHARED / "data" / "text" / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"{name} is not here")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line, _ in zip(lines, range(20), strict=False)]
    cut = [c.text for text in texts for c in chunk(Document("d", text), 0, 120)]
    assert 80 < sum(map(count_words, cut)) / len(cut) <= 120
    whole = [c for c in cut if re.search(r"[。！？：；」』）.!?:;)\n]\s*$", c)]
    assert len(whole) > 0.95 * len(cut)


# The kinds of pragmatic_segmenter's golden rules, with sentences of our own. A list of sentences
# has to be found as it is, or with boundaries missing.
RIGHT_OR_MISSED = [
    ["She is called Ann F. Miller."],
    ["Turn to p. 12 for more."],
    ["They sold it to Park, Hill & Co. at noon."],
    ["Ask Bob and co. ", "They know."],
    ["One sees Mt. Hood from St. Mary's tower on 5th St. by the lake."],
    ["I saw the U.S.A. in May. ", "It was warm."],
    ["The U.S. Bee Board met."],
    ["At 5 a.m. Mr. Hall left. ", "He came back at 6 P.M. ", "Mrs. Hall slept."],
    ["She had $100.50. ", "It was hers."],
    ["He teaches (He once kept bees.) at the school."],
    ["See https://example.org/a.b.c?d=1. ", "It is there."],
    ['She turned, "This is it." ', "She held it up."],
    ["Is it you?! ", "Yes."],
    ["1. The first item 2. The second item"],
    ["1.) The first item. ", "2.) The second item."],
    ["• 9. The first item • 10. The second item"],
    ["a. The first item b. The second item"],
    ["Steps:\n1. Open it.\n", "2. Close it."],
    ["You find it at N°. 1026.253.553. ", "That is where."],
    ["The laws will seem less complex. . . ."],
    ["Bohr [...] Used it (Smith 55)."],
    ["I was . . . I did not mean it."],
    ["It ended.... ", "She left."],
    ["J.-P. Dupont met J. R. R. Tolkien."],
    # German, French, Spanish, Italian, Dutch, Swedish, Danish, Polish, Czech, Hungarian, Turkish
    ["Am 3. Oktober fuhr er z. B. nach Ulm. ", "Dann kam er."],
    ["Die Hauptstr. 5 liegt im 2. Stock bzw. im Keller."],
    ["Das ist d. h. Nr. 5, S. 12 ff. und Abs. 3 Satz 1."],
    ["Herr Dipl.-Ing. Meier kam am 7. Er blieb."],
    ["M. Dupont et Mme. Petit, p. ex. Marie, vivent av. J.-C. À Paris."],
    ["El Sr. García y la Sra. Pérez van a EE. UU. en mayo. ", "Luego vuelven."],
    ["Il Sig. Rossi e il Dott. Bianchi, pag. 3. "],
    ["De heer mr. Jansen, bijv. Nederland, blz. 5."],
    ["Det är bl.a. Stockholm, t.ex. Norr, kl. 5."],
    ["Den 3. Maj kom han. ", "Han gik."],
    ["Ul. Krakowska 5, np. Warszawa, prof. Nowak i inż. Kos."],
    ["Dne 3. října přijel např. Karel."],
    ["Ez pl. Budapest, stb. És más."],
    ["Prof. Dr. Ali, Atatürk Cad. No. 5, geldi. ", "Sonra gitti."],
    # Russian, Ukrainian, Greek, Hindi, Arabic, Armenian
    ["А. С. Пушкин жил на ул. Мойке и т. д. в г. Москве, т.е. России. ",
     "Он писал."],
    ["См. рис. 3 и табл. Б на стр. 5. ", "Это всё."],
    ["Ο κ. Νίκος, π.χ. Εδώ, σελ. 5. ", "Μετά έφυγε."],
    ["डॉ. शर्मा आए। ", "वे गए।"],
    ["د. أحمد هنا. ", "متى جاء؟ ", "أمس."],
]  # fmt: skip


@pytest.mark.parametrize("expected", RIGHT_OR_MISSED)
def test_a_sentence_end_is_right_or_missed(expected):
    allowed, place = set(), 0
    for sentence in expected:
        place += len(sentence)
        allowed.add(place)
    place = 0
    for sentence in sentences("".join(expected)):
        place += len(sentence)
        assert place in allowed, sentence


BLANK_LINES = ["A heading\n \n\n", "Some text\nof two lines\n\t\n", "And more"]


@pytest.mark.parametrize(
    "expected",
    [
        ["It was 1990. ", "Then it was 5. ", "She is 12. ", "He is 13."],
        ["He said no. ", "The Sun. ", "It shines."],
        ["It weighs 5 kg. ", "That is much."],
        ["Он жил в лесу. ", "Потом ушёл."],
        ["Es war im Haus. ", "Er kam 1990. ", "Dann ging er."],
        ["Look at it.) ", "Then go."],
        ["Dr. Smith et al. saw 3.5 mg, i.e. little. ", '"Why?" he asked. ', "See Fig. 2. ",
         "It works.\n\n", "A new paragraph"],
        BLANK_LINES,
        [piece.replace("\n", "\r\n") for piece in BLANK_LINES],
        ["第一条。", "第二条呢？！", "“你好。”", "他说。 ", "GDP是3.5。", "iPhone"],
        ["「はい。」と言った。", "（終わり。）", "Yahoo！、次｡", "３．５です"],
        ["यह एक वाक्य है।", "दूसरा॥ ", "तीसरा"],
        ["هل هذا سؤال؟ ", "نعم، هو. ", "لا"],
        ["آپ کیسے ہیں؟", "میں ٹھیک ہوں۔", "شکریہ"],
        ["Ինչպե՞ս ես։ ", "Լավ։"],
        ["សួស្តី។", "ខ្ញុំ"],
        ["ဒါက။", "ဟုတ်တယ်"],
        ["ሰላም።", "ነው፧ ", "አዎ"],
        ["Is 3.5 e.g. a number?yes. ", "No?! ", "It.is"],
    ],
)  # fmt: skip
def test_sentence_ends_are_found(expected):
    assert sentences("".join(expected)) == expected
