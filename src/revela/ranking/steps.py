"""The steps of a search: candidates by vectors and by words -> fusion -> re-ranking.

Used by ``Index.search`` (by chunk), and by ``evaluate`` and the label-free check
(``MemoryStore``, by document).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from revela.errors import QueryError
from revela.ranking.fusion import (
    FusionRule,
    Ranking,
    fuse_scores,
)
from revela.ranking.late_interaction import (
    TOKENS_DEPTH,
    Weight,
    rerank_by_tokens,
    term_weights,
)
from revela.types import QueryTokens, Vectors, check_unicode

if TYPE_CHECKING:
    from revela.ranking.bm25 import BM25

Rerank = Literal["late-interaction", "none"]
QUERY_CHARACTERS = 10_000  # maximum length of a query
ALIKE = 0.8  # minimum Jaccard similarity of the terms of two passages that are one
COPIES = 10  # results that may be copies of the first, itself included
Scores = dict[int, float]
"""Rows and their scores, best first."""


class Store(Protocol):
    """The data of texts that a search reads, by row number.

    ``rule`` is the rule of the fusion (``Calibration.rule``), ``max_bm25`` the maximum score for a
    query (0 without terms), ``signs`` are ``packed_signs``.
    """

    @property
    def rule(self) -> FusionRule: ...
    def cosines(self, rows: Sequence[int], vector: Vectors) -> Scores: ...
    def max_bm25(self, query: str) -> float: ...
    def term_weights(self, query: str) -> list[Weight]: ...
    def signs(self, rows: Sequence[int]) -> list[bytes]: ...


def fuse(
    store: Store,
    query: str,
    vector: Vectors,
    nearest: Mapping[int, float],
    matching: Mapping[int, float],
    weight: float | None = None,
) -> Scores:
    """Fuse by score the rows ``nearest`` to a query's vector (cosines) and those ``matching`` its
    words (BM25 scores).
    """
    cosines, shares = both_sides(store, query, vector, nearest, matching)
    return fuse_scores(cosines, shares, store.rule, weight)


def both_sides(
    store: Store,
    query: str,
    vector: Vectors,
    nearest: Mapping[int, float],
    matching: Mapping[int, float],
) -> tuple[Scores, Scores]:
    """The cosines of all candidates, and BM25 of the matching ones as a share of its maximum."""
    cosines = {**nearest}
    if others := [row for row in matching if row not in nearest]:
        cosines |= store.cosines(others, vector)
    maximum = store.max_bm25(query)
    return cosines, {row: score / maximum for row, score in matching.items()} if maximum else {}


def rerank(
    store: Store,
    query: str,
    scores: Mapping[int, float],
    tokens: QueryTokens,
    weight: float | None = None,
) -> Scores:
    """Re-rank rows by the query's tokens. ``weight`` is the weight of the vectors in ``scores``;
    None: the rule's.
    """
    signs, weights = store.signs(list(scores)[:TOKENS_DEPTH]), store.term_weights(query)
    own = store.rule.weight if weight is None else weight
    return rerank_by_tokens(tokens, scores, signs, weights, own, store.rule.tokens)


def are_alike(first: Collection[str], second: Collection[str]) -> bool:
    """Whether two passages have nearly the same terms."""
    shared = len({*first} & {*second})
    return shared >= ALIKE * max(len(first) + len(second) - shared, 1)


def runner_up(scores: Scores, terms_of: Callable[[int], Collection[str]]) -> float:
    """The score of the first document that differs from the best one, or of the last of
    ``COPIES``; 0 if there is no other.

    Args:
        scores: a row of each document, best first.
        terms_of: the terms of a row's passage, each once.
    """
    rows = list(scores)[:COPIES]
    own = terms_of(rows[0]) if rows[1:] else ()
    others = (scores[row] for row in rows[1:] if not are_alike(own, terms_of(row)))
    return next(others, scores[rows[-1]] if len(rows) == COPIES else 0.0)


@dataclass(frozen=True)
class MemoryStore:
    """Texts in memory, with their vectors (N, D)."""

    bm25: BM25
    vectors_ND: Vectors
    rule: FusionRule
    packed: Sequence[bytes] = field(default=())  # signs of all texts, to re-rank by tokens

    def cosines(self, rows: Sequence[int], vector: Vectors) -> Scores:
        return dict(zip(rows, (self.vectors_ND[rows] @ vector).tolist(), strict=True))

    def max_bm25(self, query: str) -> float:
        return float(self.bm25.max_scores([query])[0])

    def term_weights(self, query: str) -> list[Weight]:
        return term_weights(query, self.bm25.terms, self.bm25.idf)

    def signs(self, rows: Sequence[int]) -> list[bytes]:
        return [self.packed[row] for row in rows]


def scores_of(ranking: Ranking) -> Scores:
    return {row: score for row, (_, score) in ranking.items()}


def check_query(query: str) -> None:
    """Raise QueryError unless a query is a string in Unicode, not empty and not too long."""
    check_unicode(query, "the query", "query")
    if not query.strip():
        raise QueryError("the query is empty: give some words to look for", "query")
    if len(query) > QUERY_CHARACTERS:
        raise QueryError(
            f"the query has {len(query):,} characters: give at most {QUERY_CHARACTERS:,}", "query"
        )
