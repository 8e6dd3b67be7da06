"""The steps of a search: candidates by vectors and by words -> fusion -> re-ranking -> lengths ->
confidence.

``search`` ranks the documents of a store: an index (searching/index_search.py), or texts in memory
(``MemoryStore``), as ``evaluate``, the label-free check and the calibration do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, repeat
from typing import Literal, NamedTuple, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from revela.errors import QueryError
from revela.ranking.bm25 import BM25, max_score, term_weights
from revela.ranking.fusion import (
    DEPTH,
    Fusion,
    FusionRule,
    Owner,
    Scores,
    best_chunks,
    by_length,
    fuse_ranks,
    fuse_scores,
    length_factor,
    similarities,
)
from revela.ranking.late_interaction import TOKENS_DEPTH, match_by_tokens, rerank_by_tokens
from revela.text.analyzer import Analyzer
from revela.types import PERHAPS, SURE, Explanation, QueryTokens, Vectors, check_unicode

Mode = Literal["dense", "lexical", "hybrid"]
Rerank = Literal["late-interaction", "none"]
QUERY_CHARACTERS = 10_000  # maximum length of a query
ALIKE = 0.8  # minimum Jaccard similarity of the terms of two passages that are one
COPIES = 10  # results that may be copies of the first, including itself
FAR = 0.15  # fused scores for questions about other subjects are lower (docs/results.md)
WRONG_QUANTILE = 0.97  # of hits for queries without an answer
OTHER = 0.5  # how much of the best other document's score counts against a hit


class Confidence(NamedTuple):
    """The probability that a first hit is right, if the text answers half of all questions.

    The margin of a hit for a question without an answer is rarely above ``half``, that of a hit for
    a question with one mostly is (docs/results.md).

    Attributes:
        half: quantile of the margins of hits for queries without an answer.
        slope: 1 / standard deviation of these margins.
        cut: quantile of the scores of these hits.
    """

    half: float
    slope: float
    cut: float

    @classmethod
    def from_wrong_hits(cls, wrong_Q2: NDArray[np.float64]) -> Confidence:
        """Measure it on queries without an answer: for each the score of the first hit, and of the
        best other document.
        """
        margins_Q = np.array([margin(*pair) for pair in wrong_Q2])
        half, cut = (float(np.quantile(of, WRONG_QUANTILE)) for of in (margins_Q, wrong_Q2[:, 0]))
        return cls(half, float(1 / max(margins_Q.std(), 1e-3)), cut)

    def scaled(self, before: Confidence, after: Confidence) -> Confidence:
        """This confidence after re-ranking, from those of some queries before and after it."""
        triples = zip(self, before, after, strict=True)
        return Confidence(*(own * new / old if old else new for own, old, new in triples))

    def of(self, score: float, other: float) -> float:
        """The probability for a hit's score and the best score of another document."""
        distance = self.slope * (margin(score, other) - self.half)
        return 1 / (1 + math.exp(-max(-700.0, distance)))


def margin(score: float, other: float) -> float:
    """How far a hit stands out from the best other document: for a question without an answer many
    passages score alike.
    """
    return score - OTHER * other


@dataclass(frozen=True)
class SearchOptions:
    """Options of a search, as for ``Index.search``. ``where`` is SQL, "" for no filter; ``tokens``
    are the query's, for re-ranking.

    Raises:
        QueryError: an option has no such value, or two exclude each other.
    """

    k: int = 10
    mode: Mode = "hybrid"
    where: str = ""
    fusion: Fusion = "score"
    weight: float | None = None
    rerank: Rerank = "none"
    min_score: float | None = None
    explain: bool = False
    tokens: QueryTokens | None = None
    ignores_phrases: bool = False  # no passage contains those of the query

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or self.k < 1:
            raise QueryError(f"k must be a positive number of documents (got {self.k!r})", "k")
        for name, values in (("mode", Mode), ("fusion", Fusion), ("rerank", Rerank)):
            if (value := getattr(self, name)) not in get_args(values):
                known = ", ".join(get_args(values))
                raise QueryError(f"unknown {name} {value!r}: give one of {known}", name)
        check_unicode(self.where, "the filter", "where")
        if self.min_score is not None and math.isnan(self.min_score):
            message = "the minimum score must be a number, such as 0.3 (got NaN)"
            raise QueryError(message, "min_score")
        by_rank = self.mode == "hybrid" and self.fusion == "rank"
        if self.rerank == "late-interaction" and (self.mode == "lexical" or by_rank):
            raise QueryError(
                "late interaction re-ranks dense search, and hybrid search by score: "
                "leave out the re-ranking, or change the mode",
                "rerank",
            )

    @property
    def is_calibrated(self) -> bool:
        """Whether ``Calibration.confidences`` were measured for this kind of search."""
        return self.mode == "hybrid" and self.fusion == "score" and self.weight is None

    @property
    def depth(self) -> int:
        """Number of candidates to request from each side."""
        if self.mode == "hybrid":
            return max(self.k, DEPTH)
        return max(2 * self.k, TOKENS_DEPTH if self.rerank == "late-interaction" else 0)


class Store(Protocol):
    """The data of texts that a search reads, by row number.

    Attributes:
        rule: of the fusion (``Calibration.rule``).
        confidences: in hits (``Calibration.confidences``).
        terms: the analyzer of queries.
    """

    @property
    def rule(self) -> FusionRule: ...
    @property
    def confidences(self) -> Mapping[str, Confidence]: ...
    @property
    def terms(self) -> Analyzer: ...
    def candidates(
        self, query: str, vector: Vectors | None, options: SearchOptions
    ) -> tuple[Scores, Scores]:
        """The rows nearest to the vector, by cosine, and the best ones by BM25."""

    def owner(self, row: int) -> Owner: ...
    def cosines(self, rows: Sequence[int], vector: Vectors) -> Scores: ...
    def idf(self, terms: Sequence[str]) -> NDArray[np.float64]: ...
    def signs(self, rows: Sequence[int]) -> list[bytes]:
        """``packed_signs`` of the tokens of each row."""

    def named(self, query: str, rows: Iterable[int]) -> list[int]:
        """Those of these rows whose file has the query as its name."""

    def passages(self, rows: Sequence[int]) -> Mapping[int, tuple[str, str]]:
        """The passage of each row, and what is searched by words: also the name of its file."""


class Found(NamedTuple):
    """The outcome of a search.

    Attributes:
        scores: the best row of each document, best first; at least k, if there are that many.
        confidences: of the rows that are returned, best first; None if it was not measured.
        explanations: of these rows, if requested.
    """

    scores: Scores
    confidences: dict[int, float | None]
    explanations: dict[int, Explanation]


def search(store: Store, query: str, vector: Vectors | None, options: SearchOptions) -> Found:
    """Rank documents by their best passages; by words only if the query has no vector."""
    rule, owner = store.rule, store.owner
    weight = rule.weight if options.weight is None else options.weight
    is_hybrid = vector is not None and options.mode == "hybrid"
    is_fused = is_hybrid and options.fusion == "score"

    # Candidates: cosines of rows, and BM25, which is a share of its maximum where they are fused.
    nearest, matching = store.candidates(query, vector, options)
    cosines, words, maximum = nearest, matching, 0.0
    if is_hybrid or vector is None:
        maximum = max_score(store.idf(store.terms.of_query(query, likely=True)))
    if vector is not None and is_hybrid and (is_fused or options.explain):
        if others := [row for row in matching if row not in nearest]:
            cosines = nearest | store.cosines(others, vector)
        words = {row: score / maximum for row, score in matching.items()} if maximum else {}

    # Fusion of both; of each document the best row.
    if is_fused:
        scores = best_chunks(fuse_scores(cosines, words, rule, weight), owner)
    elif is_hybrid:
        scores = fuse_ranks([nearest, matching], owner)
    else:
        scores = best_chunks(matching if vector is None else nearest, owner)

    # Re-ranking of the first documents by tokens.
    tokens: Scores = {}
    if options.tokens is not None:
        if not is_fused:
            scores, weight = similarities(scores, rule.chance), 1.0
        first = [*scores][:TOKENS_DEPTH]
        weights = term_weights(query, store.terms, store.idf)
        matches = match_by_tokens(options.tokens, store.signs(first), weights).tolist()
        tokens = similarities(dict(zip(first, matches, strict=True)), rule.tokens)
        scores = rerank_by_tokens(scores, tokens, weight)

    # Lengths of documents. Those whose file has the query as its name come first.
    if is_fused:
        scores = by_length(scores, owner)
    if is_fused or vector is None:
        named = store.named(query, (row for row in scores if row in matching))
        best = dict.fromkeys(named, 1.0 if is_fused else maximum)
        scores = best | {row: score for row, score in scores.items() if row not in best}

    # Confidence in the hits that are returned: how far they stand out from others.
    least = -math.inf if options.min_score is None else options.min_score
    shown = dict(islice(((row, s) for row, s in scores.items() if s >= least), options.k))
    confidences = _confidences(store, query, scores, shown, options, bool(matching))

    explanations = dict[int, Explanation]()
    if options.explain:
        vectors = similarities(cosines, rule.chance) if is_fused else cosines
        share = weight if is_fused else None
        lengths = {row: length_factor(owner(row)) for row in shown if is_fused}
        parts = vectors, words, dict.fromkeys(shown, share), tokens, lengths
        explanations = {row: Explanation(*(part.get(row) for part in parts)) for row in shown}
    return Found(scores, confidences, explanations)


def _confidences(
    store: Store,
    query: str,
    scores: Scores,
    shown: Scores,
    options: SearchOptions,
    has_words: bool,
) -> dict[int, float | None]:
    """The confidence in each row that is returned: 0 if the text is about other subjects, because
    nothing scores ``FAR`` or, if no confidence was measured, because nothing scores above 0. If no
    passage has a word of the query (``has_words``), there is probably no answer. A row is not sure
    if it lacks a string of the query, such as a date, or its phrases; or if there are few other
    documents to compare it with, as after a filter, and its score is low.
    """
    if not options.is_calibrated:
        return dict.fromkeys(shown)
    confidence, best = store.confidences.get(options.rerank), max(scores.values(), default=0.0)
    if best < FAR if confidence else best <= 0:
        return dict.fromkeys(shown, 0.0)
    if confidence is None:
        return dict.fromkeys(shown)
    first = dict(islice(scores.items(), COPIES))
    passages = store.passages([*(shown | first)])
    second = runner_up(first, lambda row: {*store.terms(passages[row][0])})
    greatest, required = max(first.values(), default=0.0), store.terms.required(query)
    found = dict[int, float | None]()
    for row, score in shown.items():
        other = second if score > second else greatest
        value = 0.0 if score <= 0 else confidence.of(score, other)
        lacks_string = bool(required) and not required <= {*store.terms(passages[row][1])}
        has_few_others = len(first) < COPIES and score < confidence.cut
        is_unsure = lacks_string or has_few_others or options.ignores_phrases
        found[row] = min(value, PERHAPS if not has_words else SURE if is_unsure else 1.0)
    return found


def are_alike(first: Collection[str], second: Collection[str]) -> bool:
    """Whether two passages have nearly the same terms."""
    shared = len({*first} & {*second})
    return shared >= ALIKE * max(len(first) + len(second) - shared, 1)


def runner_up(scores: Scores, terms_of: Callable[[int], Collection[str]]) -> float:
    """The score of the first document that differs from the best one, or of the last of
    ``COPIES``; 0 if it is the only one.

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
    """Texts in memory, and the candidates for a query.

    Attributes:
        vectors_ND: their vectors.
        signs_N: ``packed_signs`` of the tokens of each, to re-rank by.
        ids: the document of each; by default each is one. Lengths of documents are not used.
    """

    bm25: BM25
    vectors_ND: Vectors
    rule: FusionRule
    signs_N: Sequence[bytes] = ()
    ids: Sequence[str] = ()
    nearest: Scores = field(default_factory=dict)
    matching: Scores = field(default_factory=dict)
    confidences: Mapping[str, Confidence] = field(default_factory=dict)

    def rankings(
        self,
        queries: Iterable[str],
        vectors_QD: Iterable[Vectors],
        nearest: Iterable[Scores],
        matching: Iterable[Scores],
        options: SearchOptions = SearchOptions(),
        tokens: Iterable[QueryTokens | None] = repeat(None),
    ) -> list[Scores]:
        """``search`` for each query with its candidates by vectors and by words."""
        found = list[Scores]()
        each = zip(queries, vectors_QD, nearest, matching, tokens, strict=False)
        for query, vector, near, match, read in each:
            store = replace(self, nearest=near, matching=match)
            found.append(search(store, query, vector, replace(options, tokens=read)).scores)
        return found

    @property
    def terms(self) -> Analyzer:
        return self.bm25.terms

    def candidates(
        self, query: str, vector: Vectors | None, options: SearchOptions
    ) -> tuple[Scores, Scores]:
        depth = options.depth
        return dict(islice(self.nearest.items(), depth)), dict(islice(self.matching.items(), depth))

    def owner(self, row: int) -> Owner:
        return Owner(self.ids[row] if self.ids else str(row))

    def cosines(self, rows: Sequence[int], vector: Vectors) -> Scores:
        return dict(zip(rows, (self.vectors_ND[rows] @ vector).tolist(), strict=True))

    def idf(self, terms: Sequence[str]) -> NDArray[np.float64]:
        return self.bm25.idf(terms)

    def signs(self, rows: Sequence[int]) -> list[bytes]:
        return [self.signs_N[row] for row in rows]

    def named(self, query: str, rows: Iterable[int]) -> list[int]:
        return []

    def passages(self, rows: Sequence[int]) -> Mapping[int, tuple[str, str]]:
        return {}


def check_query(query: str) -> None:
    """Raise QueryError unless a query is a string in Unicode, not empty and not too long."""
    check_unicode(query, "the query", "query")
    if not query.strip():
        raise QueryError("the query is empty: give some words", "query")
    if len(query) > QUERY_CHARACTERS:
        raise QueryError(
            f"the query has {len(query):,} characters: give at most {QUERY_CHARACTERS:,}", "query"
        )
