"""Shared parts of the probes by place: texts that fill the model's window, so that truncation is
not mistaken for bias, and the profile of a score at ten places of a text.

Intervals of slope and drop are percentiles of means over resampled documents, not rows, as rows
about one document are correlated; there are none if all are about one document. The interval of a
place is computed from scores minus the mean of their row, as rows differ in level.

Shapes: N rows (documents or queries), P places, O documents (owners of rows), R resamples.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from revela.errors import RevelaError
from revela.text.words import count_words, words
from revela.training.retriever.module import RetrieverModule
from revela.types import Document

log = logging.getLogger(__name__)

PLACES = 10
SEGMENT_TENTHS = [place + 0.5 for place in range(PLACES)]  # the middle of each of ten parts
RESAMPLES, SEED = 2000, 0
TAILS = (2.5, 97.5)  # percentiles
SPARE = 8  # tokens of the window left free, as reordered parts may have a few more
MIN_WORDS = 2  # per part
MIN_DOCUMENTS = 30  # for means by place and their intervals
BATCH = 64  # documents per call of the tokenizer

Scores = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A value, and the bounds of its 95 % interval; NaN, in files null, if one document gave it."""

    value: float
    low: float = nan
    high: float = nan


@dataclass(frozen=True)
class Profile:
    """Mean scores at ten places of a text.

    Attributes:
        tenths: the places, in tenths of the text.
        places: the mean score at each place.
        slope: least-squares change of the score per tenth; negative favours the beginning.
        drop: score at the first place minus the score at the last.
        first_wins: share of rows that score higher at the first place than at the last (a tie
            counts half).
        rows: number of queries, or of documents if these are scored.
        documents: number of documents.
        unmoved: the mean score with texts as they are, where something is moved.
    """

    tenths: list[float]
    places: list[Interval]
    slope: Interval
    drop: Interval
    first_wins: Interval
    rows: int = 0
    documents: int = 0
    unmoved: float | None = None


@dataclass(frozen=True)
class TokenWindow:
    """A model's tokenizer, and the tokens that it reads besides prompts and special tokens."""

    tokenizer: Any
    size: int

    def spans(self, texts: Sequence[str]) -> list[list[tuple[int, int]]]:
        """Start and end of each token of each text, in characters."""
        found: list[list[tuple[int, int]]] = self.tokenizer(
            list(texts), add_special_tokens=False, return_offsets_mapping=True
        )["offset_mapping"]
        return found


def token_window(retriever: RetrieverModule, name: str) -> TokenWindow:
    """The window of a retriever: its limit less the longest prompt."""
    tokenizer, limit = retriever.tokenizer, retriever.limit
    if not getattr(tokenizer, "is_fast", False) or limit is None:
        raise RevelaError(
            f"{name} has no fast tokenizer, which gives character offsets: probe another model"
        )
    prompts = (len(tokenizer(prompt)["input_ids"]) for prompt in retriever.prompts)
    return TokenWindow(tokenizer, limit - max(prompts))


def long_texts(
    documents: Sequence[Document], window: TokenWindow, count: int, seed: int
) -> list[str]:
    """A sample of ``count`` documents that fill the window, without titles, cut to it between
    words. If fewer do, all of them; RevelaError if fewer than ``MIN_DOCUMENTS``.
    """
    tokens = window.size - SPARE
    if tokens < PLACES * MIN_WORDS:
        raise RevelaError(
            f"{window.size} tokens are too few to be cut in {PLACES} parts: raise --max-tokens"
        )
    long: list[str] = []
    order = random.Random(seed).sample(range(len(documents)), len(documents))
    for start in range(0, len(order), BATCH):
        texts = [documents[i].text for i in order[start : start + BATCH]]
        # A token has at least one character, so shorter texts need not be tokenized.
        texts = [text for text in texts if len(text) >= tokens]
        cut = [
            between_words(text, spans[tokens - 1][1])
            for text, spans in zip(texts, window.spans(texts) if texts else [], strict=True)
            if len(spans) >= tokens
        ]
        long += [text for text in cut if count_words(text) >= PLACES * MIN_WORDS]
        if len(long) >= count:
            return long[:count]
    few = (
        f"only {len(long):,} of {len(documents):,} documents are long enough for {PLACES} parts "
        f"of {tokens} tokens in all"
    )
    if len(long) < MIN_DOCUMENTS:
        raise RevelaError(
            f"{few}, and {min(count, MIN_DOCUMENTS)} are needed: lower --max-tokens or --documents"
        )
    log.info(f"{few}: all of them are taken, in place of {count:,}")
    return long


def between_words(text: str, end: int) -> str:
    """The text up to ``end``, without a word that ``end`` would cut, unless it is the only one."""
    if end < len(text) and not text[end].isspace():
        last = words(text[: end + 1])[-1]
        return text[: end + 1 - len(last)] or text[:end]
    return text[:end]


def profile(
    scores_NP: Scores, tenths: Sequence[float], owners: Sequence[int] | None = None
) -> Profile:
    """Summarise scores at the places ``tenths``; ``owners``, (N,), is the document of each row, by
    default one per row.
    """
    owners = range(len(scores_NP)) if owners is None else owners
    drop_N, mean = scores_NP[:, 0] - scores_NP[:, -1], float(scores_NP.mean())
    within_NP = scores_NP - scores_NP.mean(axis=1, keepdims=True)
    centred_P = np.asarray(tenths) - np.mean(tenths)
    slope_N = scores_NP @ (centred_P / (centred_P**2).sum())  # least squares
    columns_NX = np.column_stack([within_NP, slope_N, drop_N, (np.sign(drop_N) + 1) / 2])
    documents = len(set(owners))
    if documents == 1:
        log.warning("all scores are about one document: they have no intervals")
    *differences, slope, drop, first_wins = intervals(columns_NX, owners)
    places = [Interval(mean + d.value, mean + d.low, mean + d.high) for d in differences]
    return Profile(list(tenths), places, slope, drop, first_wins, len(scores_NP), documents)


def intervals(columns_NX: Scores, owners: Sequence[int]) -> list[Interval]:
    """The mean of each column, with its percentile bootstrap interval over several documents."""
    _, owner_N = np.unique(owners, return_inverse=True)
    count, means_X = int(owner_N.max()) + 1, columns_NX.mean(axis=0)
    if count == 1:
        return [Interval(float(value)) for value in means_X]
    sizes_O = np.bincount(owner_N, minlength=count)
    sums_OX = np.zeros((count, columns_NX.shape[1]))
    np.add.at(sums_OX, owner_N, columns_NX)
    rng = np.random.default_rng(SEED)
    drawn_RO = rng.multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    means_RX = (drawn_RO @ sums_OX) / (drawn_RO @ sizes_O)[:, None]
    low_X, high_X = np.percentile(means_RX, TAILS, axis=0)
    return [Interval(*map(float, values)) for values in zip(means_X, low_X, high_X, strict=True)]
