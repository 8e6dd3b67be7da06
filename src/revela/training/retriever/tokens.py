"""Character offsets of the tokens of a text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from revela.encoders.token_counter import Spans
from revela.errors import RevelaError
from revela.training.retriever.module import RetrieverModule


@dataclass(frozen=True)
class TokenWindow:
    """A model's tokenizer, and the tokens that it reads besides prompts and special tokens."""

    tokenizer: Any
    size: int

    def spans(self, texts: Sequence[str]) -> list[Spans]:
        """Start and end of each token of each text, in characters."""
        found: list[Spans] = self.tokenizer(
            list(texts), add_special_tokens=False, return_offsets_mapping=True
        )["offset_mapping"]
        return found


def token_window(retriever: RetrieverModule, name: str) -> TokenWindow:
    """The window of a retriever: its limit less the longest prompt."""
    tokenizer, limit = retriever.tokenizer, retriever.limit()
    if not getattr(tokenizer, "is_fast", False) or limit is None:
        raise RevelaError(
            f"{name} has no fast tokenizer of transformers, so tokens have no character offsets: "
            "probe another model"
        )
    prompts = retriever.prompt("query"), retriever.prompt("document")
    return TokenWindow(tokenizer, limit - max(len(tokenizer(p)["input_ids"]) for p in prompts))


def split_in_half(
    texts: Sequence[str],
    tokenizer: Any,
    max_tokens: int,
    draws: Sequence[random.Random] | None = None,
) -> list[str]:
    """The first half of each text's tokens, after truncation to ``max_tokens``; with ``draws``, a
    random span of that length.
    """
    found = []
    for i, spans in enumerate(TokenWindow(tokenizer, max_tokens).spans(texts)):
        text, tokens = texts[i], min(len(spans), max_tokens)
        length = tokens // 2
        start = draws[i].randint(0, tokens - length) if draws and length else 0
        begin = spans[start][0] if draws and length else 0
        found.append(text[begin : spans[start + length - 1][1]] if length else text)
    return found
