"""Search one version of an index: its candidates by vectors and by words, fused and re-ranked by
the steps of ranking/steps.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from math import inf, isnan
from typing import Any, Literal, get_args

from revela.encoders.base import TextEncoder
from revela.errors import QueryError
from revela.ranking.fusion import (
    DEPTH,
    Fusion,
    FusionRule,
    Ranking,
    above_chance,
    best_chunks,
    by_length,
    fuse_ranks,
    fuse_scores,
    joined,
    length_factor,
)
from revela.ranking.late_interaction import (
    TOKENS_DEPTH,
    Weight,
    encode_packed,
    similarities,
    term_weights,
)
from revela.ranking.steps import Rerank, Scores, both_sides, rerank, scores_of
from revela.searching.rows import name_of, spaced
from revela.searching.state import State
from revela.searching.table import Table, id_filter
from revela.types import Explanation, QueryTokens, Vectors, check_unicode

Mode = Literal["dense", "lexical", "hybrid"]


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

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or self.k < 1:
            raise QueryError(f"k is {self.k!r}, no number of documents: give 1 or more", "k")
        for name, values in (("mode", Mode), ("fusion", Fusion), ("rerank", Rerank)):
            if (value := getattr(self, name)) not in get_args(values):
                known = ", ".join(get_args(values))
                raise QueryError(f"there is no {name} {value!r}: give one of {known}", name)
        check_unicode(self.where, "the filter", "where")
        if self.min_score is not None and isnan(self.min_score):
            message = "the minimum score is not a number: give one, such as 0.3"
            raise QueryError(message, "min_score")
        by_rank = self.mode == "hybrid" and self.fusion == "rank"
        if self.rerank == "late-interaction" and (self.mode == "lexical" or by_rank):
            raise QueryError(
                "tokens are added to cosines and their sum with BM25: "
                "re-rank dense search, or hybrid search by score",
                "rerank",
            )

    def shown(self, ranking: Ranking) -> Ranking:
        """The part of a ranking of documents that is returned."""
        min_score = -inf if self.min_score is None else self.min_score
        best = ((row, found) for row, found in ranking.items() if found[1] >= min_score)
        return dict(islice(best, self.k))

    @property
    def is_fused(self) -> bool:
        """Whether scores are fused by score."""
        return self.mode == "hybrid" and self.fusion == "score"

    @property
    def calibrated_as(self) -> str:
        """The key of this kind of search in ``Calibration.scores``; "" if it has none."""
        if not self.is_fused or self.weight is not None:
            return ""
        return "late-interaction" if self.rerank == "late-interaction" else "hybrid"

    @property
    def depth(self) -> int:
        """Number of chunks to request from each side."""
        if self.mode == "hybrid":
            return max(self.k, DEPTH)
        return max(2 * self.k, TOKENS_DEPTH if self.rerank == "late-interaction" else 0)


@dataclass(frozen=True)
class IndexSearch:
    """A search of one version of an index, by words if it has no vector; KeyError if the state has
    changed meanwhile.
    """

    table: Table
    state: State
    rule: FusionRule
    encoder: TextEncoder | None  # to re-rank by tokens that the index does not keep
    query: str
    vector: Vectors | None
    options: SearchOptions

    def ranking(self) -> Ranking:
        """The best row of each document, best first; at least k documents, if there are so many."""
        options, ranking = self.options, self._documents()
        scores = scores_of(ranking)
        if options.tokens is not None:
            weight = options.weight
            if options.mode == "dense":
                scores, weight = self._similarities(scores), 1.0
            scores = rerank(self, self.query, scores, options.tokens, weight)
        ranking = {row: (ranking[row][0], score) for row, score in scores.items()}
        return self._named(by_length(ranking) if self._is_fused else ranking)

    def explain(self, rows: Sequence[int]) -> dict[int, Explanation]:
        """Explain the scores of rows of the ranking."""
        options, weight = self.options, None
        cosines, words = map(scores_of, self._candidates)
        if self.vector is not None and options.mode == "hybrid":
            cosines, words = self._sides
            weight = options.weight
            if options.fusion == "score":
                weight = self.rule.weight if weight is None else weight
                cosines = self._similarities(cosines)
        tokens: Sequence[float | None] = [None] * len(rows)
        if options.tokens is not None:
            weights = self.term_weights(self.query)
            tokens = similarities(options.tokens, self.signs(rows), weights, self.rule.tokens)
        factors: Sequence[float | None] = [None] * len(rows)
        if self._is_fused:
            nearest, matching = self._candidates
            factors = [length_factor((nearest.get(row) or matching[row])[0]) for row in rows]
        return {
            row: Explanation(cosines.get(row), words.get(row), weight, *parts)
            for row, *parts in zip(rows, tokens, factors, strict=True)
        }

    def _named(self, ranking: Ranking) -> Ranking:
        """Documents whose file has the query as its name come first, with the greatest score."""
        if self.vector is not None and not self._is_fused:
            return ranking
        terms, asked = self.table.query_terms.of_query, spaced(self.query)
        query, best = {*terms(asked)}, 1.0 if self._is_fused else self.max_bm25(self.query)
        named = {
            row: (owner, best)
            for row, (owner, _) in ranking.items()
            if query and row in self._candidates[1]
            for name in [name_of(owner.id)]
            if query in ({*terms(name[0])}, {*terms(" ".join(name))})
        }
        return {**named, **{row: hit for row, hit in ranking.items() if row not in named}}

    def _documents(self) -> Ranking:
        nearest, matching = self._candidates
        if self.vector is None or self.options.mode != "hybrid":
            return best_chunks(matching if self.vector is None else nearest)
        if self.options.fusion == "rank":
            return fuse_ranks([nearest, matching])
        fused = fuse_scores(*self._sides, self.rule, self.options.weight)
        candidates = {**nearest, **matching}
        return best_chunks({row: (candidates[row][0], score) for row, score in fused.items()})

    @cached_property
    def _candidates(self) -> tuple[Ranking, Ranking]:
        """Chunks by vectors and by words: of k documents, or of all that match."""
        nearest: Ranking = {}
        matching: Ranking = {}
        table, vector, options = self.table, self.vector, self.options
        where, depth = options.where, options.depth
        while True:
            near = {} if vector is None else table.nearest(vector, depth, where)
            match = {} if options.mode == "dense" else table.matching(self.query, depth, where)
            nearest, matching = joined(nearest, near), joined(matching, match)
            documents = {document for document, _ in (*nearest.values(), *matching.values())}
            if len(documents) >= options.k or max(len(near), len(match)) < depth:
                return nearest, matching
            # A few long documents fill the lists: search again without them.
            where = f"not {id_filter(document.id for document in documents)}"
            if options.where:
                where += f" and ({options.where}\n)"

    @cached_property
    def _sides(self) -> tuple[Scores, Scores]:
        """``both_sides`` of a hybrid search with a vector."""
        assert self.vector is not None
        return both_sides(self, self.query, self.vector, *map(scores_of, self._candidates))

    @property
    def _is_fused(self) -> bool:
        return self.vector is not None and self.options.is_fused

    def _similarities(self, cosines: Scores) -> Scores:
        """c(q, d) of each cosine, 0 to 1."""
        found = above_chance([*cosines.values()], self.rule.chance).tolist()
        return dict(zip(cosines, found, strict=True))

    def cosines(self, rows: Sequence[int], vector: Vectors) -> Scores:
        return self.table.cosines(rows, vector)

    def max_bm25(self, query: str) -> float:
        terms = [term for *_, term in self.table.query_terms.query_places(query)]
        return self.state.max_bm25(terms, self.table.number)

    def term_weights(self, query: str) -> list[Weight]:
        idf = partial(self.state.idf, version=self.table.number)
        return term_weights(query, self.table.query_terms, idf)

    def signs(self, rows: Sequence[int]) -> list[bytes]:
        if self.encoder is None:
            return self._column("tokens", rows)
        return encode_packed(self.encoder, self._column("passage", rows))[1] if rows else []

    def _column(self, name: str, rows: Sequence[int]) -> list[Any]:
        values = self.table.rows(rows, [name])
        return [values[row][name] for row in rows]
