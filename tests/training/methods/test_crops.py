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


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"run"}),
        ({"crop_shares": (1.0, 1.0)}, {"whole"}),
        ({"crop_shares": (1.0, 1.0), "crop_deletion": 0.5}, {"deleted"}),
        ({"inverse_cloze": 1.0}, {"sentence"}),
        ({"crop_shares": (1.0, 1.0), "inverse_cloze": 0.5}, {"whole", "sentence"}),
    ],
)
def test_a_batch_has_the_crops_of_the_settings(settings, expected):
    """Each setting makes other queries and passages of the same texts."""
    parts = ["Anna walks to town.", "Birds fly over hills.", "Carla reads old books."]
    rows = [{"text": " ".join(parts), "row": i, "epoch": 0} for i in range(40)]
    context = SimpleNamespace(
        training=Training(), sides=lambda first, second: {"first": first, "second": second}
    )
    whole, batch = " ".join(parts), CropBatches(context, Crops(**settings))(rows)
    rests = {part: " ".join(p for p in parts if p != part) for part in parts}

    def kind(first, second):
        if rests.get(first) == second:
            return "sentence"
        if first == second == whole:
            return "whole"
        return "run" if first in whole and second in whole else "deleted"

    assert set(map(kind, batch["first"], batch["second"])) == expected
    one = CropBatches(context, Crops(inverse_cloze=1.0))([{**rows[0], "text": parts[0]}])
    assert one["first"][0] in parts[0]  # one sentence has no rest


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
