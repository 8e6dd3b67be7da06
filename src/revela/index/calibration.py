"""How well words and vectors know a corpus, measured without labels.

A few words of a sentence should find the passage that the sentence was removed from, once by BM25
and once by vectors. An embedder that was not trained for a language or a subject fails where words
succeed, and the fusion (fusion.py) follows the side that succeeds. The scores of wrong first hits
give the confidence in other hits (``confidence_from``).
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
from revela.index.exact import rankings_of, top_k
from revela.index.fusion import DEPTH
from revela.index.manifest import Calibration
from revela.index.rerankers.tokens import encode_packed
from revela.index.rows import shortened
from revela.index.search import MemorySnapshot, Scores, fuse, rerank
from revela.index.table import Table
from revela.types import Encoder, QueryTokens, TokenEncoder, Vectors, hash64

QUERIES = 200
QUERY_WORDS = 12  # maximum
MIN_WORDS = 4  # of a sentence, and of the rest of its passage
WRONG_QUANTILE, MIN_WRONG = 0.9, 20  # of wrong first hits; minimum number of these


class SentenceTest:
    """Queries taken from passages, and how many of them BM25 answers. Call it with an encoder and
    the vectors of the passages. ``language`` as for ``BM25``.
    """

    def __init__(self, passages: Sequence[str], language: str, queries: int = QUERIES) -> None:
        examples = list(sentence_queries(passages, queries))
        self._places = np.array([place for place, _, _ in examples], np.int64)
        self._queries = [query for _, query, _ in examples]
        self._rests = [rest for _, _, rest in examples]
        self._size, self._words = len(passages), 0
        if examples:
            rests = dict(zip(self._places.tolist(), self._rests, strict=True))
            self._texts = [rests.get(i, passage) for i, passage in enumerate(passages)]
            self._bm25 = BM25(self._texts, language)
            self._matching = self._bm25.top_k(self._queries, DEPTH)
            best, scores = self._matching
            is_untied = scores[:, 0] > scores[:, 1] if len(passages) > 1 else scores[:, 0] > 0
            self._words = int(((best[:, 0] == self._places) & is_untied).sum())

    def __call__(
        self,
        encoder: Encoder,
        vectors_ND: Vectors,
        *,
        scored: bool = False,
        packed: Sequence[bytes] = (),
    ) -> Calibration:
        """Measure the unit vectors (N, D) of the passages; the encoder's may be wider.

        ``scored`` also gives the confidence by score, and with ``packed``, the signs of the
        passages' tokens, that after re-ranking by tokens.
        """
        least = getattr(encoder, "words_to_vectors", 1.0)
        if not self._queries:
            return Calibration(passages=self._size, least=least)
        width, vectors_ND, signs = vectors_ND.shape[1], vectors_ND.copy(), list(packed)
        tokens: list[QueryTokens] = []
        if packed and isinstance(encoder, TokenEncoder):
            rests_QD, rests = encode_packed(encoder, self._rests)
            tokens = encoder.query_tokens(self._queries)
            queries_QD = np.array([query.vector for query in tokens])
            for place, rest in zip(self._places, rests, strict=True):
                signs[place] = rest
        else:
            rests_QD = encoder.encode_passages(self._rests)
            queries_QD = encoder.encode_queries(self._queries)
        vectors_ND[self._places] = shortened(rests_QD, width)
        queries_QD = shortened(queries_QD, width)
        nearest = top_k(queries_QD, vectors_ND, DEPTH)
        right = int((nearest[0][:, 0] == self._places).sum())
        measured = Calibration(len(self._queries), self._words, right, self._size, least)
        if not scored:
            return measured
        snapshot = MemorySnapshot(self._bm25, self._texts, vectors_ND, measured.odds, signs)
        fused = self._fused(snapshot, queries_QD, nearest)
        wrong = {"hybrid": self._wrong(fused)}
        if tokens:
            results = zip(self._queries, fused, tokens, strict=True)
            wrong["tokens"] = self._wrong([rerank(snapshot, *result) for result in results])
        scores = {how: confidence_from(w) for how, w in wrong.items() if len(w) >= MIN_WRONG}
        return replace(measured, scores=scores)

    def _fused(
        self, snapshot: MemorySnapshot, queries_QD: Vectors, nearest: tuple[Any, Vectors]
    ) -> list[Scores]:
        """Each query's passages and scores, by vectors and words, best first."""
        by_words = (
            {row: score for row, score in ranking.items() if score > 0}
            for ranking in rankings_of(*self._matching)
        )
        sides = rankings_of(*nearest), by_words
        queries = zip(self._queries, queries_QD, *sides, strict=True)
        return [fuse(snapshot, *query) for query in queries]

    def _wrong(self, rankings: Sequence[Scores]) -> NDArray[np.float64]:
        """The scores of wrong first passages."""
        firsts = [next(iter(scores.items())) for scores in rankings]
        pairs = zip(firsts, self._places, strict=True)
        return np.array([score for (row, score), place in pairs if row != place])


def calibrate(table: Table, encoder: Encoder) -> Calibration:
    """Measure words and vectors on a sample of an index's rows."""
    tokens = ["tokens"] if table.info.settings.keep_tokens else []
    rows = table.sample("passage", "vector", *tokens)
    test = SentenceTest(rows["passage"].to_pylist(), table.info.language or "en")
    packed = rows["tokens"].to_pylist() if tokens else []
    return test(encoder, table.vectors_in(rows), scored=True, packed=packed)


def confidence_from(wrong: NDArray[np.float64]) -> tuple[float, float]:
    """(half, slope) of ``Calibration.confidence``, from the scores of wrong first hits: their
    quantile, and one over their standard deviation.

    Hits for questions that a text does not answer rarely score higher; hits for questions that it
    answers mostly do (docs/results.md).
    """
    return float(np.quantile(wrong, WRONG_QUANTILE)), float(1 / max(wrong.std(), 1e-3))


def sentence_queries(passages: Sequence[str], max_queries: int) -> Iterator[tuple[int, str, str]]:
    """(place of a passage, words of one of its sentences, the passage without that sentence). The
    draw depends on the texts, not on their order.
    """
    seeds, count = [hash64(passage) for passage in passages], 0
    for place in sorted(range(len(passages)), key=seeds.__getitem__):
        if count == max_queries:
            return
        passage, rng = passages[place], random.Random(seeds[place])
        long = [text for text in sentences(passage) if count_words(text) >= MIN_WORDS]
        sentence = rng.choice(long) if len(long) > 1 else _piece(passage, rng)
        rest = passage.replace(sentence, " ", 1)
        if count_words(sentence) >= MIN_WORDS <= count_words(rest):
            count += 1
            yield place, joined([_piece(sentence, rng, of=1)]), rest


def _piece(text: str, rng: random.Random, of: int = 2) -> str:
    """Consecutive words: at most ``QUERY_WORDS``, and at most one part ``of`` the text."""
    pieces = words(text)
    size = min(QUERY_WORDS, len(pieces) // of)
    start = rng.randrange(len(pieces) - size + 1)
    return "".join(pieces[start : start + size])
