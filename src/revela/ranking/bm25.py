"""BM25 over the terms of text/analyzer.py, with Lucene's idf and defaults (k1 1.2, b 0.75):

    BM25(q, d) = sum_t idf(t) (k1 + 1) tf / (tf + k1 (1 - b + b |d| / mean |d|))

Terms are stored in memory (``BM25``, by bm25s) or in the table of an index (by LanceDB, whose state
adds the counts of terms that LanceDB does not give).

nDCG@10 on SciFact is 0.695; published figures are 0.679 to 0.687. research/notebook.md has other
settings and languages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from revela.quiet_libraries import without
from revela.ranking.exact import ranking_of, rankings_of
from revela.terminal import progress_bar
from revela.text.analyzer import CORPUS_WORDS, Analyzer, detect
from revela.types import Vectors, hash64

K1, B = 1.2, 0.75
Weight = tuple[int, int, float]
"""Begin and end of a term in the query, and its idf."""

cached_hash = lru_cache(CORPUS_WORDS)(hash64)


def idf(
    frequencies_T: NDArray[np.int64] | NDArray[np.float64], passages: int
) -> NDArray[np.float64]:
    """Lucene's idf of terms in N passages, (T,): log(1 + (N - df + 0.5) / (df + 0.5))."""
    odds_T = (passages - frequencies_T + 0.5) / (frequencies_T + 0.5)
    return np.asarray(np.log1p(odds_T), np.float64)


def max_score(idf_T: Sequence[float] | NDArray[np.float64]) -> float:
    """The maximum BM25 score for a query of terms with these idf: sum of idf (k1 + 1), the limit as
    term frequency grows (Bruch, Gai & Ingber, TOIS 2023, section 3).
    """
    return float((K1 + 1) * np.sum(idf_T))


def term_weights(
    query: str, terms: Analyzer, idf: Callable[[Sequence[str]], NDArray[np.float64]]
) -> list[Weight]:
    """Begin, end and idf of each term of a query."""
    places = list(terms.query_places(query))
    weights = idf([term for _, _, term in places]).tolist()
    return [(begin, end, weight) for (begin, end, _), weight in zip(places, weights, strict=True)]


@dataclass(frozen=True)
class TermCounts:
    """The number of chunks that hold each term: sorted hashes of terms, and counts. The state of an
    index keeps them.
    """

    chunks: int
    hashes: NDArray[np.uint64]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, terms: Iterable[Sequence[str]]) -> TermCounts:
        """Count the terms of each chunk."""
        counts, chunks = Counter[int](), 0
        for chunk in terms:
            chunks += 1
            counts.update(set(map(cached_hash, chunk)))
        hashes = np.fromiter(counts.keys(), np.uint64, len(counts))
        order = np.argsort(hashes)
        numbers = np.fromiter(counts.values(), np.int64, len(counts))
        return cls(chunks, hashes[order], numbers[order])


class BM25:
    """A BM25 index over texts in memory.

    Args:
        texts: the texts.
        language: as for ``Analyzer``, or "auto".
        terms: the terms of each text in this language, if known.

    Example:
        >>> indices, scores = BM25(["the cat sat", "a dog ran"], "en").top_k(["dogs"], k=1)
        >>> indices.tolist()
        [[1]]
    """

    def __init__(
        self,
        texts: Sequence[str],
        language: str = "auto",
        terms: Iterable[Sequence[str]] | None = None,
    ) -> None:
        with without("jax"):  # bm25s would start it, and it takes three quarters of a GPU's memory
            import bm25s
            from bm25s.tokenization import Tokenized

        self.terms = Analyzer(detect(texts) if language == "auto" else language)
        self.size = len(texts)
        if terms is None:
            terms = map(self.terms, progress_bar("words for BM25", "text", texts))
        self._vocabulary: dict[str, int] = {}
        number = self._vocabulary.setdefault
        ids = [[number(term, len(self._vocabulary)) for term in text] for text in terms]
        held = [token for text in ids for token in set(text)]
        self._frequencies = np.bincount(np.array(held, np.int64), minlength=len(self._vocabulary))
        # "atire" with Lucene's idf: Lucene's score times k1 + 1, as in LanceDB.
        self._index = bm25s.BM25(k1=K1, b=B, method="atire", idf_method="lucene")
        if self._vocabulary:
            self._index.index(Tokenized(ids=ids, vocab=self._vocabulary), show_progress=False)

    def top_k(self, queries: Sequence[str], k: int) -> tuple[NDArray[np.int64], Vectors]:
        """The k best texts of each query, best first: indices (Q, min(k, N)) and BM25 scores. A
        score of 0 means no match.
        """
        k = min(k, self.size)
        indices = np.tile(np.arange(k), (len(queries), 1))
        scores = np.zeros((len(queries), k), np.float32)
        known = [self.known(self.terms.of_query(query)) for query in queries]
        if matching := [i for i, terms in enumerate(known) if terms]:
            found = self._index.retrieve(
                [known[i] for i in matching], k=k, show_progress=False, n_threads=1
            )
            indices[matching], scores[matching] = found
        return indices, scores

    def rankings(
        self, queries: Sequence[str], k: int, among: Sequence[Sequence[int]] | None = None
    ) -> list[dict[int, float]]:
        """{text: score} for each query, best first: the k best texts that share a word with it, or
        all such texts of those given for it in ``among``.
        """
        if among is None:
            found = rankings_of(*self.top_k(queries, k))
        else:
            known = (self.known(self.terms.of_query(query)) for query in queries)
            none_N = np.zeros(self.size, np.float32)
            scores = (self._index.get_scores(terms) if terms else none_N for terms in known)
            found = [ranking_of(rows, s[[*rows]]) for rows, s in zip(among, scores, strict=True)]
        return [{text: score for text, score in one.items() if score > 0} for one in found]

    def known(self, terms: Iterable[str]) -> list[str]:
        """Those of these terms that occur in the texts."""
        return [term for term in terms if term in self._vocabulary]

    def idf(self, terms: Sequence[str]) -> NDArray[np.float64]:
        """The idf of each of these terms, (T,)."""
        known, counts = self._vocabulary, self._frequencies
        held = [counts[known[term]] if term in known else 0 for term in terms]
        return idf(np.array(held, np.int64), self.size)
