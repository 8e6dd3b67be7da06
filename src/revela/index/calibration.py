"""How well words and vectors know a corpus, measured without labels.

A few words of a sentence should find the passage that the sentence was removed from, once by BM25
and once by vectors. An embedder that was not trained for a language or a subject fails where words
succeed, and the fusion (fusion.py) follows the side that succeeds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np

from revela.corpus.chunk import sentences
from revela.corpus.words import count_words, joined, words
from revela.index.bm25 import BM25
from revela.index.manifest import Calibration
from revela.index.table import shortened
from revela.types import Encoder, Vectors, hash64

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
            texts = [left.get(i, passage) for i, passage in enumerate(passages)]
            best, scores = BM25(texts, language).top_k(self._queries, 2)
            alone = scores[:, 0] > scores[:, 1] if len(texts) > 1 else scores[:, 0] > 0
            self._words = int(((best[:, 0] == self._places) & alone).sum())

    def __call__(self, encoder: Encoder, vectors_ND: Vectors) -> Calibration:
        """Measure the unit vectors (N, D) of the passages; the encoder's may be wider."""
        least = getattr(encoder, "words_to_vectors", 1.0)
        if not self._queries:
            return Calibration(passages=self._size, least=least)
        width = vectors_ND.shape[1]
        left_ND = vectors_ND.copy()
        left_ND[self._places] = shortened(encoder.encode_passages(self._rests), width)
        queries_QD = shortened(encoder.encode_queries(self._queries), width)
        first_Q = (queries_QD @ left_ND.T).argmax(axis=1)
        right = int((first_Q == self._places).sum())
        return Calibration(len(self._queries), self._words, right, self._size, least)


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
