"""Training a table of words: the loss against a loop, what stays, and what is found after it."""

from __future__ import annotations

from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from revela.text.analyzer import Analyzer
from revela.training import word_table as training
from revela.training.retriever.static_from_words import WordTable, build_word_table, idf_weights
from revela.training.word_table import (
    Examples,
    batches_of,
    crops,
    table_loss,
    train_pieces,
    train_table,
)
from revela.types import Chunk, Document


def texts_of_topics(n=120, seed=0):
    """Texts of 24 words of one of four topics; topics share no words."""
    rng = np.random.default_rng(seed)
    return [" ".join(f"t{i % 4}w{w}" for w in rng.integers(0, 30, 24)) for i in range(n)]


@pytest.fixture(scope="module")
def table(tiny_lm_folder):
    return build_word_table(tiny_lm_folder, texts_of_topics(), Analyzer("none"))


def test_the_loss_is_that_of_a_loop():
    torch.manual_seed(0)
    query, passage = F.normalize(torch.randn(2, 3, 4).double(), dim=-1)
    allowed = torch.tensor([[1, 1, 1], [0, 1, 1], [1, 0, 1]]).bool()
    loss = 0.0
    for tau in training.TAUS:
        for i in range(3):
            scores = [F.cosine_similarity(query[i], p, dim=0) / tau for p in passage]
            compared = torch.stack([s for j, s in enumerate(scores) if allowed[i, j]])
            loss = loss - (scores[i] - compared.logsumexp(0)) / 3 / len(training.TAUS)
    assert torch.allclose(table_loss(query, passage, allowed), loss)


@pytest.mark.parametrize(("authored", "in_a_batch"), [(0, 0), (2, 2), (10, 4), (50, 4)])
def test_half_of_a_batch_is_authored_where_there_is_enough(authored, in_a_batch):
    texts = [np.arange(10) + 100 * i for i in range(8)]
    pairs = [(i // 2, np.array([9000 + i // 2]), np.array([9500 + i])) for i in range(authored)]
    batches = batches_of(texts, pairs, seed=0)
    for batch in (next(batches) for _ in range(5)):
        assert len(batch.queries) == len(batch.passages) == 8
        titles = [int(q[0]) if q[0] >= 9000 else -i for i, q in enumerate(batch.queries)]
        assert sum(title >= 9000 for title in titles) == in_a_batch
        for i, j in np.ndindex(8, 8):
            assert batch.allowed_BB[i, j] == (i == j or titles[i] != titles[j])
            if i == j and titles[i] >= 9000:
                assert (batch.passages[j][0] - 9500) // 2 == titles[i] - 9000


def test_titles_learn_which_words_their_texts_have(table):
    texts = texts_of_topics()
    authored = [Chunk(i, text, f"t{(i + 1) % 4}w0") for i, text in enumerate(texts)]
    trained = train_table(table, Examples(texts, authored), steps=60)

    def nearer(of):  # a title to the words of the texts that it stands above
        stems = [next(of.stems([f"t{topic}w{i}"]))[0] for topic in range(4) for i in range(30)]
        unit = F.normalize(of.rows_SD[stems], dim=1).reshape(4, 30, -1)
        near = unit[:, 0] @ unit.mean(dim=1).T
        return float(near.roll(-1, 0).diagonal().mean() - near.mean())

    assert nearer(trained) > nearer(table) + 0.05


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
    trained = train_table(table, Examples(texts_of_topics()), steps=60)
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
    texts = Examples.of(documents).texts
    assert [len(text.split()) for text in texts] == [242, 242, 22, 1]
    assert all(text.startswith("A title w") for text in texts[:3]) and texts[3] == "Short."
    monkeypatch.setattr(training, "MAX_TEXTS", 3)
    assert Examples.of(documents).texts == [texts[0], texts[1], texts[3]]


def test_a_fit_without_a_lexical_half_makes_no_examples(monkeypatch):
    monkeypatch.setattr(training, "fit_to_corpus", lambda *_, **__: None)
    monkeypatch.setattr(Examples, "of", lambda *_: pytest.fail("the corpus was chunked"))
    training.fit_encoder(MagicMock(), MagicMock())


def test_titles_and_docstrings_are_queries_of_their_texts():
    code = "def area(r):\n    'The area of a circle.'\n    return 3.14 * r ** 2"
    documents = [
        Document("a", "Bees dance. Bees fly.", "Bees"),
        Document("b", "No title."),
        Document("c", code, kind="code"),
    ]
    authored = [(c.query, c.text) for c in Examples.of(documents).authored]
    body = "def area(r):\n    return 3.14 * r ** 2"
    assert authored == [("Bees", " dance. Bees fly."), ("The area of a circle.", body)]


def test_the_same_seed_gives_the_same_table_and_no_steps_the_one_before(table):
    examples = Examples(texts_of_topics(), [Chunk(0, "t0w1 t0w2", "t0w3")] * 9)
    first, again, other = (train_table(table, examples, steps=3, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.rows_SD, again.rows_SD)
    assert not torch.equal(first.rows_SD, other.rows_SD)
    assert train_table(table, examples, steps=0) is table
    assert train_table(table, Examples(["too few words", "t0w1"])) is table


def test_tokens_of_an_lm_learn_as_words_do_and_those_of_no_text_keep_their_rows(tiny_lm_folder):
    tokenizer = Tokenizer.from_file(str(tiny_lm_folder / "tokenizer.json"))
    texts, size = texts_of_topics(), tokenizer.get_vocab_size()
    rows = torch.randn(size, 8, generator=torch.Generator().manual_seed(0))
    rows[3] = 0  # does not count
    read = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    seen = sorted({i for ids in read for i in ids} - {3})
    found = train_pieces(tokenizer, rows, Examples(texts), steps=4, seed=1)
    unit = F.normalize(rows, dim=1)

    number = {token: place for place, token in enumerate(seen)}
    stems = np.array([number.get(token, -1) for token in range(size)])
    texts_of = np.array([sum(token in ids for ids in read) for token in seen])
    begun = WordTable(tokenizer, stems, unit[seen], idf_weights(texts_of, len(texts)))
    trained = train_table(begun, Examples(texts), steps=4, seed=1)
    torch.testing.assert_close(found[seen], trained.rows_SD * trained.weight_S[:, None])
    others = sorted(set(range(size)) - set(seen) - {3})
    kept = torch.cat([unit[others]] * 2, dim=1) * begun.weight_S.max()
    torch.testing.assert_close(found[others], kept)
    assert others and not found[3].any()
    assert train_pieces(tokenizer, rows, Examples(texts), steps=0) is rows
