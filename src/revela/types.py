"""The nouns that every part of revela shares. No imports of weight: these are what the arrows point
at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Kind = Literal["prose", "code"]
Vectors = NDArray[np.float32]
Value = str | int | float | bool
"""What a metadata field may hold."""


def is_missing(value: object) -> bool:
    """Whether a field has no value: a null, or NaN or infinity, which no JSON can say; pandas
    writes NaN for what is missing.
    """
    return value is None or (isinstance(value, float) and not math.isfinite(value))


@dataclass(frozen=True, slots=True)
class Document:
    """One document of a corpus: what a search returns, and what chunks are cut from.

    ``metadata`` holds other fields of its row, where they were asked for.
    """

    id: str
    text: str
    title: str = ""
    kind: Kind = "prose"
    metadata: Mapping[str, Value] = field(default_factory=dict, hash=False)

    @property
    def full_text(self) -> str:
        """Title and text as one string, the way BEIR collections are searched."""
        return f"{self.title} {self.text}".strip() if self.title else self.text


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of whole sentences (or whole functions) of one document; ``document`` is its index in
    the corpus.

    ``query`` is what it should be found by, where an objective asks for that; "" if nothing.
    """

    document: int
    text: str
    query: str = ""


@dataclass(frozen=True, slots=True)
class Hit:
    """One document found, with the chunk of it that suits the query best. ``score`` is comparable
    within one query and one mode only.

    ``id`` and ``title`` are the document's, ``text`` and ``chunk`` (its number, from 0) the
    chunk's.
    """

    id: str
    score: float
    title: str
    text: str
    chunk: int = 0
    metadata: Mapping[str, Value] = field(default_factory=dict, hash=False)


class Encoder(Protocol):
    """Anything that turns texts into vectors of length one, (len(texts), D) float32."""

    def encode_queries(self, texts: Sequence[str], progress: bool = False) -> Vectors: ...

    def encode_passages(self, texts: Sequence[str], progress: bool = False) -> Vectors: ...


@runtime_checkable
class TokenEncoder(Encoder, Protocol):
    """An encoder that also gives the vectors of single tokens, (T, W) float32 of length one: for
    late interaction.
    """

    def encode_with_tokens(
        self, texts: Sequence[str], progress: bool = False
    ) -> tuple[Vectors, list[Vectors]]: ...

    def query_tokens(self, query: str) -> tuple[Vectors, list[tuple[int, int]]]: ...


class Reranker(Protocol):
    """Anything that scores passages for a query in the light of one another (listwise),
    (len(passages),); higher is better.
    """

    def score(self, query: str, passages: Sequence[str]) -> NDArray[np.float64]: ...
