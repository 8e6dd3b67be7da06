"""Measure how well words and vectors find the documents of a corpus, without labels.

A few words of a sentence should find the document that the sentence was removed from, once by BM25
and once by vectors. An embedder that was not trained for a language or a subject fails where words
succeed, and the fusion (fusion.py) follows the side that succeeds. The scores of passages that do
not answer these queries give the confidence in hits (calibration.py).

Shapes: Q queries, N passages, K candidates of a query, D width of a vector.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from revela.encoders.base import TextEncoder
from revela.ranking.bm25 import BM25, term_weights
from revela.ranking.calibration import Calibration
from revela.ranking.exact import rankings_of, top_k
from revela.ranking.fusion import DEPTH, Owner, Scores, as_chance, best_chunks, by_length, chance_of
from revela.ranking.late_interaction import encode_packed, match_by_tokens
from revela.ranking.queries import part_queries, sentence_queries
from revela.ranking.steps import ALIKE, Confidence, MemoryStore, SearchOptions, runner_up
from revela.text.analyzer import Analyzer, detect
from revela.types import QueryTokens, Vectors, evenly_spaced, shortened

# Maximum number of queries; with fewer sentences than ``FEW``, parts of passages are added.
QUERIES, FEW = 400, 100
FEW_TOKENS = 50  # queries and passages that measure ``chance`` of token vectors
HELD = 0.7  # share of a query's terms above which a passage may contain its sentence
MIN_WRONG = 20  # minimum number of queries without an answer to measure a confidence
RERANKED = 100  # queries that also measure the confidence after re-ranking


class SentenceTest:
    """A test with queries taken from passages. Call it with an encoder and the passages' vectors.

    Args:
        passages: each begins with its title.
        language: as for ``BM25``.
        queries: maximum number of queries.
        titles: the title of each passage, from which no query is taken; by default none.
        documents: the document of each passage. A hit is right if it is from the query's document,
            or nearly equal to its passage; a query that cannot fail is left out. By default each
            passage is a document.
        lengths: the number of passages of each passage's document, including those that are not in
            ``passages``; by default 1.
    """

    def __init__(
        self,
        passages: Sequence[str],
        language: str,
        queries: int = QUERIES,
        *,
        titles: Sequence[str] = (),
        documents: Sequence[object] = (),
        lengths: Sequence[int] = (),
    ) -> None:
        documents = documents or range(len(passages))
        drawn, docstrings = sentence_queries(passages, queries, titles, documents)
        of_sentences = len(drawn)
        if of_sentences < min(FEW, queries):
            drawn |= part_queries(passages, queries - of_sentences, titles, drawn)
        self._size, self._words, self._queries = len(passages), 0, list[str]()
        # Of sentences, W / V below 1 says little (fusion.py).
        self._least = 0.0 if 2 * docstrings > len(drawn) else 1.0
        if not drawn:
            return
        asked, rests = zip(*drawn.values(), strict=True)
        self._passages, self._texts = passages, list(passages)
        for place, rest in zip(drawn, rests, strict=True):
            self._texts[place] = rest
        analyze = Analyzer(detect(self._texts) if language == "auto" else language)
        terms = [analyze(text) for text in self._texts]
        self._bm25 = BM25(self._texts, analyze.language, terms)
        places_Q = np.array([*drawn], np.int64)
        right_QN = _same_documents(places_Q, documents)
        self._owners = [*map(Owner, map(str, documents), lengths or [1] * len(passages))]
        self._terms = [
            frozenset(analyze(passage) if i in drawn else terms[i])
            for i, passage in enumerate(passages)
        ]
        right_QN |= _alike(places_Q, self._terms)
        can_fail = np.flatnonzero(~right_QN.all(axis=1))
        self._places, self._right_QN = places_Q[can_fail], right_QN[can_fail]
        self._queries = [asked[i] for i in can_fail]
        # Of the first queries; of the others, the passages are as they were.
        self._rests = [rests[i] for i in can_fail if i < of_sentences]
        self._matching = rows_QK, scores_QK = self._bm25.top_k(self._queries, DEPTH)
        right_QK = np.take_along_axis(self._right_QN, rows_QK, axis=1)
        best_Q, others_Q = (
            np.where(of, scores_QK, 0).max(axis=1, initial=0) for of in (right_QK, ~right_QK)
        )
        self._words = int((best_Q > others_Q).sum())

    def __call__(
        self,
        encoder: TextEncoder,
        vectors_ND: Vectors,
        *,
        by_tokens: bool = False,
        scored: bool = False,
        packed: Sequence[bytes] = (),
        progress: bool = False,
    ) -> Calibration:
        """Measure the unit vectors (N, D) of the passages; the encoder's may be wider.

        Args:
            by_tokens: also measure token vectors.
            scored: also measure the confidence by score, if there are enough sentences (halves of
                passages score higher than questions do).
            packed: signs of the passages' tokens, to measure the confidence after re-ranking, too.
            progress: show bars.
        """
        fitted = encoder.words_to_vectors
        least = fitted if fitted > 1 else self._least
        measured = Calibration(passages=self._size, least=least)
        if not self._queries:
            return replace(measured, chance=chance_of(vectors_ND))
        vectors_ND, width = vectors_ND.copy(), vectors_ND.shape[1]
        tokens = encoder.query_tokens(self._queries) if packed else []
        queries = [query.vector for query in tokens]
        encoded_QD = np.array(queries or encoder.encode_queries(self._queries, progress))
        queries_QD = shortened(encoded_QD, width)
        # A query that does not find its passage with the sentence does not find it without.
        is_found_Q = self._is_first_right(top_k(queries_QD, vectors_ND, 1)[0])
        cut = np.flatnonzero(is_found_Q[: len(self._rests)])
        if len(cut):
            rests_RD = encoder.encode_passages([self._rests[i] for i in cut], progress)
            vectors_ND[self._places[cut]] = shortened(rests_RD, width)
        nearest = top_k(queries_QD, vectors_ND, DEPTH)
        is_found_Q &= self._is_first_right(nearest[0])
        wrong_cosines = (queries_QD @ vectors_ND.T)[~self._right_QN]
        measured = replace(
            measured,
            queries=len(self._queries),
            words=self._words,
            vectors=int(is_found_Q.sum()),
            chance=as_chance(float(wrong_cosines.mean(dtype=np.float64))),
        )
        if by_tokens and not encoder.lacks_tokens:
            measured = replace(measured, tokens=self._chance_of_tokens(encoder, tokens, packed))
        if not scored:
            return measured
        store = MemoryStore(self._bm25, vectors_ND, measured.rule, packed)
        asked = self._queries, queries_QD, *self._unanswered(nearest)
        wrong = self._first_two(store.rankings(*asked))
        confidences = dict[str, Confidence]()
        if len(wrong) >= MIN_WRONG:
            confidences["none"] = Confidence.from_wrong_hits(wrong)
        rerank = SearchOptions(rerank="late-interaction")
        some = store.rankings(*asked, rerank, tokens[:RERANKED]) if confidences else []
        if len(after := self._first_two(some)) >= MIN_WRONG:
            before = Confidence.from_wrong_hits(wrong[: len(after)])
            scaled = confidences["none"].scaled(before, Confidence.from_wrong_hits(after))
            confidences["late-interaction"] = scaled
        return replace(measured, confidences=confidences)

    def _is_first_right(self, rows_QK: NDArray[np.int64]) -> NDArray[np.bool_]:
        """(Q,): whether the first row of each query is right."""
        return np.take_along_axis(self._right_QN, rows_QK[:, :1], axis=1)[:, 0]

    def _first_two(self, rankings: Sequence[Scores]) -> NDArray[np.float64]:
        """(Q, 2): the scores of the first document and of the best other one, for each query that
        finds any.
        """
        owner_of, found = self._owners.__getitem__, list[tuple[float, float]]()
        for ranking in filter(None, rankings):
            scores = by_length(best_chunks(ranking, owner_of), owner_of)
            first = next(iter(scores.values()))
            found.append((first, runner_up(scores, self._terms.__getitem__)))
        return np.array(found)

    def _chance_of_tokens(
        self, encoder: TextEncoder, tokens: Sequence[QueryTokens], signs: Sequence[bytes]
    ) -> float:
        """The mean m (late_interaction.py) of a few unrelated queries and passages."""
        rows, queries = evenly_spaced(len(self._texts), FEW_TOKENS), self._queries[:FEW_TOKENS]
        if signs:
            some = [signs[row] for row in rows]
        else:
            _, some = encode_packed(encoder, [self._passages[row] for row in rows])
        read = tokens[:FEW_TOKENS] or encoder.query_tokens(queries)
        terms, idf = self._bm25.terms, self._bm25.idf
        weights = [term_weights(query, terms, idf) for query in queries]
        found = [match_by_tokens(q, some, own) for q, own in zip(read, weights, strict=True)]
        return as_chance(float(np.mean(found)))

    def _unanswered(
        self, nearest: tuple[NDArray[np.int64], Vectors]
    ) -> tuple[list[Scores], list[Scores]]:
        """The wrong hits by vectors and by words of each query that is a sentence. Passages that
        have most words of the query are left out: they may be the same text in another form.
        """
        found = list[Scores](), list[Scores]()
        asked = zip(
            self._queries,
            self._right_QN,
            rankings_of(*nearest),
            rankings_of(*self._matching),
            strict=True,
        )
        for query, right_N, *sides in islice(asked, len(self._rests)):
            terms = {*self._bm25.terms(query)}
            wrong = {
                row
                for row in chain(*sides)
                if not right_N[row] and len(terms & self._terms[row]) < HELD * len(terms)
            }
            near, match = ({r: s for r, s in side.items() if r in wrong} for side in sides)
            found[0].append(near)
            found[1].append({row: score for row, score in match.items() if near and score > 0})
        return found


def _same_documents(places_Q: NDArray[np.int64], documents: Sequence[object]) -> NDArray[np.bool_]:
    """(Q, N): whether each passage is from the query's document. If one document, such as a book,
    has over half of all passages, each of its passages counts as a document.
    """
    sizes = Counter(documents)
    units = [(d, i if 2 * sizes[d] > len(documents) else -1) for i, d in enumerate(documents)]
    number = {unit: i for i, unit in enumerate(dict.fromkeys(units))}
    numbers_N = np.array([number[unit] for unit in units], np.int64)
    return np.equal(numbers_N[places_Q, None], numbers_N)


def _alike(places_Q: NDArray[np.int64], sets: Sequence[frozenset[str]]) -> NDArray[np.bool_]:
    """(Q, N): whether each passage and the query's passage have nearly the same terms
    (``are_alike``).
    """
    holders = defaultdict[str, list[int]](list)
    for row, found in enumerate(sets):
        for term in found:
            holders[term].append(row)
    sizes_N = np.array([len(found) for found in sets])
    alike_QN = np.zeros((len(places_Q), len(sets)), np.bool_)
    for own, place in zip(alike_QN, places_Q, strict=True):
        rows = [row for term in sets[place] for row in holders[term]]
        shared_N = np.bincount(np.array(rows, np.int64), minlength=len(sets))
        own[:] = shared_N >= ALIKE * np.maximum(sizes_N + sizes_N[place] - shared_N, 1)
    return alike_QN
