"""How well words and vectors know a corpus, measured without labels.

A few words of a sentence should find the passage that the sentence was removed from, once by BM25
and once by vectors. An embedder that was not trained for a language or a subject fails where words
succeed, and the fusion (fusion.py) follows the side that succeeds. From the scores of the fusion's
first hits, right and wrong, follows how much a score says (``fit_confidence``).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from revela.corpus.chunk import sentences
from revela.corpus.words import count_words, joined, words
from revela.index.bm25 import BM25
from revela.index.exact import top_k
from revela.index.fusion import DEPTH
from revela.index.manifest import Calibration
from revela.index.rerank_tokens import encode_packed
from revela.index.search import MemorySnapshot, Scores, fuse, rerank
from revela.index.table import shortened
from revela.types import Encoder, QueryTokens, TokenEncoder, Vectors, hash64

QUERIES = 200
QUERY_WORDS = 12  # at most
LEAST_WORDS = 4  # of a sentence, and of what is left


class SentenceTest:
    """Queries taken from passages, and how many of them BM25 answers; call it with the vectors of
    an encoder. ``language`` as for ``BM25``.
    """

    def __init__(self, passages: Sequence[str], language: str, queries: int = QUERIES) -> None:
        found = list(taken_out(passages, queries))
        self._places = np.array([place for place, _, _ in found], np.int64)
        self._queries = [query for _, query, _ in found]
        self._rests = [rest for _, _, rest in found]
        self._size, self._words = len(passages), 0
        if found:
            left = dict(zip(self._places.tolist(), self._rests, strict=True))
            self._texts = [left.get(i, passage) for i, passage in enumerate(passages)]
            self._bm25 = BM25(self._texts, language)
            self._matching = self._bm25.top_k(self._queries, DEPTH)
            best, scores = self._matching
            alone = scores[:, 0] > scores[:, 1] if len(passages) > 1 else scores[:, 0] > 0
            self._words = int(((best[:, 0] == self._places) & alone).sum())

    def __call__(
        self,
        encoder: Encoder,
        vectors_ND: Vectors,
        *,
        scored: bool = False,
        packed: Sequence[bytes] = (),
    ) -> Calibration:
        """Measure the unit vectors (N, D) of the passages; the encoder's may be wider. ``scored``:
        also what a score says, and with ``packed``, the signs of the passages' tokens, what one
        says after re-ranking by these.
        """
        least = getattr(encoder, "words_to_vectors", 1.0)
        if not self._queries:
            return Calibration(passages=self._size, least=least)
        width, left_ND, signs = vectors_ND.shape[1], vectors_ND.copy(), list(packed)
        tokens: list[QueryTokens] = []
        if packed and isinstance(encoder, TokenEncoder):
            rests_QD, rests = encode_packed(encoder, self._rests)
            tokens = encoder.query_tokens(self._queries)
            for place, rest in zip(self._places, rests, strict=True):
                signs[place] = rest
        else:
            rests_QD = encoder.encode_passages(self._rests)
        left_ND[self._places] = shortened(rests_QD, width)
        queries_QD = shortened(encoder.encode_queries(self._queries), width)
        nearest = top_k(queries_QD, left_ND, DEPTH)
        right = int((nearest[0][:, 0] == self._places).sum())
        measured = Calibration(len(self._queries), self._words, right, self._size, least)
        if not scored:
            return measured
        snapshot = MemorySnapshot(self._bm25, self._texts, left_ND, measured.odds, signs)
        fused = self._fused(snapshot, queries_QD, nearest)
        scores = {"hybrid": self._confidence(fused)}
        if tokens:
            again = zip(self._queries, fused, tokens, strict=True)
            scores["tokens"] = self._confidence([rerank(snapshot, *each) for each in again])
        return replace(measured, scores=scores)

    def _fused(
        self, snapshot: MemorySnapshot, queries_QD: Vectors, nearest: tuple[Any, Vectors]
    ) -> list[Scores]:
        """Each query's passages and scores, by vectors and words, best first."""
        sides = (
            [
                {int(row): float(score) for row, score in zip(*pair, strict=True) if score > least}
                for pair in zip(*found, strict=True)
            ]
            for found, least in ((nearest, -np.inf), (self._matching, 0.0))
        )
        queries = zip(self._queries, queries_QD, *sides, strict=True)
        return [fuse(snapshot, *query) for query in queries]

    def _confidence(self, found: Sequence[Scores]) -> tuple[float, float]:
        firsts = [next(iter(scores.items())) for scores in found]
        right_Q = np.array([row for row, _ in firsts]) == self._places
        return fit_confidence(np.array([score for _, score in firsts]), right_Q)


def fit_confidence(scores_Q: NDArray[Any], right_Q: NDArray[np.bool_]) -> tuple[float, float]:
    """Fit P(right) = 1 / (1 + exp(-slope (score - half))) to first hits, with Platt's targets
    (Platt, 1999): (half, slope), slope not below 0.
    """
    from scipy.optimize import minimize

    right, wrong = right_Q.sum(), (~right_Q).sum()
    target_Q = np.where(right_Q, (right + 1) / (right + 2), 1 / (wrong + 2))
    mean, spread = scores_Q.mean(), scores_Q.std() + 1e-6
    z_Q = (scores_Q - mean) / spread

    def loss(weights: NDArray[np.float64]) -> float:
        logit_Q = weights[0] * z_Q + weights[1]
        return float((np.logaddexp(0, logit_Q) - target_Q * logit_Q).mean())

    slope, bias = minimize(loss, np.array([1.0, 0.0]), bounds=[(1e-3, 1e3), (None, None)]).x
    return float(mean - bias / slope * spread), float(slope / spread)


def taken_out(passages: Sequence[str], most: int) -> Iterator[tuple[int, str, str]]:
    """(place of a passage, words of one of its sentences, the passage without that sentence). The
    draw depends on the texts, not on their order.
    """
    drawn, taken = [hash64(passage) for passage in passages], 0
    for place in sorted(range(len(passages)), key=drawn.__getitem__):
        if taken == most:
            return
        passage, rng = passages[place], random.Random(drawn[place])
        some = [text for text in sentences(passage) if count_words(text) >= LEAST_WORDS]
        sentence = rng.choice(some) if len(some) > 1 else _piece(passage, rng)
        rest = passage.replace(sentence, " ", 1)
        if count_words(sentence) >= LEAST_WORDS <= count_words(rest):
            taken += 1
            yield place, joined([_piece(sentence, rng, of=1)]), rest


def _piece(text: str, rng: random.Random, of: int = 2) -> str:
    """At most so many words in a row, and at most one part ``of`` the text."""
    some = words(text)
    size = min(QUERY_WORDS, len(some) // of)
    start = rng.randrange(len(some) - size + 1)
    return "".join(some[start : start + size])
