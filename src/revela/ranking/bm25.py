"""BM25 over the terms of text/analyzer.py, with Lucene's defaults (k1 1.2, b 0.75): of texts in
memory, by bm25s; and what the fusion needs and LanceDB does not give, by counts of terms
(searching/state.py).

nDCG@10 on SciFact is .695; .679 to .687 are published. research/notebook.md has other settings and
languages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from revela.terminal import progress_bar
from revela.text.analyzer import CORPUS_WORDS, Analyzer, detect
from revela.types import Vectors, hash64

K1, B = 1.2, 0.75

cached_hash = lru_cache(CORPUS_WORDS)(hash64)


def idf(frequencies_T: NDArray[np.int64], passages: int) -> NDArray[np.float64]:
    """Lucene's idf of terms in N passages, (T,): log(1 + (N - df + 0.5) / (df + 0.5))."""
    odds_T = (passages - frequencies_T + 0.5) / (frequencies_T + 0.5)
    return np.asarray(np.log1p(odds_T), np.float64)


def max_score(frequencies_T: NDArray[np.int64], passages: int) -> float:
    """The maximum BM25 score for a query: sum of idf (k1 + 1), the limit as term frequency grows
    (Bruch, Gai & Ingber, TOIS 2023, section 3).
    """
    return float((K1 + 1) * idf(frequencies_T, passages).sum())


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
    """A BM25 index over passages, in memory; ``language`` as for ``Analyzer``, or "auto".

    Example:
        >>> indices, scores = BM25(["the cat sat", "a dog ran"], "en").top_k(["dogs"], k=1)
        >>> indices.tolist()
        [[1]]
    """

    def __init__(self, passages: Sequence[str], language: str = "auto") -> None:
        import bm25s
        from bm25s.tokenization import Tokenized

        self.terms = Analyzer(detect(passages) if language == "auto" else language)
        self.size = len(passages)
        self._vocabulary: dict[str, int] = {}
        number = self._vocabulary.setdefault
        ids = [
            [number(term, len(self._vocabulary)) for term in self.terms(passage)]
            for passage in progress_bar("words for BM25", "text", passages)
        ]
        held = [token for passage in ids for token in set(passage)]
        self._frequencies = np.bincount(np.array(held, np.int64), minlength=len(self._vocabulary))
        # "atire" with Lucene's idf: Lucene's score times k1 + 1, as in LanceDB.
        self._index = bm25s.BM25(k1=K1, b=B, method="atire", idf_method="lucene")
        if self._vocabulary:
            self._index.index(Tokenized(ids=ids, vocab=self._vocabulary), show_progress=False)

    def top_k(self, queries: Sequence[str], k: int) -> tuple[NDArray[np.int64], Vectors]:
        """The k best passages of each query, best first: indices (Q, min(k, N)) and BM25 scores. A
        score of 0 is no match.
        """
        k = min(k, self.size)
        indices = np.tile(np.arange(k), (len(queries), 1))
        scores = np.zeros((len(queries), k), np.float32)
        known = [
            [t for t in self.terms.of_query(query) if t in self._vocabulary] for query in queries
        ]
        if matching := [i for i, terms in enumerate(known) if terms]:
            found = self._index.retrieve(
                [known[i] for i in matching], k=k, show_progress=False, n_threads=1
            )
            indices[matching], scores[matching] = found
        return indices, scores

    def max_scores(self, queries: Sequence[str]) -> Vectors:
        """``max_score`` of each query, (Q,); 0 if it has stop words only."""
        asked = ([term for *_, term in self.terms.query_places(query)] for query in queries)
        best = [max_score(self.frequencies(terms), self.size) for terms in asked]
        return np.array(best, np.float32)

    def idf(self, terms: Sequence[str]) -> NDArray[np.float64]:
        """The idf of each of these terms, (T,)."""
        return idf(self.frequencies(terms), self.size)

    def frequencies(self, terms: Sequence[str]) -> NDArray[np.int64]:
        """The number of passages with each of these terms, (T,)."""
        known, counts = self._vocabulary, self._frequencies
        return np.array([counts[known[term]] if term in known else 0 for term in terms], np.int64)
