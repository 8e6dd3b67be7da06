"""Crops are runs of a text's words within the bounds; windows lose nothing and keep to one
document.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from revela.training.methods.contrastive import MIN_WORDS, CropBatches, Crops, crop
from revela.training.settings import Training
from revela.training.training_set import windows
from revela.types import Chunk


@given(st.integers(1, 200), st.floats(0.05, 0.5), st.floats(0.0, 0.5), st.integers(0, 99))
def test_a_crop_is_a_run_of_words_of_the_right_length(n, least, more, seed):
    words = [f"w{i}" for i in range(n)]
    found = crop(" ".join(words), least, least + more, 0.0, random.Random(seed)).split()
    start = words.index(found[0])
    assert found == words[start : start + len(found)]
    longest = max(MIN_WORDS, round((least + more) * n))
    assert min(n, MIN_WORDS, round(least * n)) <= len(found) <= longest


def test_deletion_leaves_words_out_but_never_all():
    text = " ".join(f"w{i}" for i in range(1000))
    kept = crop(text, 1.0, 1.0, 0.3, random.Random(0)).split()
    assert 600 < len(kept) < 800 and kept == sorted(kept, key=lambda w: int(w[1:]))
    assert crop("a b c", 1.0, 1.0, 1.0, random.Random(0)) == "a b c"


def test_a_crop_of_chinese_is_a_piece_of_it():
    text = "".join(chr(0x4E00 + i) for i in range(400))
    found = crop(text, 0.3, 0.3, 0.0, random.Random(0))
    assert len(found) == 120 and found in text
    assert 60 < len(crop(text, 0.3, 0.3, 0.3, random.Random(0))) < 110


PARTS = ["Anna walks to town.", "Birds fly over hills.", "Carla reads old books."]
WHOLE = " ".join(PARTS)
CROPS = {"run": {}, "whole": dict(crop_shares=(1.0, 1.0)), "sentence": dict(inverse_cloze=1.0)}
CROPS["deleted"] = dict(crop_shares=(1.0, 1.0), crop_deletion=0.5)


@pytest.mark.parametrize(("kind", "settings"), CROPS.items())
def test_each_setting_makes_other_queries_and_passages_of_a_text(kind, settings):
    parts = SimpleNamespace(training=Training(), sides=lambda *sides: dict(enumerate(sides)))
    rows = [{"text": WHOLE, "row": i, "epoch": 0} for i in range(40)]
    batch = CropBatches(parts, Crops(**settings))(rows)
    for query, passage in zip(batch[0], batch[1], strict=True):
        is_run = query in WHOLE and passage in WHOLE
        rest = " ".join(part for part in PARTS if part != query)
        is_whole = query == passage == WHOLE
        found = "sentence" if query in PARTS and passage == rest else "run" if is_run else "deleted"
        assert ("whole" if is_whole else found) == kind


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30)), max_size=30), st.integers(5, 60))
def test_windows_join_neighbours_of_a_document_up_to_the_limit(pieces, limit):
    ordered = enumerate(sorted(pieces, key=lambda piece: piece[0]))
    chunks = [Chunk(owner, f"w{i} " * n) for i, (owner, n) in ordered]
    joined = list(windows(chunks, limit))
    for owner in range(4):
        mine = "".join(c.text for c in chunks if c.document == owner)
        assert "".join(w.text for w in joined if w.document == owner) == mine
    longest = max((len(c.text.split()) for c in chunks), default=0)
    assert all(len(w.text.split()) <= max(limit, longest) for w in joined)
