"""Character offsets of the tokens of a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from revela.errors import RevelaError
from revela.training.retriever.module import RetrieverModule


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
            f"{name} has no fast tokenizer of transformers, so tokens have no character offsets: "
            "probe another model"
        )
    prompts = (len(tokenizer(prompt)["input_ids"]) for prompt in retriever.prompts)
    return TokenWindow(tokenizer, limit - max(prompts))
