"""The types that all parts of revela share."""

from __future__ import annotations

import hashlib
import math
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from revela.errors import QueryError, RevelaError

Kind = Literal["prose", "code"]
Precision = Literal["auto", "fp32", "bf16", "int8"]
"""Arithmetic of a model; "auto" is the fastest on this hardware."""
Role = Literal["query", "passage"]
ROLES: tuple[Role, ...] = ("query", "passage")
Vectors = NDArray[np.float32]
T = TypeVar("T")
Value = str | int | float | bool
"""The values of a metadata field."""


def is_missing(value: object) -> bool:
    """Whether a value is null, NaN or infinite. JSON has no NaN and no infinity."""
    return value is None or (isinstance(value, float) and not math.isfinite(value))


def hash64(text: str) -> int:
    """An unsigned hash of 64 bits, the same in every process and version."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def evenly_spaced(count: int, most: int = 1000) -> NDArray[np.int64]:
    """At most ``most`` evenly spaced indices of ``count`` items."""
    return np.unique(np.linspace(0, count - 1, min(most, count)).astype(np.int64))


def unit(vectors_ND: Vectors) -> Vectors:
    """Vectors of length one; 0 stays 0."""
    lengths_N1 = np.linalg.norm(vectors_ND, axis=1, keepdims=True)
    return np.asarray(vectors_ND / np.maximum(lengths_N1, 1e-12), np.float32)  # as torch does


def fp32(numbers: NDArray[Any]) -> NDArray[np.float32]:
    """Convert floats, or the bits of bf16 (the upper half of fp32's), to fp32."""
    if numbers.dtype == np.uint16:
        bits = numbers.astype(np.uint32)
        bits <<= 16  # in place: the table may be large
        return bits.view(np.float32)
    return numbers.astype(np.float32, copy=False)


def shortened(vectors_ND: Vectors, width: int) -> Vectors:
    """Vectors cut to ``width`` dimensions and normalised, (N, W); unchanged if ``width`` is 0."""
    if not 0 < width < vectors_ND.shape[1]:
        return vectors_ND
    return unit(vectors_ND[:, :width])


@dataclass(frozen=True, slots=True)
class Document:
    """A document of a corpus; ``metadata`` holds the other fields of its row."""

    id: str
    text: str
    title: str = ""
    kind: Kind = "prose"
    metadata: Mapping[str, Value] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in ("id", "text", "title"):
            if not isinstance(value := getattr(self, name), str):
                check_unicode(value, f"{name} of document {self.id}")

    @property
    def full_text(self) -> str:
        """Title and text as one string, as BEIR collections are searched.

        >>> Document("d1", "They dance.", "Bees").full_text
        'Bees They dance.'
        """
        return f"{self.title} {self.text}".strip() if self.title else self.text


def with_title(title: str, text: str) -> str:
    """A passage: the text of a chunk with its title before it."""
    return f"{title} {text}" if title else text


def without_title(title: str, passage: str) -> str:
    """The text of a chunk, of its passage (``with_title``)."""
    return passage[len(title) + 1 :] if title else passage


def is_unicode(text: str) -> bool:
    """Whether a text has no surrogates. (JSON may hold half of a pair, escaped.)"""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_unicode(text: object, what: str, param: str = "") -> None:
    """Raise QueryError if this is not a string, or has half of a surrogate pair, which cannot be
    encoded.
    """
    if not isinstance(text, str):
        raise QueryError(f"{what} is {reprlib.repr(text)}, not a string: give a string", param)
    if not is_unicode(text):
        raise QueryError(f"{what} is not Unicode (half of a surrogate pair): correct it", param)


def items_of(given: Iterable[T], name: str, kinds: type | tuple[type, ...] = str) -> Iterator[T]:
    """Iterate once, in order, over the items of an argument: a list, a generator, or a column of a
    data frame.

    Args:
        given: the argument.
        name: its name, for messages.
        kinds: what each item must be an instance of.

    Raises:
        RevelaError: it is one text, which Python would iterate by characters, a table, a mapping or
            a set; or an item is of another kind, such as a missing value.

    Example:
        >>> items_of("hello", "texts")
        Traceback (most recent call last):
        revela.errors.RevelaError: texts must be a list (got a str): give a list, such as [item]
        >>> list(items_of(["hello", None], "texts"))
        Traceback (most recent call last):
        revela.errors.QueryError: texts[1] is None, not a string: give a string
    """
    is_one = isinstance(given, str | bytes | Document | Mapping | Set) or hasattr(given, "columns")
    if is_one or not hasattr(given, "__iter__"):
        kind = type(given).__name__
        raise RevelaError(f"{name} must be a list (got a {kind}): give a list, such as [item]")

    def checked() -> Iterator[T]:
        for i, item in enumerate(given):
            if isinstance(item, str) or not isinstance(item, kinds):
                check_unicode(item, f"{name}[{i}]")
            yield item

    return checked()


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a document: whole sentences, or whole functions of source code.

    Attributes:
        document: the document's index in the corpus.
        query: a query that it answers, if one is known (ranking/queries.py), to train on; else "".
    """

    document: int
    text: str
    query: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The parts of a hit's score; None for parts that were not computed. In hybrid search by score
    each is from 0 to 1.

    Attributes:
        vectors: cosine; in a fused score counted from that of a passage that does not answer.
        words: BM25; in hybrid search divided by the query's maximum.
        weight: weight of the vectors in the sum of the two.
        tokens: how well the query's tokens match.
        length: what their sum is multiplied by, below 1 for a document of many passages.
    """

    vectors: float | None = None
    words: float | None = None
    weight: float | None = None
    tokens: float | None = None
    length: float | None = None


Answer = Literal["sure", "perhaps", "unlikely", "elsewhere"]
ANSWERS: dict[Answer | None, str] = {
    "sure": "sure",
    "perhaps": "perhaps",
    "unlikely": "probably no answer in these documents",
    "elsewhere": "probably no answer, as these documents are about other things",
    None: "confidence unknown",
}
SURE, PERHAPS = 0.5, 0.04  # an answer needs a higher confidence than this


@dataclass(frozen=True, slots=True)
class Hit:
    """A search result: a document and its best chunk for the query.

    Attributes:
        id: the document's id.
        score: comparable only within one search mode.
        title: the document's; in Markdown with the headings above the chunk (Guide > Install).
        text: the chunk's.
        chunk: number of the chunk in its document, from 0.
        confidence: probability that the hit is right, if the text answers half of your questions
            (calibration.py); 0 if the text is about other things; None if it is not known.
        line: line of a text file where the chunk begins, from 1.
        page: page of a PDF where the chunk begins, from 1.
        date, type, language: of the document: in ISO 8601 (that of the mail or front matter, else
            of the file's last change), the ending of its file (pdf), and a code (en).
    """

    id: str
    score: float
    title: str
    text: str
    chunk: int = 0
    metadata: Mapping[str, Value] = field(default_factory=dict, hash=False)
    confidence: float | None = None
    explanation: Explanation | None = None
    line: int | None = None
    page: int | None = None
    date: str | None = None
    type: str | None = None
    language: str | None = None


class Hits(list[Hit]):
    """Results of a search, best first, with a ``notice`` for the user; "" for none."""

    notice = ""

    @property
    def answer(self) -> Answer | None:
        """Whether the first hit answers the query, by its confidence; None if it has none."""
        if not self or (confidence := self[0].confidence) is None:
            return None
        if confidence > SURE:
            return "sure"
        if confidence > PERHAPS:
            return "perhaps"
        return "unlikely" if confidence else "elsewhere"


class QueryTokens(NamedTuple):
    """An encoded query.

    Attributes:
        vector: (D,).
        tokens: a vector per token, (T, W).
        spans: (start, end) of each token in characters of the query.
    """

    vector: Vectors
    tokens: Vectors
    spans: Sequence[tuple[int, int]]
