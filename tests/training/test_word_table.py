"""Training a table of words: the loss against a loop, what stays, and what is found after it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from revela.index.language import Analyzer
from revela.retriever.static_from_words import WordTable, build_word_table, idf_weights
from revela.training import word_table as training
from revela.training.word_table import crop_loss, crops, train_pieces, train_table
from revela.types import Document


def texts_of_topics(n=120, seed=0):
    """Texts of 24 words of one of four topics; topics share no words."""
    rng = np.random.default_rng(seed)
    return [" ".join(f"t{i % 4}w{w}" for w in rng.integers(0, 30, 24)) for i in range(n)]


@pytest.fixture(scope="module")
def table(tiny_lm_folder):
    return build_word_table(tiny_lm_folder, texts_of_topics(), Analyzer("none"))


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
        assert training.MIN_WORDS <= len(query) <= training.MAX_WORDS
        assert (np.diff(query) == 1).all()
        whole.remove(tuple(sorted([*query.tolist(), *passage.tolist()])))
    assert not whole
    batches = crops(texts, 3, np.random.default_rng(0))
    seen = {int(query[0]) // 100 for _ in range(3) for query in next(batches)[0]}
    assert len(seen) >= 7  # an epoch has every text


def test_the_first_half_stays_and_the_second_learns_which_words_go_together(table):
    trained = train_table(table, texts_of_topics(), steps=60)
    width = table.rows_SD.shape[1]
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
    monkeypatch.setattr(training, "MAX_TEXTS", 3)
    assert training.texts_of(documents) == [texts[0], texts[1], texts[3]]


def test_the_same_seed_gives_the_same_table_and_no_steps_the_one_before(table):
    texts = texts_of_topics()
    first, again, other = (train_table(table, texts, steps=3, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.rows_SD, again.rows_SD)
    assert not torch.equal(first.rows_SD, other.rows_SD)
    assert train_table(table, texts, steps=0) is table
    assert train_table(table, ["too few words", "t0w1"]) is table


def test_tokens_of_an_lm_learn_as_words_do_and_those_of_no_text_keep_their_rows(tiny_lm_folder):
    tokenizer = Tokenizer.from_file(str(tiny_lm_folder / "tokenizer.json"))
    texts, size = texts_of_topics(), tokenizer.get_vocab_size()
    rows = torch.randn(size, 8, generator=torch.Generator().manual_seed(0))
    rows[3] = 0  # does not count
    read = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    seen = sorted({i for ids in read for i in ids} - {3})
    found = train_pieces(tokenizer, rows, texts, steps=4, seed=1)
    unit = F.normalize(rows, dim=1)

    number = {token: place for place, token in enumerate(seen)}
    stems = np.array([number.get(token, -1) for token in range(size)])
    texts_of = np.array([sum(token in ids for ids in read) for token in seen])
    begun = WordTable(tokenizer, stems, unit[seen], idf_weights(texts_of, len(texts)))
    trained = train_table(begun, texts, steps=4, seed=1)
    torch.testing.assert_close(found[seen], trained.rows_SD * trained.weight_S[:, None])
    others = sorted(set(range(size)) - set(seen) - {3})
    kept = torch.cat([unit[others]] * 2, dim=1) * begun.weight_S.max()
    torch.testing.assert_close(found[others], kept)
    assert others and not found[3].any()
    assert train_pieces(tokenizer, rows, texts, steps=0) is rows
