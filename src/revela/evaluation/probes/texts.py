"""The texts of a probe: all fill the model's window, so that truncation is not taken for bias."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from revela.corpus.words import count_words, words
from revela.errors import RevelaError
from revela.evaluation.probes.profile import PLACES
from revela.types import Document

if TYPE_CHECKING:
    from revela.retriever.tokens import TokenWindow

log = logging.getLogger(__name__)

SPARE = 8  # tokens left free, as reordered parts may take a few more
LEAST_WORDS = 2  # per part
ENOUGH = 30  # documents for a mean by place and its interval
TOKENIZED = 64  # documents per call of the tokenizer


def long_texts(
    documents: Sequence[Document], window: TokenWindow, count: int, seed: int
) -> list[str]:
    """A sample of documents (without titles) that fill the window, cut to it between words: so many
    of them, or at least ``ENOUGH`` if there are no more.
    """
    tokens = window.size - SPARE
    if tokens < PLACES * LEAST_WORDS:
        raise RevelaError(
            f"{window.size} tokens are too few to be cut in {PLACES} parts: raise --max-tokens"
        )
    found: list[str] = []
    order = random.Random(seed).sample(range(len(documents)), len(documents))
    for start in range(0, len(order), TOKENIZED):
        texts = [documents[i].text for i in order[start : start + TOKENIZED]]
        # A token has at least one character, so shorter texts need not be tokenized.
        texts = [text for text in texts if len(text) >= tokens]
        cut = [
            between_words(text, spans[tokens - 1][1])
            for text, spans in zip(texts, window.spans(texts) if texts else [], strict=True)
            if len(spans) >= tokens
        ]
        found += [text for text in cut if count_words(text) >= PLACES * LEAST_WORDS]
        if len(found) >= count:
            return found[:count]
    few = (
        f"only {len(found):,} of {len(documents):,} documents are long enough for {PLACES} parts "
        f"of {tokens} tokens in all"
    )
    if len(found) < ENOUGH:
        raise RevelaError(
            f"{few}, and {min(count, ENOUGH)} are needed: lower --max-tokens or --documents"
        )
    log.info(f"{few}: all of them are taken, in place of {count:,}")
    return found


def between_words(text: str, end: int) -> str:
    """The text up to ``end``, without a word that ``end`` would cut, unless it is the only one."""
    if end < len(text) and not text[end].isspace():
        last = words(text[: end + 1])[-1]
        return text[: end + 1 - len(last)] or text[:end]
    return text[:end]
