"""Order the first documents of a search again, without labels.

By late interaction between the retriever's own token vectors (``with_tokens``), no other model:

    m(q, d)     = sum_t idf(t) max_j <q_t, sign(d_j)> / sqrt(W) / sum_t idf(t)

    score(q, d) = (fused(q, d) + c m(q, d)) / (1 + c)                c = 0.75 min(1, (V / W)^2)

over the tokens t of the query and j of the passage; V / W as in fusion.py, for where vectors do not
know a text, neither do those of its tokens. One vector has to hold all of a passage; its
tokens still know what each word of the query meets in it (MaxSim of ColBERT, Khattab & Zaharia,
SIGIR 2020, which trains for it; here nothing is trained). One bit per number finds as much as whole
numbers do (research/notebook.md), so an index can keep them: ``Indexing.keep_tokens``. A word's
weight is its idf in BM25.

By a listwise re-ranker (``with_reranker``) that gives scores s, such as the heads of an LM
(listwise.py): in the order of

    z(fused(q, d)) + w z(s(q, d))

where z subtracts the mean and divides by the standard deviation, over these documents. The fused
scores stay as they are and are given out anew: the greatest to the first in the new order, and so
on. So they can be read as before, and what the re-ranker has not read keeps its place below.

Shapes: T tokens of a query, J of a passage, W numbers of a token's vector, B passages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from revela.index.language import Terms
from revela.types import QueryTokens, Reranker, TokenEncoder, Vectors

Item = TypeVar("Item")
Weight = tuple[int, int, float]
Idf = Callable[[Sequence[str]], NDArray[np.float64]]
Rerank = Literal["tokens", "heads"]
"""A re-ranker by name."""
Reranking = Literal["tokens"] | Reranker
"""A re-ranker whose LM, if it has one, is loaded."""
RERANKED = 50  # documents that are ordered again by their tokens
WEIGHT = 0.75  # greatest c
READ, READ_WEIGHT = 20, 0.25  # documents that a listwise re-ranker reads; w
PART = 1024  # passages whose token vectors are in memory at once


def packed_signs(tokens_JW: Vectors) -> bytes:
    """The signs of token vectors, one bit per number."""
    return np.packbits(tokens_JW > 0, axis=1).tobytes()


def encode_packed(encoder: TokenEncoder, texts: Sequence[str]) -> tuple[Vectors, list[bytes]]:
    """The vectors (N, D) of passages, and ``packed_signs`` of each one's token vectors."""
    vectors, packed = [], list[bytes]()
    for start in range(0, len(texts), PART):
        vectors_ND, tokens = encoder.encode_with_tokens(texts[start : start + PART])
        vectors.append(vectors_ND)
        packed += [packed_signs(tokens_JW) for tokens_JW in tokens]
    return np.concatenate(vectors), packed


def late_interaction(
    query_TW: Vectors, weight_T: NDArray[np.float64], passages: Sequence[bytes]
) -> NDArray[np.float64]:
    """m(q, d) of each passage, (B,); 0 for a passage without tokens, and if all weights are 0.

    Args:
        query_TW: the query's token vectors, of length one.
        weight_T: weight of each token.
        passages: ``packed_signs`` of each passage.
    """
    width = query_TW.shape[1]
    scores_B, total = np.zeros(len(passages)), weight_T.sum()
    if not total:
        return scores_B
    for i, packed in enumerate(passages):
        if packed:
            bits_JX = np.frombuffer(packed, np.uint8).reshape(-1, -(-width // 8))
            signs_JW = np.unpackbits(bits_JX, axis=1, count=width) * np.float32(2) - 1
            scores_B[i] = weight_T @ (query_TW @ signs_JW.T).max(axis=1) / total / np.sqrt(width)
    return scores_B


def with_tokens(
    query: QueryTokens,
    scores: Sequence[float],
    passages: Sequence[bytes],
    weights: Sequence[Weight],
    odds: float = 1.0,
) -> list[float]:
    """score(q, d) of the passages that a search found.

    Args:
        query: of the search, as the encoder reads it that made the signs.
        scores: fused scores of the passages.
        passages: ``packed_signs`` of the first of them; for the others m is 0.
        weights: of the query's terms (``term_weights``).
        odds: max(1, W / V)^2 of the corpus.
    """
    c = WEIGHT / max(1.0, odds)
    weight_T = token_weights(query.spans, weights)
    matched_B = late_interaction(query.tokens, weight_T, passages)
    matched_B = np.append(matched_B, np.zeros(len(scores) - len(matched_B)))
    return [
        (score + c * matched) / (1 + c)
        for score, matched in zip(scores, matched_B.tolist(), strict=True)
    ]


def term_weights(query: str, terms: Terms, idf: Idf) -> list[Weight]:
    """Begin, end and BM25 idf of each term of a query."""
    places = list(terms.places(query))
    weights = idf([term for _, _, term in places]).tolist()
    return [(begin, end, weight) for (begin, end, _), weight in zip(places, weights, strict=True)]


def token_weights(
    spans: Sequence[tuple[int, int]], weights: Sequence[Weight]
) -> NDArray[np.float64]:
    """(T,): the weight of each token of a query: the greatest of the terms that it is a part of, 0
    if of none.
    """

    def weight_of(begin: int, end: int) -> float:
        met = (weight for first, past, weight in weights if first < end and begin < past)
        return max(met, default=0.0)

    return np.array([weight_of(begin, end) for begin, end in spans], np.float64)


def with_reranker(
    query: str,
    scores: Mapping[Item, float],
    passages: Sequence[str],
    reranker: Reranker,
    weight: float = READ_WEIGHT,
) -> dict[Item, float]:
    """The same documents and the same scores, best first, with the first documents reordered.

    Args:
        query: of the search.
        scores: fused scores of the documents that were found, best first.
        passages: of the first ``READ`` documents.
        reranker: gives s.
        weight: w.
    """
    if not passages:
        return dict(scores)
    found = list(scores)
    fused_B = np.array(list(scores.values())[: len(passages)])
    read_B = reranker.score(query, passages)
    order_B = np.argsort(-_standard(fused_B) - weight * _standard(read_B), kind="stable")
    ordered = [*(found[i] for i in order_B), *found[len(passages) :]]
    return dict(zip(ordered, scores.values(), strict=True))


def _standard(scores_B: NDArray[np.float64]) -> NDArray[np.float64]:
    """z: standard scores; zeros where all are equal."""
    standard_B: NDArray[np.float64] = (scores_B - scores_B.mean()) / max(scores_B.std(), 1e-12)
    return standard_B
