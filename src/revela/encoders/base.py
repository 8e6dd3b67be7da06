"""The base class of encoders: texts in, finite vectors out, with the prompt of each role. Vectors
have length one, unless the model compares them by dot products.

A subclass encodes one batch; this module adds prompts, makes batches of texts of similar length,
restores the order of the texts and checks the vectors.

Shapes: N texts, B texts of a batch, L tokens of its longest, D width of a vector; T tokens of a
text without prompt and special tokens, W width of a token's vector.
"""

from __future__ import annotations

import copy
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from revela.encoders.model_files import name_of
from revela.encoders.prompts import Prompts
from revela.errors import QueryError, RevelaError
from revela.terminal import SHOWN_AFTER
from revela.text.words import split_evenly
from revela.types import QueryTokens, Role, Vectors, items_of

Features = dict[str, Any]
"""A model's inputs for a batch, by name: ``input_ids`` and ``attention_mask`` (B, L) of tokenized
texts, as arrays or tensors; or ``texts``."""
READ_AHEAD = 4096  # texts that are tokenized, and sorted by length, at once
TOKENS_AHEAD = 512 * READ_AHEAD  # their tokens, padding included
SLOT = "<|context-{}|>"
"The token of a context's slot (CDE); its row in the embedding table is a document's vector."
STEM = SLOT.partition("{}")[0]


class Encoded(NamedTuple):
    """Vectors of texts, and unit vectors of all their tokens if they were requested."""

    vectors_BD: Vectors
    tokens_BLW: Vectors | None = None


class TextEncoder(ABC):
    """Encodes texts; a subclass only has to encode a batch. Threads may share an encoder.

    Attributes:
        name: the model's name, for messages.
        prompts: prefixes of queries and of passages.
        limit: texts are truncated to this number of tokens, prompt and special tokens included;
            None: not at all.
        words_to_vectors: see ``words_to_vectors_of``.
        precision: "int8", "bf16" or "fp32".
        by_dot: whether vectors are compared by dot products, and have any length.
        slots: documents that the model reads as its context; 0: none.
        lacks_tokens: why the model has no token vectors; "" if it has them.
        blank: replaces a blank text, which has no token to pool; None: read it as it is.
        special_tokens: whether the model reads special tokens around a text.
        batch_tokens: the tokens of a batch, padding included.
    """

    name = "the model"
    prompts = Prompts()
    limit: int | None = None
    words_to_vectors = 1.0
    precision = "fp32"
    by_dot = False
    slots = 0
    lacks_tokens = ""
    blank: str | None = "."
    special_tokens = True
    batch_tokens = 4096

    @abstractmethod
    def encode_batch(self, features: Features, role: Role, with_tokens: bool) -> Encoded:
        """Encode the features of a batch."""

    def tokenize(self, texts: Sequence[str], role: Role) -> Features:
        """The features of texts, with the prompt of their role. Here they are the texts."""
        return {"texts": [self.prompt(role) + text for text in texts]}

    @property
    def tokenizer(self) -> Any:
        """A tokenizer of the ``tokenizers`` library."""
        raise NotImplementedError

    def encode_queries(self, texts: Iterable[str], progress: bool = False) -> Vectors:
        """Encode queries, (N, D) float32. Raises RevelaError if a number is NaN or infinite."""
        return self._encode(texts, "query", progress)

    def encode_passages(self, texts: Iterable[str], progress: bool = False) -> Vectors:
        """Encode passages, as ``encode_queries`` encodes queries."""
        return self._encode(texts, "passage", progress)

    def encode_with_tokens(self, texts: Sequence[str]) -> tuple[Vectors, list[Vectors]]:
        """The vectors of passages, and the unit vectors of each passage's tokens, (T, W) float32.

        Token vectors are the states of the transformer's last layer, without prompts and special
        tokens, after the linear layer that follows the pooling, if there is one.

        Raises:
            QueryError: the model has none.
        """
        tokens = list[Vectors]()
        return self._encode(texts, "passage", False, tokens), tokens

    def query_tokens(self, queries: Sequence[str]) -> list[QueryTokens]:
        """The vectors of queries and of their tokens, from one pass of the model."""
        tokens = list[Vectors]()
        vectors_ND = self._encode(queries, "query", False, tokens)
        prompt, skipped = self.prompts.query, self._prompt_length("query")
        read = self.tokenizer.encode_batch([prompt + text for text in self._readable(queries)])
        found = []
        for vector_D, tokens_TW, encoding in zip(vectors_ND, tokens, read, strict=True):
            places = np.flatnonzero(self._is_text(encoding.ids))[skipped:][: len(tokens_TW)]
            offsets = np.array(encoding.offsets)[places] - len(prompt)
            spans = [(max(0, start), end) for start, end in offsets.tolist()]
            found.append(QueryTokens(vector_D, tokens_TW, spans))
        return found

    def cut_to_fit(
        self, heads: Sequence[str], texts: Sequence[str], part: int = 1
    ) -> list[list[str]]:
        """Cut each passage into pieces that, with its head (a title), fit into 1 / ``part`` of the
        tokens that the model reads.
        """
        if self.limit is None:
            return [[text] for text in texts]
        (empty,) = self.count_tokens([""], "passage")
        spare = (self.limit - empty) // part
        # A token has at least one byte, so only texts with more bytes need to be tokenized.
        both = [head + text for head, text in zip(heads, texts, strict=True)]
        unsure = [i for i, text in enumerate(both) if len(text.encode()) > spare]
        pieces = [[text] for text in texts]
        counts = self.count_tokens([both[i] for i in unsure], "passage")
        for i, tokens in zip(unsure, counts, strict=True):
            if tokens > empty + spare:
                pieces[i] = self._cut(heads[i], texts[i], tokens, empty + spare)
        return pieces

    def _cut(self, head: str, text: str, tokens: int, limit: int) -> list[str]:
        """Cut a text into pieces that fit; ``tokens`` counts the text with its head."""
        (of_head,) = self.count_tokens([head], "passage")
        parts = math.ceil((tokens - of_head) / max(1, limit - of_head))
        cut = [piece for piece in split_evenly(text, max(2, parts)) if piece]
        if len(cut) < 2:  # one character
            return [text]
        counts = self.count_tokens([head + piece for piece in cut], "passage")
        return [
            fitting
            for piece, count in zip(cut, counts, strict=True)
            for fitting in (self._cut(head, piece, count, limit) if count > limit else [piece])
        ]

    def count_tokens(self, texts: Sequence[str], role: Role) -> list[int]:
        """The number of tokens of each text, with prompt and special tokens, before truncation."""
        read = [self.prompt(role) + text for text in self.as_text(texts)]
        counted = self._counting.encode_batch_fast(read, add_special_tokens=self.special_tokens)
        return [len(encoding) for encoding in counted]

    @functools.cached_property
    def _counting(self) -> Any:
        """A copy of the tokenizer that does not truncate."""
        tokenizer = copy.deepcopy(self.tokenizer)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def as_text(self, texts: Sequence[str]) -> Sequence[str]:
        """The texts; for a model with slots, ``without_slots``."""
        return without_slots(texts) if self.slots else texts

    def _readable(self, texts: Sequence[str]) -> Sequence[str]:
        """``as_text``, with ``blank`` in place of blank texts."""
        blank = self.blank
        return self.as_text(texts if blank is None else [t if t.strip() else blank for t in texts])

    def _encode(
        self, texts: Iterable[str], role: Role, progress: bool, tokens: list[Vectors] | None = None
    ) -> Vectors:
        """The vectors of the texts, (N, D); appends those of their tokens to ``tokens``."""
        if tokens is not None and self.lacks_tokens:
            raise QueryError(self.lacks_tokens)
        # A generator has no indices, and the labels of a data frame's column may not be indices.
        texts = texts if isinstance(texts, Sequence) else list(items_of(texts, "texts"))
        if not texts:
            return self._encode(["."], role, False)[:0]
        vectors_ND: Vectors | None = None
        found: dict[int, Vectors] = {}

        def read(texts: Sequence[str]) -> Features:
            return self.tokenize(self._readable(texts), role)

        what, total = f"encoding {'queries' if role == 'query' else 'passages'}", len(texts)
        with tqdm(
            None, what, total, False, unit="text", disable=not progress, delay=SHOWN_AFTER
        ) as shown:
            for rows, features in batches_by_length(texts, read, self.batch_tokens, self.limit):
                vectors_BD, tokens_BLW = self.encode_batch(features, role, tokens is not None)
                if vectors_ND is None:
                    vectors_ND = np.empty((len(texts), vectors_BD.shape[1]), np.float32)
                vectors_ND[rows] = vectors_BD
                if tokens_BLW is not None:
                    of_texts = self._tokens_of_texts(features, role, tokens_BLW)
                    found.update(zip(rows, of_texts, strict=True))
                shown.update(len(rows))
        assert vectors_ND is not None
        if tokens is not None:
            tokens += (found[i] for i in range(len(texts)))
        is_finite_N = np.isfinite(vectors_ND).all(axis=1)
        if not is_finite_N.all():
            raise RevelaError(
                f"{self.name} gives vectors that are not finite for {(~is_finite_N).sum():,} of "
                f"{len(texts):,} texts: its weights are broken"
            )
        return vectors_ND

    def _tokens_of_texts(
        self, features: Features, role: Role, tokens_BLW: Vectors
    ) -> Iterator[Vectors]:
        """The token vectors of each text, (T, W), without padding, special tokens and prompt."""
        mask_BL, skipped = np.asarray(features["attention_mask"], bool), self._prompt_length(role)
        is_text_BL = mask_BL & self._is_text(features["input_ids"])
        for tokens_LW, is_text_L in zip(tokens_BLW, is_text_BL, strict=True):
            yield tokens_LW[np.flatnonzero(is_text_L)[skipped:]]

    def _is_text(self, ids: Any) -> NDArray[np.bool_]:
        """Which token ids, of any shape, are not special tokens."""
        return np.isin(np.asarray(ids), self.special_ids, invert=True)

    @functools.cached_property
    def special_ids(self) -> list[int]:
        """The ids of special tokens."""
        added = self.tokenizer.get_added_tokens_decoder()
        return [i for i, token in added.items() if token.special]

    def prompt(self, role: Role) -> str:
        """The prompt of a role."""
        return self.prompts.query if role == "query" else self.prompts.passage

    def _prompt_length(self, role: Role) -> int:
        """The number of tokens of a role's prompt. A space at its end belongs to the text."""
        prompt = self.prompt(role).rstrip()
        return int(self._is_text(self.tokenizer.encode(prompt, add_special_tokens=False).ids).sum())


def batches_by_length(
    texts: Sequence[str],
    read: Callable[[Sequence[str]], Features],
    batch_tokens: int,
    limit: int | None,
) -> Iterator[tuple[list[int], Features]]:
    """Batches of texts of similar length, longest first: the texts' indices and features.

    Args:
        read: tokenizes and pads texts. If it gives no attention mask, its texts are one batch.
        batch_tokens: the tokens of a batch, padding included; a longer text is a batch of its own.
        limit: texts are truncated to this number of tokens; None: not at all.
    """
    by_length = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    start = 0
    while start < len(texts):
        longest = len(texts[by_length[start]])  # a text has hardly more tokens than characters
        size = TOKENS_AHEAD // max(1, min(longest, limit or longest))
        window = by_length[start : start + max(1, min(size, READ_AHEAD))]
        start += len(window)
        features = read([texts[i] for i in window])
        if "attention_mask" not in features:
            yield window, features
            continue
        mask_NL = np.asarray(features["attention_mask"])
        tokens_N = mask_NL.sum(axis=1)
        order = np.argsort(-tokens_N, kind="stable").tolist()
        is_padded_right = mask_NL[:, 0].all()
        while order:
            longest = max(1, int(tokens_N[order[0]]))
            size = max(1, batch_tokens // longest)
            rows, order = order[:size], order[size:]
            columns = slice(0, longest) if is_padded_right else slice(-longest, None)
            batch = {
                name: value[rows][:, columns]
                if getattr(value, "shape", None) == mask_NL.shape
                else value
                for name, value in features.items()
            }
            yield [window[i] for i in rows], batch


def without_slots(texts: Sequence[str]) -> list[str]:
    """The texts, with a space in each name of a slot, so that it is read as text."""
    return [text.replace(STEM, STEM[:2] + " " + STEM[2:]) for text in texts]


def no_transformer(name: str) -> str:
    """The message that a table of tokens has no token vectors."""
    return (
        f"{name_of(Path(name))} has no transformer, and so no token vectors: "
        "search without --rerank and --keep-tokens"
    )


def truncate(tokenizer: Any, max_tokens: int | None, side: str = "") -> None:
    """Set the truncation of a tokenizer of the ``tokenizers`` library: the maximum number of tokens
    (None: do not truncate), and the side that is cut ("": as before).
    """
    side = side or (tokenizer.truncation or {}).get("direction", "right")
    if max_tokens is None:
        tokenizer.no_truncation()
    else:
        tokenizer.enable_truncation(max_tokens, direction=side)


def check_max_tokens(given: int, limit: int | None, name: str) -> None:
    """Raise RevelaError unless a model can read this number of tokens; ``limit`` is its maximum,
    None for no limit.
    """
    if not 1 <= given <= (limit or given):
        most = f" and at most {limit:,}, which {name} reads" if limit else ""
        raise RevelaError(f"--max-tokens {given}: give at least 1{most}")
