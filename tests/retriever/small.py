"""A small retriever and its fit, for the tests beside this."""

from __future__ import annotations

from revela.retriever.build import build_retriever
from revela.retriever.fit import fit_to_corpus
from revela.settings import Fit


def build(folder, pooling="mean", **changes):
    """An untrained retriever of two layers."""
    settings = dict(
        layers=2,
        pooling=pooling,
        max_tokens=32,
        lower_case=False,
        query_prompt="query: ",
        passage_prompt="passage: ",
    )
    return build_retriever(folder, **(settings | changes))


def fit(model, texts, **settings):
    """Fit it, with everything off that is not asked for."""
    off = dict(token_weighting=0.0, whitening=0.0, lexical=0.0)
    fit_to_corpus(model, texts, Fit(**(off | settings)))
