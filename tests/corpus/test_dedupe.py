"""Near-duplicates: documents that share most shingles with an earlier one are dropped."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from revela.corpus import dedupe as duplicates
from revela.corpus import spool as store
from revela.corpus.dedupe import (
    FOUND,
    SHORTEST,
    SKETCH,
    jaccard,
    near_duplicates,
    rows_of_band,
    shingles,
)
from revela.corpus.load import read_corpus
from revela.corpus.spool import arrow_list
from revela.errors import RevelaError
from revela.types import Document

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


def corpus(texts: list[str]) -> store.ArrowList[Document]:
    return arrow_list(Document, [Document(str(i), t) for i, t in enumerate(texts)])


def runs_of(source: str) -> set[tuple[str, ...]]:
    words = source.lower().split()
    return {tuple(words[i : i + 5]) for i in range(len(words) - 4)}


def similarity(one: str, other: str) -> float:
    """The definition, by sets."""
    a, b = runs_of(one), runs_of(other)
    return len(a & b) / len(a | b) if a | b else 0.0


def expected(texts: list[str], least: float) -> dict[int, set[int]]:
    """By comparing all pairs: each document that resembles an earlier, kept one, and which ones
    those are.
    """
    dropped: dict[int, set[int]] = {}
    for i, one in enumerate(texts):
        like = {j for j in range(i) if j not in dropped and similarity(one, texts[j]) >= least}
        if like:
            dropped[i] = like
    return dropped


def test_near_duplicates_go_and_different_texts_stay():
    rng = random.Random(0)
    base = [text(rng, 200) for _ in range(30)]
    copies = [edited(t, 3, rng) for t in base[:10]]
    relatives = [edited(t, 60, rng) for t in base[10:20]]
    found = near_duplicates(corpus(base + copies + relatives), 0.8)
    assert found == {30 + i: i for i in range(10)}


def test_the_same_as_comparing_all_pairs():
    """Texts edited more and more, so that similarities lie on both sides of the threshold."""
    rng = random.Random(1)
    texts = [
        edited(t, k, rng)
        for t in (text(rng, 150) for _ in range(12))
        for k in (0, 1, 2, 4, 6, 8, 12)
    ]
    rng.shuffle(texts)
    for least in (0.5, 0.7, 0.9):
        want, found = expected(texts, least), near_duplicates(corpus(texts), least)
        assert all(
            similarity(texts[i], texts[j]) >= least and j not in found and j < i
            for i, j in found.items()
        )
        missed = set(want) - set(found)
        assert len(want) > 10 and len(missed) <= (1 - FOUND) * len(want) + 1


@given(
    st.lists(st.sampled_from("abcdef"), min_size=SHORTEST, max_size=60),
    st.lists(st.sampled_from("abcdef"), min_size=SHORTEST, max_size=60),
)
def test_wordings_are_compared_as_sets_of_runs_of_five_words(one, other):
    a, b = " ".join(one), " ".join(other)
    assert jaccard(shingles(a), shingles(b)) == pytest.approx(similarity(a, b))


def test_words_are_the_same_whatever_stands_between_them():
    plain = "one two three four five six é seven 8 nine"
    assert np.array_equal(
        shingles(plain), shingles("One, TWO (three) -- four\n\nfive: six/é; seven 8... 'nine'!")
    )
    assert not np.array_equal(shingles(plain), shingles(plain.replace("é", "è")))
    # Scripts without spaces: a run of five characters.
    assert len(shingles("四つの文字は五つの言葉")) == 7
    assert len(shingles("one two three four")) == len(shingles("")) == 0


def test_a_letter_put_into_thai_text_moves_no_other_word():
    thai = "ผึ้งเต้นรำเพื่อบอกเพื่อนว่าดอกไม้อยู่ที่ไหนและไกลแค่ไหนจากรังของมันในทุ่งหญ้า"
    thai += "กรุงเทพมหานครเป็นเมืองหลวงและนครที่มีประชากรมากที่สุดของประเทศไทยอยู่ริมแม่น้ำเจ้าพระยา" * 2
    documents = corpus([thai, "ก" + thai, "ผึ้ง" * 60])
    assert near_duplicates(documents, 0.8) == {1: 0}


@pytest.mark.parametrize("batch", [1, 1000])
def test_how_the_work_is_cut_changes_nothing(monkeypatch, batch):
    rng = random.Random(3)
    texts = [edited(t, k, rng) for t in (text(rng, 100) for _ in range(20)) for k in (0, 1, 3)]
    want = near_duplicates(corpus(texts), 0.7)
    monkeypatch.setattr(store, "BATCH", batch)
    monkeypatch.setattr(duplicates, "BATCH", batch)
    assert want and near_duplicates(corpus(texts), 0.7) == want


def test_short_texts_resemble_nothing():
    short, long = text(random.Random(6), SHORTEST + 3), text(random.Random(7), SHORTEST + 4)
    assert near_duplicates(corpus([short, short, "", "", long, long]), 0.8) == {5: 4}
    assert near_duplicates(corpus(["", ""]), 0.8) == {} and near_duplicates(corpus([]), 0.8) == {}


def test_a_long_text_is_compared_to_its_end():
    rng = random.Random(8)
    start, one, other = (text(rng, words) for words in (250_000, 400_000, 400_000))
    assert len(start) > 2**20
    texts = [f"{start} {one}", f"{start} {other}", edited(f"{start} {one}", 10_000, rng)]
    assert near_duplicates(corpus(texts), 0.8) == {2: 0}


@pytest.mark.parametrize("script", ["abc ", "蜜蜂舞"])
def test_how_a_long_text_is_cut_changes_nothing(monkeypatch, script):
    source = " ".join("".join(random.Random(i).choices(script, k=50)) for i in range(50))
    whole = shingles(source)
    matching = corpus([source, f"{source} {source[:90]}"])
    want = near_duplicates(matching, 0.8)
    monkeypatch.setattr(duplicates, "PART", 100)
    assert np.array_equal(shingles(source), whole)
    assert want and near_duplicates(matching, 0.8) == want


def test_texts_are_compared_by_some_of_their_shingles(monkeypatch):
    rng = random.Random(11)
    words = [str(i) for i in range(40_000)]
    for length in (39_000, 34_000, 20_000, 1_500):  # most of the shorter is in the longer one
        shorter = edited(" ".join(words[:length]), length // 100, rng)
        one, other = shingles(shorter), shingles(" ".join(words))
        exact = jaccard(one, other)
        with monkeypatch.context() as patch:
            patch.setattr(duplicates, "MOST", 5_000)
            sampled = jaccard(shingles(shorter), shingles(" ".join(words)))
        assert sampled == pytest.approx(exact, abs=0.03) and 0.01 < exact < 0.99


@pytest.mark.parametrize("similar", [0.3, 0.5, 0.7, 0.8, 0.9, 0.99, 1.0])
def test_bands_find_what_they_promise(similar):
    rows = rows_of_band(similar)
    found = [1 - (1 - similar**r) ** (SKETCH // r) for r in (rows, rows + 1)]
    assert found[0] >= FOUND and (found[1] < FOUND or rows == SKETCH)


def test_many_alike_that_are_not_alike_enough_stay():
    """Filled-in forms: every pair shares bands, no pair is similar enough, and the work stays
    bounded.
    """
    rng = random.Random(9)
    form = text(rng, 120).split()
    texts = [
        " ".join(w if i % 20 else rng.choice(WORDS) + str(k) for i, w in enumerate(form))
        for k in range(300)
    ]
    assert similarity(texts[0], texts[1]) < 0.8
    assert near_duplicates(corpus(texts), 0.8) == {}


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.floats(0.4, 1.0))
def test_what_is_dropped_is_as_similar_as_asked_for(seed, least):
    rng = random.Random(seed)
    texts = [
        edited(t, rng.randrange(10), rng)
        for t in (text(rng, 60) for _ in range(6))
        for _ in range(5)
    ]
    for i, j in near_duplicates(corpus(texts), least).items():
        assert j < i and similarity(texts[i], texts[j]) >= least


def test_read_corpus_counts_and_names_them(tmp_path):
    rng = random.Random(10)
    one, two = text(rng, 100), text(rng, 100)
    rows = [one, two, edited(one, 1, rng), two]
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"id": f"d{i}", "text": t}) + "\n" for i, t in enumerate(rows))
    )
    documents, report = read_corpus([tmp_path], near=0.8)
    assert (
        [d.id for d in documents] == ["d0", "d1"] and report.documents == 2 and report.words == 200
    )
    assert report.examples == {"duplicate text": ["d3"], "near-duplicate text": ["d2 like d0"]}
    assert [d.id for d in read_corpus([tmp_path])[0]] == ["d0", "d1", "d2"]


@pytest.mark.parametrize("near", [-0.1, 80, float("nan")])
def test_what_is_no_share_is_refused(tmp_path, near):
    with pytest.raises(RevelaError, match=r"--near-duplicates .*: give a number from 0"):
        read_corpus([tmp_path], near=near)
