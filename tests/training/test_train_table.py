"""Training a table of words: the loss against a loop, what stays, and what is found after it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from revela.index.language import Analyzer
from revela.retriever.word_table import word_table
from revela.training import train_table as training
from revela.training.train_table import crop_loss, crops, train_table
from revela.types import Document


def texts_of_topics(n=120, seed=0):
    """Texts of 24 words of one of four topics; topics share no words."""
    rng = np.random.default_rng(seed)
    return [" ".join(f"t{i % 4}w{w}" for w in rng.integers(0, 30, 24)) for i in range(n)]


@pytest.fixture(scope="module")
def table(tiny_lm_folder):
    return word_table(tiny_lm_folder, texts_of_topics(), Analyzer("none"))


def test_the_loss_is_that_of_a_loop():
    torch.manual_seed(0)
    query, passage = torch.randn(2, 3, 4).double()
    loss = 0.0
    for tau in training.TAUS:
        for i in range(3):
            scores = torch.stack([F.cosine_similarity(query[i], p, dim=0) / tau for p in passage])
            loss = loss - (scores[i] - scores.logsumexp(0)) / 3 / len(training.TAUS)
    assert torch.allclose(crop_loss(query, passage), loss)


def test_a_crop_and_the_rest_are_the_text():
    texts = [np.arange(10) + 100 * i for i in range(7)] + [np.arange(90) + 1000]
    queries, passages = next(crops(texts, len(texts), np.random.default_rng(0)))
    whole = {tuple(text.tolist()) for text in texts}
    for query, passage in zip(queries, passages, strict=True):
        assert training.SHORTEST <= len(query) <= training.LONGEST
        assert (np.diff(query) == 1).all()
        whole.remove(tuple(sorted([*query.tolist(), *passage.tolist()])))
    assert not whole
    batches = crops(texts, 3, np.random.default_rng(0))
    seen = {int(query[0]) // 100 for _ in range(3) for query in next(batches)[0]}
    assert len(seen) >= 7  # an epoch has every text


def test_the_first_half_stays_and_the_second_learns_which_words_go_together(table):
    trained = train_table(table, texts_of_topics(), steps=60)
    width = table.width
    assert torch.equal(trained.rows_SD[:, :width], table.rows_SD)
    assert not torch.equal(trained.rows_SD[:, width:], table.rows_SD)

    assert nearness(trained, width) > 1.5 * nearness(table, 0)


def nearness(table, first):
    """How much nearer words are to those of their topic than to others, by their rows from a number
    on."""
    stems = [next(table.stems([f"t{topic}w{i}"]))[0] for topic in range(4) for i in range(30)]
    unit = F.normalize(table.rows_SD[stems, first:], dim=1)
    near = (unit @ unit.T).reshape(4, 30, 4, 30).mean(dim=(1, 3))
    return float(near.diagonal().mean() - near.mean())


def test_texts_are_windows_after_their_titles_and_a_sample_of_many(monkeypatch):
    words = " ".join(f"w{i}." for i in range(500))
    documents = [Document("a", words, "A title"), Document("b", "Short.")]
    texts = training.texts_of(documents)
    assert [len(text.split()) for text in texts] == [242, 242, 22, 1]
    assert all(text.startswith("A title w") for text in texts[:3]) and texts[3] == "Short."
    monkeypatch.setattr(training, "MOST_TEXTS", 3)
    assert training.texts_of(documents) == [texts[0], texts[1], texts[3]]


def test_the_same_seed_gives_the_same_table_and_no_steps_the_one_before(table):
    texts = texts_of_topics()
    first, again, other = (train_table(table, texts, steps=3, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.rows_SD, again.rows_SD)
    assert not torch.equal(first.rows_SD, other.rows_SD)
    assert train_table(table, texts, steps=0) is table
    assert train_table(table, ["too few words", "t0w1"]) is table
