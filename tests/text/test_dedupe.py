"""Near-duplicates: documents that share most shingles with an earlier one are dropped."""

from __future__ import annotations

import random

import pytest

from revela.text import dedupe
from revela.text.dedupe import FOUND, SHORTEST, SKETCH, bands_of, near_duplicates, shingles
from revela.text.spool import ArrowList, arrow_list
from revela.types import Document
from tests.collection_folder import write_lines

WORDS = [
    f"{a}{b}"
    for a in ("ka", "lo", "mi", "tu", "ser", "ven", "dor")
    for b in ("ra", "ne", "st", "pol", "gim", "hat", "cu", "bel")
]


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def edited(source: str, changes: int, rng: random.Random) -> str:
    """The text with so many of its words replaced."""
    words = source.split()
    for i in rng.sample(range(len(words)), changes):
        words[i] = "changed"
    return " ".join(words)


def corpus(texts: list[str]) -> ArrowList[Document]:
    return arrow_list(Document, [Document(str(i), t) for i, t in enumerate(texts)])


def similarity(one: str, other: str) -> float:
    """The definition, by sets."""
    a, b = ({run for part in shingles(text) for run in part} for text in (one, other))
    return len(a & b) / len(a | b)


@pytest.mark.parametrize("least", [0.5, 0.7, 0.9])
def test_the_same_as_comparing_all_pairs(least):
    """Texts edited more and more, so that similarities lie on both sides of the threshold: beyond
    three standard deviations of the sketch on either side, the decision is that of the sets.
    """
    rng = random.Random(1)
    slack = 3 * (least * (1 - least) / SKETCH) ** 0.5
    texts = [
        edited(t, k, rng)
        for t in (text(rng, 150) for _ in range(12))
        for k in (0, 1, 2, 4, 6, 8, 12)
    ]
    rng.shuffle(texts)
    found = near_duplicates(corpus(texts), least)
    assert len(found) > 10
    for i, one in enumerate(texts):
        kept = [similarity(one, texts[j]) for j in range(i) if j not in found]
        if i in found:
            assert found[i] < i and found[i] not in found
            assert similarity(one, texts[found[i]]) >= least - slack
        else:
            assert max(kept, default=0) < least + slack


def test_judged_documents_stay_and_take_the_place_of_earlier_ones():
    one = text(random.Random(2), 100)
    assert near_duplicates(corpus([one, one, one]), 0.8, never={1}) == {0: 1, 2: 1}
    assert near_duplicates(corpus([one, one, one]), 0.8, never={1, 2}) == {0: 1}


def test_words_are_the_same_whatever_stands_between_them():
    plain = [*shingles("one two three four five six é seven 8 nine")]
    assert plain == [*shingles("One, TWO (three) -- four\n\nfive: six/é; seven 8... 'nine'!")]
    assert plain != [*shingles("one two three four five six è seven 8 nine")]
    # Scripts without spaces: a run of five characters.
    assert len(next(shingles("四つの文字は五つの言葉"))) == 7


def test_a_letter_put_into_thai_text_moves_no_other_word():
    thai = "ผึ้งเต้นรำเพื่อบอกเพื่อนว่าดอกไม้อยู่ที่ไหนและไกลแค่ไหนจากรังของมันในทุ่งหญ้า"
    thai += "กรุงเทพมหานครเป็นเมืองหลวงและนครที่มีประชากรมากที่สุดของประเทศไทยอยู่ริมแม่น้ำเจ้าพระยา" * 2
    documents = corpus([thai, "ก" + thai, "ผึ้ง" * 60])
    assert near_duplicates(documents, 0.8) == {1: 0}


def test_short_texts_resemble_nothing():
    short, long = text(random.Random(6), SHORTEST + 3), text(random.Random(7), SHORTEST + 4)
    assert near_duplicates(corpus([short, short, "", "", long, long]), 0.8) == {5: 4}
    assert near_duplicates(corpus(["", ""]), 0.8) == {} and near_duplicates(corpus([]), 0.8) == {}


def test_a_long_text_is_compared_to_its_end(monkeypatch):
    monkeypatch.setattr(dedupe, "PART", 2000)
    rng = random.Random(8)
    start, one, other = (text(rng, words) for words in (2500, 4000, 4000))
    texts = [f"{start} {one}", f"{start} {other}", edited(f"{start} {one}", 100, rng)]
    assert near_duplicates(corpus(texts), 0.8) == {2: 0}


@pytest.mark.parametrize("similar", [0.3, 0.5, 0.7, 0.8, 0.9, 0.99, 1.0])
def test_bands_find_what_they_promise(similar):
    bands = bands_of(similar)
    found = [1 - (1 - similar ** (SKETCH // b)) ** b for b in (bands, max(1, bands // 2))]
    assert found[0] >= FOUND and (found[1] < FOUND or bands == 1)


def test_read_corpus_counts_and_names_them(reads, tmp_path):
    rng = random.Random(10)
    one, two = text(rng, 100), text(rng, 100)
    texts = [one, two, edited(one, 1, rng), two]
    write_lines(tmp_path / "a.jsonl", [{"id": f"d{i}", "text": t} for i, t in enumerate(texts)])
    documents, report = reads({}, near=0.8)
    assert [d.id for d in documents] == ["d0", "d1"]
    assert report.documents == 2 and report.words == 200
    assert report.examples == {"duplicate text": ["d3"], "near-duplicate text": ["d2 like d0"]}
    assert [d.id for d in reads({})[0]] == ["d0", "d1", "d2"]
