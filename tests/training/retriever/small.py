"""A small retriever and its fit, for the tests beside this."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers

from revela.training.retriever.build import build_retriever
from revela.training.retriever.fit import fit_to_corpus
from revela.training.retriever.module import RetrieverModule
from revela.training.settings import Fit, Retriever


def build(folder, pooling="mean", **changes):
    """An untrained retriever of two layers."""
    settings = dict(
        layers=2,
        pooling=pooling,
        max_tokens=32,
        lower_case="no",
        query_prompt="query: ",
        passage_prompt="passage: ",
    )
    return build_retriever(folder, Retriever(**(settings | changes)))


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
