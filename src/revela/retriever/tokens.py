"""Texts in a model's own tokens: where each token begins and ends, so that a text can be cut before
the model truncates it, and how many there are (``TokenCounter``, for the server's limits).
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sentence_transformers import SentenceTransformer

from revela.corpus.words import in_parts
from revela.errors import RevelaError
from revela.retriever.encode import passage_prompt_of, query_prompt_of
from revela.retriever.slots import read_as_text, slot_ids

Spans = list[tuple[int, int]]


@dataclass(frozen=True)
class TokenWindow:
    """A model's tokenizer, and how many tokens of a text the model reads: ``size``.

    Prompts and special tokens are already subtracted from ``size``.
    """

    tokenizer: Any
    size: int

    def spans(self, texts: Sequence[str]) -> list[Spans]:
        """Start and end of each token of each text, in characters."""
        if not texts:
            return []
        found: list[Spans] = self.tokenizer(
            list(texts), add_special_tokens=False, return_offsets_mapping=True
        )["offset_mapping"]
        return found


def token_window(model: SentenceTransformer, name: str, max_tokens: int) -> TokenWindow:
    """The window of a retriever: ``max_tokens``, or the model's own limit if that is lower.

    Raises:
        RevelaError: its tokenizer does not give character offsets.
    """
    tokenizer: Any = getattr(model, "tokenizer", None)
    if not getattr(tokenizer, "is_fast", False):
        raise RevelaError(
            f"{name} has no fast tokenizer of transformers, so tokens have no character offsets: "
            "probe another model"
        )
    wanted = max_tokens + len(slot_ids(model))  # slots do not count as text
    limit = min(wanted, model.max_seq_length or wanted)
    prompts = (query_prompt_of(model), passage_prompt_of(model))
    return TokenWindow(tokenizer, limit - max(len(tokenizer(p)["input_ids"]) for p in prompts))


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
        self._has_slots = bool(slot_ids(model))

    def count_queries(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text as a query, with prompt and special tokens, before truncation."""
        return self._count(self._query_prompt, texts)

    def count_passages(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text as a passage, with prompt and special tokens, before truncation."""
        return self._count(self._passage_prompt, texts)

    def fitted(
        self, heads: Sequence[str], texts: Sequence[str], limit: int, part: int = 1
    ) -> list[list[str]]:
        """``LimitedEncoder.fitted``, for an encoder that reads ``limit`` tokens."""
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
        cut = [piece for piece in in_parts(text, max(2, parts)) if piece]
        if len(cut) < 2:  # one character
            return [text]
        counts = self.count_passages([head + piece for piece in cut])
        return [
            fitting
            for piece, count in zip(cut, counts, strict=True)
            for fitting in (self._cut(head, piece, count, limit) if count > limit else [piece])
        ]

    def _count(self, prompt: str, texts: Sequence[str]) -> list[int]:
        texts = read_as_text(texts) if self._has_slots else texts
        encodings = self._tokenizer.encode_batch_fast([prompt + text for text in texts])
        return [len(encoding) for encoding in encodings]


def halves(
    texts: Sequence[str],
    tokenizer: Any,
    max_tokens: int,
    draws: Sequence[random.Random] | None = None,
) -> list[str]:
    """Each text up to the middle of its tokens, after truncation to ``max_tokens``; with ``draws``,
    as many tokens in one piece, from any place on.
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
