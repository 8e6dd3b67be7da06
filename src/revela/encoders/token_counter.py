"""Count a text's tokens as a model reads them, to cut the text before the model truncates it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

from revela.encoders.prompts import Prompts
from revela.text.words import split_evenly


def special_tokens_of(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids that a transformers tokenizer puts before and after a text."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    ids = tokenizer("a")["input_ids"]
    first = ids.index(plain[0])
    return ids[:first], ids[first + len(plain) :]


class TokenCounter:
    """Counts tokens as a model reads them, with its prompts.

    It copies the tokenizer: the model changes truncation and padding at every call, which is not
    thread-safe.

    Args:
        limit: maximum tokens of a text for the model.
        special_tokens: whether it reads special tokens around a text.
        as_text: applied to texts first.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompts: Prompts,
        limit: int | None,
        special_tokens: bool,
        as_text: Callable[[Sequence[str]], Sequence[str]],
    ) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._prompts, self.limit = prompts, limit
        self._special_tokens, self._as_text = special_tokens, as_text

    def count_queries(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each query, with prompt and special tokens, before truncation."""
        return self._count(self._prompts.query, texts)

    def count_passages(self, texts: Sequence[str]) -> list[int]:
        """``count_queries``, but for passages."""
        return self._count(self._prompts.passage, texts)

    def fitted(
        self, heads: Sequence[str], texts: Sequence[str], limit: int, part: int = 1
    ) -> list[list[str]]:
        """``TextEncoder.fitted``, for an encoder that reads ``limit`` tokens."""
        empty = self.count_passages([""])[0]
        spare = (limit - empty) // part
        limit = empty + spare
        # A token has at least one byte, so short texts need not be tokenized.
        both = [head + text for head, text in zip(heads, texts, strict=True)]
        unsure = [i for i, text in enumerate(both) if len(text.encode()) > spare]
        pieces = [[text] for text in texts]
        for i, tokens in zip(unsure, self.count_passages([both[i] for i in unsure]), strict=True):
            if tokens > limit:
                pieces[i] = self._cut(heads[i], texts[i], tokens, limit)
        return pieces

    def _cut(self, head: str, text: str, tokens: int, limit: int) -> list[str]:
        """Cut a text into pieces that fit; ``tokens`` counts the text with its head."""
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
