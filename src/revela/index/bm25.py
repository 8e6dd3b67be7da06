"""BM25 by bm25s, with Lucene's defaults: k1 1.2, b 0.75, words of any length, English stop words,
Snowball's English stemmer.

Chosen among fifteen settings on ten collections (docs/results.md), code among them: .686 on
SciFact, where .679 to .687 are published.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from revela.silence import waiting
from revela.types import Vectors

K1, B = 1.2, 0.75
WORD = r"(?u)\b\w+\b"  # one letter is a word too: x and i mean something in code
STOP_WORDS = re.findall(
    r"\w+",
    """a an and are as at be but by for if in into is it no not of on or such that the their then
    there these they this to was will with""",
)  # Lucene's


def best_score(frequencies_T: NDArray[np.int64], passages: int) -> float:
    """The greatest BM25 score that any text could have for a query: sum over its words of idf
    (k1 + 1), as if the text held nothing but them, without end (Bruch, Gai & Ingber, TOIS 2023,
    section 3).

    Args:
        frequencies_T: number of passages that hold each word of the query; a word that none holds
            weighs most.
        passages: number of passages.
    """
    return float((K1 + 1) * idf(frequencies_T, passages).sum())


def idf(frequencies_T: NDArray[np.int64], passages: int) -> NDArray[np.float64]:
    """Lucene's idf, (T,): log(1 + (N - df + 0.5) / (df + 0.5)). Arguments as above."""
    weights_T: NDArray[np.float64] = np.log1p(
        (passages - frequencies_T + 0.5) / (frequencies_T + 0.5)
    )
    return weights_T


class BM25:
    """A BM25 index over passages, in memory; it cannot be appended to.

    Example:
        >>> indices, scores = BM25(["the cat sat", "a dog ran"]).top_k(["dogs"], k=1)
        >>> indices.tolist()
        [[1]]
    """

    def __init__(self, passages: Sequence[str]) -> None:
        import bm25s

        # "atire" with Lucene's idf: Lucene's score times k1 + 1, as in LanceDB.
        self._index = bm25s.BM25(k1=K1, b=B, method="atire", idf_method="lucene")
        tokens = _tokenize(waiting("words for BM25", "text", passages))
        self.empty = not tokens.vocab or not any(len(ids) for ids in tokens.ids)
        self.size = len(passages)
        self._vocabulary = tokens.vocab
        held = [token for ids in tokens.ids for token in set(ids)]
        self._frequencies = np.bincount(np.array(held, np.int64), minlength=len(tokens.vocab))
        if not self.empty:
            self._index.index(tokens, show_progress=False)

    def top_k(self, queries: Sequence[str], k: int) -> tuple[NDArray[np.int64], Vectors]:
        """The k best passages of each query, best first: indices (Q, min(k, N)) and BM25 scores. A
        score of 0 is no match.
        """
        k = min(k, self.size)
        if self.empty:
            return np.tile(np.arange(k), (len(queries), 1)), np.zeros((len(queries), k), np.float32)
        tokens = _tokenize(queries, return_ids=False)
        indices, scores = self._index.retrieve(tokens, k=k, show_progress=False, n_threads=1)
        return np.asarray(indices, dtype=np.int64), np.asarray(scores, dtype=np.float32)

    def best(self, queries: Sequence[str]) -> Vectors:
        """(Q,): the greatest score that a passage could have for each query; 0 if all its words are
        stop words.
        """
        words = _tokenize(queries, return_ids=False)
        return np.array([best_score(self.frequencies(w), self.size) for w in words], np.float32)

    def frequencies(self, words: Sequence[str]) -> NDArray[np.int64]:
        """(T,): how many passages hold each of these words, given in lower case and stemmed."""
        known, counts = self._vocabulary, self._frequencies
        return np.array([counts[known[word]] if word in known else 0 for word in words], np.int64)


def _tokenize(texts: Iterable[str], return_ids: bool = True) -> Any:
    import bm25s
    import Stemmer

    stemmer = Stemmer.Stemmer("english")  # a new one per call: threads may not share one
    return bm25s.tokenize(
        texts,
        token_pattern=WORD,
        stopwords=STOP_WORDS,
        stemmer=stemmer,
        return_ids=return_ids,
        show_progress=False,
    )
