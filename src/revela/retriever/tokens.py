"""Texts in a model's own tokens: their spans (``TokenWindow``, ``halves``) and their number
(``TokenCounter``), so that a text can be cut before the model truncates it.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from revela.corpus.words import split_evenly
from revela.errors import RevelaError

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

Spans = list[tuple[int, int]]


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


def token_window(model: SentenceTransformer, name: str, max_tokens: int) -> TokenWindow:
    """The window of a retriever: ``max_tokens``, or the model's own limit if that is lower."""
    from revela.retriever.context import slot_ids
    from revela.retriever.encode import passage_prompt_of, query_prompt_of

    tokenizer: Any = getattr(model, "tokenizer", None)
    if not getattr(tokenizer, "is_fast", False):
        raise RevelaError(
            f"{name} has no fast tokenizer of transformers, so tokens have no character offsets: "
            "probe another model"
        )
    limit = max_tokens + len(slot_ids(model))  # slots do not count as text
    limit = min(limit, model.max_seq_length or limit)
    prompts = (query_prompt_of(model), passage_prompt_of(model))
    return TokenWindow(tokenizer, limit - max(len(tokenizer(p)["input_ids"]) for p in prompts))


class TokenCounter:
    """Counts tokens as a model reads them, with its prompts.

    It copies the tokenizer, as the model's own changes truncation and padding at every call, which
    is not safe beside another thread. ``limit`` is the maximum that the model reads; ``as_text`` is
    applied to texts first.
    """

    def __init__(
        self,
        tokenizer: Any,
        query_prompt: str = "",
        passage_prompt: str = "",
        limit: int | None = None,
        special_tokens: bool = True,
        as_text: Callable[[Sequence[str]], Sequence[str]] = list,
    ) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._query_prompt, self._passage_prompt, self.limit = query_prompt, passage_prompt, limit
        self._special_tokens, self._as_text = special_tokens, as_text

    @classmethod
    def of(cls, model: SentenceTransformer) -> TokenCounter:
        """The counter of a Sentence-Transformers model."""
        from revela.retriever.context import read_as_text, slot_ids
        from revela.retriever.encode import passage_prompt_of, query_prompt_of, token_limit

        tokenizer = getattr(model.tokenizer, "backend_tokenizer", model.tokenizer)
        prompts = query_prompt_of(model), passage_prompt_of(model)
        as_text = read_as_text if slot_ids(model) else list
        return cls(tokenizer, *prompts, token_limit(model), as_text=as_text)

    def count_queries(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each query, with prompt and special tokens, before truncation."""
        return self._count(self._query_prompt, texts)

    def count_passages(self, texts: Sequence[str]) -> list[int]:
        """``count_queries``, but of passages."""
        return self._count(self._passage_prompt, texts)

    def fitted(
        self, heads: Sequence[str], texts: Sequence[str], limit: int | None, part: int = 1
    ) -> list[list[str]]:
        """``LimitedEncoder.fitted``, for an encoder that reads ``limit`` tokens; None: all."""
        if limit is None:
            return [[text] for text in texts]
        empty = self.count_passages([""])[0]
        spare = (limit - empty) // part
        limit = empty + spare
        # A token has a byte at least, so that short texts need not be tokenized.
        both = [head + text for head, text in zip(heads, texts, strict=True)]
        unsure = [i for i, text in enumerate(both) if len(text.encode()) > spare]
        pieces = [[text] for text in texts]
        for i, tokens in zip(unsure, self.count_passages([both[i] for i in unsure]), strict=True):
            if tokens > limit:
                pieces[i] = self._cut(heads[i], texts[i], tokens, limit)
        return pieces

    def _cut(self, head: str, text: str, tokens: int, limit: int) -> list[str]:
        """A text of so many tokens, with its head, in pieces that fit."""
        of_head = self.count_passages([head])[0]
        parts = math.ceil((tokens - of_head) / max(1, limit - of_head))
        cut = [piece for piece in split_evenly(text, max(2, parts)) if piece]
        if len(cut) < 2:  # one character
            return [text]
        counts = self.count_passages([head + piece for piece in cut])
        return [
            fitting
            for piece, count in zip(cut, counts, strict=True)
            for fitting in (self._cut(head, piece, count, limit) if count > limit else [piece])
        ]

    def _count(self, prompt: str, texts: Sequence[str]) -> list[int]:
        prompted = [prompt + text for text in self._as_text(texts)]
        special = self._special_tokens
        read = self._tokenizer.encode_batch_fast(prompted, add_special_tokens=special)
        return [len(encoding) for encoding in read]


def halves(
    texts: Sequence[str],
    tokenizer: Any,
    max_tokens: int,
    draws: Sequence[random.Random] | None = None,
) -> list[str]:
    """The first half of each text's tokens, after truncation to ``max_tokens``; with ``draws``, as
    many from any place on.
    """
    tokens = tokenizer(
        list(texts),
        add_special_tokens=False,
        return_offsets_mapping=True,
        truncation=True,
        max_length=max_tokens,
    )
    found = []
    for i, (text, spans) in enumerate(zip(texts, tokens["offset_mapping"], strict=True)):
        if not (length := len(spans) // 2):
            found.append(text)
        elif draws is None:
            found.append(text[: spans[length - 1][1]])
        else:
            start = draws[i].randint(0, len(spans) - length)
            found.append(text[spans[start][0] : spans[start + length - 1][1]])
    return found
