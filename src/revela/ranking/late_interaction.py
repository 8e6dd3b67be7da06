"""Re-rank by late interaction of the retriever's own token vectors.

    m(q, d)     = sum_t idf(t) max_j <q_t, sign(d_j)> / sqrt(W) / sum_t idf(t)

    score(q, d) = (c + w s + 0.75 n) / (1 + w + 0.75)        n = (m - chance) / (1 - chance)

over the tokens t of the query and j of the passage; c, w and s as in fusion.py. ``chance`` is the
mean m of a query and an unrelated passage, so that n is a third similarity from 0 to 1, besides
those by vectors and by words. Where the vectors know little, and words weigh much, the tokens of
the same retriever weigh little.

This is ColBERT's MaxSim (Khattab & Zaharia, SIGIR 2020), untrained. One bit per number is as good
as floats, so that an index can keep the token vectors.

Shapes: N texts, D numbers of a text's vector; T tokens of a query, J of a passage, W numbers of a
token's vector, X bytes of its signs; B passages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from revela.encoders.base import TextEncoder
from revela.ranking.bm25 import Weight
from revela.ranking.fusion import best_first
from revela.terminal import progress_bar
from revela.types import QueryTokens, Vectors

Item = TypeVar("Item")
TOKENS_WEIGHT = 0.75  # of n, where the vectors' is 1
TOKENS_DEPTH = 50  # results of a search that are re-ranked
PART = 1024  # passages whose token vectors are in memory together


def packed_signs(tokens_JW: Vectors) -> bytes:
    """The signs of token vectors, one bit per number."""
    return np.packbits(tokens_JW > 0, axis=1).tobytes()


def encode_packed(
    encoder: TextEncoder, texts: Sequence[str], progress: bool = False
) -> tuple[Vectors, list[bytes]]:
    """The vectors (N, D) of passages, and ``packed_signs`` of each one's token vectors."""
    vectors, packed = [], list[bytes]()
    parts = range(0, len(texts), PART)
    for start in progress_bar("encoding passages", "part", parts) if progress else parts:
        vectors_ND, tokens = encoder.encode_with_tokens(texts[start : start + PART])
        vectors.append(vectors_ND)
        packed += map(packed_signs, tokens)
    return np.concatenate(vectors), packed


def rerank_by_tokens(
    scores: Mapping[Item, float], similarity_of: Mapping[Item, float], vectors: float = 1.0
) -> dict[Item, float]:
    """score(q, d) of each result, best first.

    Args:
        scores: c or the fused scores.
        similarity_of: n of the results whose tokens are compared; 0 for the others.
        vectors: weight of the vectors in the scores, 1 / (1 + w).
    """
    weight = TOKENS_WEIGHT * vectors
    return best_first(
        {
            item: (score + weight * similarity_of.get(item, 0.0)) / (1 + weight)
            for item, score in scores.items()
        }
    )


def match_by_tokens(
    query: QueryTokens, signs: Sequence[bytes], weights: Sequence[Weight]
) -> NDArray[np.float64]:
    """m(q, d) of each passage, (B,)."""
    return late_interaction(query.tokens, token_weights(query.spans, weights), signs)


def late_interaction(
    query_TW: Vectors, weight_T: NDArray[np.float64], signs: Sequence[bytes]
) -> NDArray[np.float64]:
    """m(q, d) of each passage, (B,); 0 for a passage without tokens, or if all weights are 0."""
    width = query_TW.shape[1]
    scores_B, total = np.zeros(len(signs)), weight_T.sum()
    if not total:
        return scores_B
    for i, packed in enumerate(signs):
        if packed:
            bits_JX = np.frombuffer(packed, np.uint8).reshape(-1, -(-width // 8))
            signs_JW = np.unpackbits(bits_JX, axis=1, count=width) * np.float32(2) - 1
            scores_B[i] = weight_T @ (query_TW @ signs_JW.T).max(axis=1) / total / np.sqrt(width)
    return scores_B


def token_weights(
    spans: Sequence[tuple[int, int]], weights: Sequence[Weight]
) -> NDArray[np.float64]:
    """The weight of each token of a query, (T,): the maximum over the terms that it overlaps."""

    def weight_of(begin: int, end: int) -> float:
        met = (weight for first, past, weight in weights if first < end and begin < past)
        return max(met, default=0.0)

    return np.array([weight_of(begin, end) for begin, end in spans], np.float64)
