"""How well words and vectors know a corpus, measured without labels.

A few words of a sentence should find the passage that the sentence was taken out of, among the
others: once by BM25, once by the vectors. An embedder that was not trained for a language or a
subject fails where words succeed, and the fusion (fusion.py) follows the side that succeeds.

docs/results.md has which test, how many queries and which rule were compared.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from revela.corpus.chunk import sentences
from revela.corpus.words import count_words, joined, words
from revela.index.bm25 import BM25
from revela.types import Encoder, Vectors, hash64

QUERIES = 200
QUERY_WORDS = 12  # at most
LEAST_WORDS = 4  # of a sentence, and of what is left
PRIOR = 5  # queries that both sides are taken to have found, so that few queries say little


@dataclass(frozen=True)
class Calibration:
    """How often a piece of a sentence found its passage first.

    Args:
        queries: how many were asked; 0 if the passages have too few sentences.
        words: found by BM25.
        vectors: found by the vectors.
        passages: in the index when it was measured.
        least: how much oftener words are taken to find a passage, at least: more than 1 for a
            retriever that was fitted to text (retriever/fit.py), as it knows the sentences of that
            text better than what is asked about it.
    """

    queries: int = 0
    words: int = 0
    vectors: int = 0
    passages: int = 0
    least: float = 1.0

    @property
    def ratio(self) -> float:
        """How much oftener words found the passage; not below ``least``."""
        return max(self.least, (self.words + PRIOR) / (self.vectors + PRIOR))

    @property
    def odds(self) -> float:
        """How much more BM25's share of the best score counts than a cosine: the square of
        ``ratio``, 1 at least.
        """
        return self.ratio**2

    def describe(self) -> str:
        """What was measured, and what follows from it."""
        if not self.queries:
            return "the passages have too few sentences to tell whether words or vectors know them"
        by_words, by_vectors = (
            round(100 * found / self.queries) for found in (self.words, self.vectors)
        )
        text = (
            f"a piece of a sentence finds its passage first by words in {by_words} of 100 cases, "
            f"and by vectors in {by_vectors}"
        )
        if self.odds > 16:
            text += (
                ": this embedder does not know this text, and searches go by words; give another "
                "--model, or train one (docs/languages.md)"
            )
        return text


def calibrate(
    passages: Sequence[str], vectors_ND: Vectors, encoder: Encoder, language: str
) -> Calibration:
    """Measure both sides.

    Args:
        passages: texts, (N,).
        vectors_ND: of them, of length one.
        encoder: that made the vectors.
        language: of the words, as ``BM25`` takes it.
    """
    return SentenceTest(passages, language)(encoder, vectors_ND)


class SentenceTest:
    """The queries of a corpus, with what BM25 finds; to be called with the vectors of encoders.

    Args:
        passages: texts.
        language: of the words, as ``BM25`` takes it.
        queries: most of them.
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
        """Measure the vectors (N, D) of these passages."""
        least = getattr(encoder, "words_to_vectors", 1.0)
        if not self._queries:
            return Calibration(passages=self._size, least=least)
        width = vectors_ND.shape[1]
        left_ND = vectors_ND.copy()
        left_ND[self._places] = _of_width(encoder.encode_passages(self._rests), width)
        queries_QD = _of_width(encoder.encode_queries(self._queries), width)
        first_Q = (queries_QD @ left_ND.T).argmax(axis=1)
        right = int((first_Q == self._places).sum())
        return Calibration(len(self._queries), self._words, right, self._size, least)


def _of_width(vectors_ND: Vectors, width: int) -> Vectors:
    """The first numbers of vectors, of length one again."""
    cut_ND = vectors_ND[:, :width]
    norms_N1 = np.linalg.norm(cut_ND, axis=1, keepdims=True)
    return np.asarray(cut_ND / np.maximum(norms_N1, 1e-12), np.float32)


def taken_out(passages: Sequence[str], most: int) -> Iterator[tuple[int, str, str]]:
    """(place of a passage, words of one of its sentences, the passage without that sentence); drawn
    by the passages' texts, so that their order does not matter.
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
