"""A small retriever and its fit, for the tests beside this."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers

from conftest import tiny_retriever
from revela.training.retriever.fit import fit_to_corpus
from revela.training.retriever.module import RetrieverModule
from revela.training.settings import Fit


def build(folder, pooling="mean", **changes):
    """An untrained retriever of two layers that reads 32 tokens."""
    return tiny_retriever(folder, **{"pooling": pooling, "max_tokens": 32, **changes})


def fit(model, texts, **settings):
    """Fit it, with everything off that is not asked for."""
    off = dict(token_weighting=0.0, whitening=0.0, lexical=0.0)
    fit_to_corpus(RetrieverModule(model), texts, Fit(**(off | settings)))


def tokenizer_of(words, limit=None):
    """Splits text into these words, of which the first stands for others."""
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, words[0]))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    if limit:
        made.enable_truncation(limit)
    return made
