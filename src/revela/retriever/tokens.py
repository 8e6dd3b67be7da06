"""Texts in a model's own tokens: where each token begins and ends, so that a text can be cut before
the model truncates it, and how many there are (``TokenCounter``, for the server's limits).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sentence_transformers import SentenceTransformer

from revela.errors import RevelaError
from revela.retriever.encode import passage_prompt_of, query_prompt_of

Spans = list[tuple[int, int]]


@dataclass(frozen=True)
class Ruler:
    """A tokenizer, and how many tokens of a text the model reads beside prompt and special tokens."""

    tokenizer: Any
    room: int

    def spans(self, texts: Sequence[str]) -> list[Spans]:
        """Where each token of each text begins and ends, in characters."""
        if not texts:
            return []
        found: list[Spans] = self.tokenizer(
            list(texts), add_special_tokens=False, return_offsets_mapping=True
        )["offset_mapping"]
        return found


def ruler_of(model: SentenceTransformer, name: str, max_tokens: int) -> Ruler:
    """The ruler of a retriever that reads ``max_tokens`` of a text, or fewer if it cannot read so
    many.

    Raises:
        RevelaError: its tokenizer does not tell where in a text its tokens are.
    """
    tokenizer: Any = getattr(model, "tokenizer", None)
    if not getattr(tokenizer, "is_fast", False):
        raise RevelaError(
            f"{name} has no fast tokenizer of transformers, which tells where in a text its tokens are: probe another model"
        )
    limit = min(max_tokens, model.max_seq_length or max_tokens)
    prompts = [
        tokenizer(prompt)["input_ids"]
        for prompt in (query_prompt_of(model), passage_prompt_of(model))
    ]
    return Ruler(tokenizer, limit - max(map(len, prompts)))


class TokenCounter:
    """Counts tokens as a model reads them, with its prompts, by a tokenizer of its own.

    It is a copy that neither truncates nor pads: the model's own changes both at every call, which
    is not safe beside another thread.

    Attributes:
        limit: tokens that the model reads of a text; what follows is truncated. None: no limit.
    """

    def __init__(self, model: SentenceTransformer) -> None:
        tokenizer = copy.deepcopy(getattr(model.tokenizer, "backend_tokenizer", model.tokenizer))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._query_prompt, self._passage_prompt = query_prompt_of(model), passage_prompt_of(model)
        self.limit: int | None = model.max_seq_length

    def count_queries(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text as a query, with prompt and special tokens, before truncation."""
        return self._count(self._query_prompt, texts)

    def count_passages(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text as a passage, with prompt and special tokens, before truncation."""
        return self._count(self._passage_prompt, texts)

    def _count(self, prompt: str, texts: Sequence[str]) -> list[int]:
        encodings = self._tokenizer.encode_batch_fast([prompt + text for text in texts])
        return [len(encoding.ids) for encoding in encodings]
