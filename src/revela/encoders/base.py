"""What all encoders share: texts in, finite unit vectors out, with the prompt of each role.

Shapes: N texts, B texts of a batch, D width of a vector; T tokens of a text without prompt and
special tokens, W width of a token's vector.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from tqdm import tqdm

from revela.encoders.prompts import Prompts
from revela.encoders.token_counter import Spans, TokenCounter
from revela.errors import RevelaError
from revela.terminal import SHOWN_AFTER
from revela.types import QueryTokens, Vectors, check_vectors_finite, sequence_of

Role = Literal["query", "passage"]
Tokens = tuple[Vectors, Spans]
"""The vectors of a text's tokens, (T, W), and the span of each in prompt + text."""


class Encoded(NamedTuple):
    """The result of a batch: the texts' numbers, their vectors (B, D), and their tokens, if they
    were requested.
    """

    rows: Sequence[int]
    vectors_BD: Vectors
    tokens: Sequence[Tokens] = ()


class TextEncoder(ABC):
    """A ``TokenEncoder``; a subclass only has to encode batches.

    Threads may share an encoder.

    Attributes:
        name: of the model, for messages.
        prompts: prefixes of queries and of passages.
        limit: texts are truncated to this number of tokens, prompt and special tokens included;
            None: not at all.
        words_to_vectors: see ``words_to_vectors_of``.
        precision: "int8", "bf16" or "fp32".
    """

    name = "the model"
    prompts = Prompts()
    limit: int | None = None
    words_to_vectors = 1.0
    precision = "fp32"

    @abstractmethod
    def batches(self, texts: Sequence[str], role: Role, with_tokens: bool) -> Iterator[Encoded]:
        """Encode texts in batches of any order.

        Raises:
            QueryError: the model has no token vectors, and they were requested.
        """

    @property
    @abstractmethod
    def dimension(self) -> int:
        """D."""

    @property
    @abstractmethod
    def tokenizer(self) -> Any:
        """A tokenizer of the ``tokenizers`` library."""

    def encode_queries(self, texts: Sequence[str], progress: bool = False) -> Vectors:
        """Encode queries, (N, D) float32. Raises RevelaError for infinity and NaN."""
        return self._encode(texts, "query", progress)

    def encode_passages(self, texts: Sequence[str], progress: bool = False) -> Vectors:
        """``encode_queries``, but for passages."""
        return self._encode(texts, "passage", progress)

    def encode_with_tokens(
        self, texts: Sequence[str], progress: bool = False
    ) -> tuple[Vectors, list[Vectors]]:
        """``encode_passages``, and each passage's unit token vectors, (T, W) float32.

        Token vectors are the states of the transformer's last layer, without prompts and special
        tokens, after the linear layer that follows the pooling, if there is one.
        """
        tokens = list[Tokens]()
        vectors_ND = self._encode(texts, "passage", progress, tokens)
        return vectors_ND, [vectors_TW for vectors_TW, _ in tokens]

    def query_tokens(self, queries: Sequence[str]) -> list[QueryTokens]:
        """``encode_queries``, and the queries' token vectors, from the same pass."""
        tokens, begin = list[Tokens](), len(self.prompts.query)
        vectors_ND = self._encode(queries, "query", False, tokens)
        return [
            QueryTokens(vector_D, vectors_TW, [(max(0, a - begin), b - begin) for a, b in spans])
            for vector_D, (vectors_TW, spans) in zip(vectors_ND, tokens, strict=True)
        ]

    def fitted(self, heads: Sequence[str], texts: Sequence[str], part: int = 1) -> list[list[str]]:
        """``LimitedEncoder.fitted``."""
        return self.counter.fitted(heads, texts, self.limit, part)

    @functools.cached_property
    def counter(self) -> TokenCounter:
        """Counts tokens as this encoder reads them."""
        return TokenCounter(self.tokenizer, *self.prompts, self.limit, as_text=self.as_text)

    def as_text(self, texts: Sequence[str]) -> Sequence[str]:
        """The texts, with what the model would read as something else broken up."""
        return texts

    def prompted(self, text: str, role: Role) -> str:
        """A text as the model reads it. An empty one becomes a full stop, as it would have no
        token to pool.
        """
        return self._prompt(role) + (text if text.strip() else ".")

    def prompt_length(self, role: Role) -> int:
        """The tokens of a role's prompt; the space at its end belongs to the text."""
        return len(self.tokenizer.encode(self._prompt(role).rstrip(), add_special_tokens=False))

    def _prompt(self, role: Role) -> str:
        return self.prompts.query if role == "query" else self.prompts.passage

    def _encode(
        self, texts: Sequence[str], role: Role, progress: bool, tokens: list[Tokens] | None = None
    ) -> Vectors:
        """The texts' vectors (N, D); adds their tokens to ``tokens``."""
        texts = sequence_of(texts)
        vectors_ND = np.empty((len(texts), self.dimension), np.float32)
        found: dict[int, Tokens] = {}
        how: dict[str, Any] = dict(total=len(texts), unit="text", disable=not progress)
        with tqdm(**how, delay=SHOWN_AFTER, leave=False) as bar:
            for rows, vectors_BD, of_batch in self.batches(texts, role, tokens is not None):
                vectors_ND[rows] = vectors_BD
                found.update(zip(rows, of_batch, strict=False))
                bar.update(len(rows))
        if tokens is not None:
            tokens += (found[i] for i in range(len(texts)))
        check_vectors_finite(vectors_ND, self.name)
        return vectors_ND


def truncate(tokenizer: Any, max_tokens: int | None, side: str = "") -> None:
    """Set the truncation of a tokenizer of the ``tokenizers`` library: the maximum of tokens (None:
    do not truncate), and the side that is dropped ("": as before).
    """
    side = side or (tokenizer.truncation or {}).get("direction", "right")
    if max_tokens is None:
        tokenizer.no_truncation()
    else:
        tokenizer.enable_truncation(max_tokens, direction=side)


def check_max_tokens(given: int, most: int | None, name: str) -> None:
    """Raise RevelaError for a number of tokens that a model cannot read of a text; ``most`` is its
    maximum, None for no limit.
    """
    if not 1 <= given <= (most or given):
        limit = f" and at most {most:,}, which {name} reads" if most else ""
        raise RevelaError(f"--max-tokens {given}: give at least 1{limit}")
