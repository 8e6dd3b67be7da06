"""Search an index: one version of it as a store of ranking/steps.py, and its hits."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from revela.encoders.base import TextEncoder
from revela.ranking.fusion import FusionRule, Owner, Scores, best_first
from revela.ranking.late_interaction import encode_packed
from revela.ranking.steps import Confidence, SearchOptions, search
from revela.searching.filters import both, id_filter
from revela.searching.rows import HIT_COLUMNS
from revela.searching.state import State
from revela.searching.table import Table
from revela.text.analyzer import Analyzer, file_name_words, searched, spaced
from revela.types import Explanation, Hit, Hits, Vectors, is_missing, without_title

# Names that file managers and browsers give to copies: "a (1).txt", "a copy.txt", "Copy of a.txt".
_COPY = re.compile(r"\(\d+\)(?=\.\w+$|$)|\b(?:copy|copie|copia|kopie|копия)\b", re.I)


@dataclass(frozen=True)
class IndexStore:
    """One version of an index, for one search; KeyError if the state has changed meanwhile."""

    table: Table
    state: State
    encoder: Callable[[], TextEncoder]  # to re-rank by tokens that the index does not keep
    _owners: dict[int, Owner] = field(default_factory=dict, init=False)  # of the candidates
    _read: dict[int, dict[str, Any]] = field(default_factory=dict, init=False)

    @property
    def rule(self) -> FusionRule:
        return self.table.info.calibration.rule

    @property
    def confidences(self) -> Mapping[str, Confidence]:
        return self.table.info.calibration.confidences

    @property
    def terms(self) -> Analyzer:
        return self.table.query_terms

    def candidates(
        self, query: str, vector: Vectors | None, options: SearchOptions
    ) -> tuple[Scores, Scores]:
        """Chunks by vectors and by words: of k documents, or of all that match."""
        nearest, matching, owners = Scores(), Scores(), self._owners
        table, where, depth = self.table, options.where, options.depth
        while True:
            near = {} if vector is None else table.nearest(vector, depth, where)
            match = {} if options.mode == "dense" else table.matching(query, depth, where)
            for scores, found in ((nearest, near), (matching, match)):
                for row, (owner, score) in found.items():
                    owners[row], scores[row] = owner, score
            documents = {owner.id for owner in owners.values()}
            if len(documents) >= options.k or max(len(near), len(match)) < depth:
                return best_first(nearest), best_first(matching)
            # A few long documents fill the lists: search again without them.
            where = both(f"not {id_filter(documents)}", options.where)

    def owner(self, row: int) -> Owner:
        return self._owners[row]

    def cosines(self, rows: Sequence[int], vector: Vectors) -> Scores:
        return self.table.cosines(rows, vector)

    def idf(self, terms: Sequence[str]) -> NDArray[np.float64]:
        return self.state.idf(terms, self.table.number)

    def signs(self, rows: Sequence[int]) -> list[bytes]:
        keeps_tokens = self.table.info.settings.keep_tokens
        column = "tokens" if keeps_tokens else "passage"
        read = self.table.rows(rows, [column])
        values = [read[row][column] for row in rows]
        return values if keeps_tokens or not rows else encode_packed(self.encoder(), values)[1]

    def named(self, query: str, rows: Iterable[int]) -> list[int]:
        terms = self.terms.of_query
        if not (asked := {*terms(spaced(query))}):
            return []
        names = ((row, file_name_words(self._owners[row].id)) for row in rows)
        return [
            row for row, name in names if asked in ({*terms(name[0])}, {*terms(" ".join(name))})
        ]

    def passages(self, rows: Sequence[int]) -> dict[int, tuple[str, str]]:
        read = self.rows(rows)
        texts = {row: read[row]["passage"] for row in rows}
        return {row: (text, searched(self._owners[row].id, text)) for row, text in texts.items()}

    def rows(self, rows: Iterable[int]) -> dict[int, dict[str, Any]]:
        """The columns of a hit of these rows, and of others that were read before."""
        if missing := [row for row in rows if row not in self._read]:
            self._read.update(self.table.rows(missing))
        return self._read


def hits_of(store: IndexStore, query: str, vector: Vectors | None, options: SearchOptions) -> Hits:
    """Search a version of an index."""
    found, columns = search(store, query, vector, options), store.table.info.columns
    rows, hits = store.rows(found.confidences), Hits()
    for row, confidence in found.confidences.items():
        explanation = found.explanations.get(row)
        hits.append(hit_of(rows[row], columns, found.scores[row], confidence, explanation))
        if hits[-1].id != store.owner(row).id:
            raise KeyError(row)
    named = {store.owner(row).id for row in store.named(query, found.confidences)}
    return originals_first(hits, named)


def distinct(hits: Sequence[Any], k: int) -> dict[int, list[int]]:
    """The first ``k`` hits, or results, with different texts: their indices, and the indices of
    others with the same text, ignoring white space.
    """
    groups = defaultdict[str, list[int]](list)
    for number, hit in enumerate(hits):
        groups[" ".join(hit.text.split()) or hit.id].append(number)
    return {first: copies for first, *copies in islice(groups.values(), k)}


def originals_first(hits: Hits, named: Collection[str] = ()) -> Hits:
    """Hits in their order, but of those with the same text, files named as copies come last, unless
    their names are asked for (``named``).
    """
    ordered = Hits(hits)
    for first, copies in distinct(hits, len(hits)).items():
        places = [first, *copies]
        same = sorted(
            (hits[place] for place in places),
            key=lambda hit: hit.id not in named and bool(_COPY.search(hit.id)),
        )
        for place, hit in zip(places, same, strict=True):
            at = hits[place]
            ordered[place] = replace(
                hit, score=at.score, confidence=at.confidence, explanation=at.explanation
            )
    return ordered


def hit_of(
    row: Mapping[str, Any],
    columns: Iterable[str],
    score: float = 0.0,
    confidence: float | None = None,
    explanation: Explanation | None = None,
) -> Hit:
    """A row of the table as a hit; ``columns`` are those of its metadata."""
    title, text = row["title"], without_title(row["title"], row["passage"])
    metadata = {name: row[name] for name in columns if not is_missing(row[name])}
    about = (row[name] for name in HIT_COLUMNS[4:])
    return Hit(
        row["id"], score, title, text, row["chunk"], metadata, confidence, explanation, *about
    )
