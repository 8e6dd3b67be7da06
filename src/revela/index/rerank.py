"""Order what was found again, without labels: by late interaction, or by the attention of an LM
that reads it.

Late interaction between the retriever's own token vectors (``with_tokens``), no other model:

    m(q, d)     = sum_t idf(t) max_j <q_t, sign(d_j)> / sqrt(W) / sum_t idf(t)        over the
    tokens t of the query, j of the passage score(q, d) = (fused(q, d) + c m(q, d)) / (1 + c)

One vector has to say all of a passage; its tokens still know what each word of the query meets in
it (MaxSim, of ColBERT, Khattab & Zaharia, SIGIR 2020, which trains for it; here nothing is
trained). One bit a number finds as much as whole numbers do (docs/log.md), so an index can keep
them: ``Indexing.keep_tokens``. A word weighs as it does in BM25.

A listwise re-ranker (``with_reranker``), such as the heads of an LM (listwise.py), orders the first
documents by

    z(fused(q, d)) + w z(s(q, d))

z takes the mean off and divides by the standard deviation, over these documents. The greatest of
their fused scores goes to the first in the new order, and so on down: scores can be read as before,
and what the LM has not read keeps its place below.

Shapes: T tokens of a query, J of a passage, W numbers of a token's vector, B passages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from revela.index.statistics import WORD
from revela.types import Reranker, TokenEncoder, Vectors

Item = TypeVar("Item")
Rerank = Literal["tokens", "heads"]
"""What a user asks for."""
Reranking = Literal["tokens"] | Reranker
"""What search is given: an LM that is asked for by its heads is loaded by then."""
RERANKED = 50  # documents that are ordered again by their tokens
WEIGHT = 0.75  # c
READ, READ_WEIGHT = 20, 0.25  # documents that an LM reads; w
PART = 1024  # passages whose token vectors are held at a time


def packed_signs(tokens_JW: Vectors) -> bytes:
    """The signs of token vectors, one bit a number."""
    return np.packbits(tokens_JW > 0, axis=1).tobytes()


def encode_packed(encoder: TokenEncoder, texts: Sequence[str]) -> tuple[Vectors, list[bytes]]:
    """The vectors of passages, and ``packed_signs`` of each; a part of them at a time, as whole
    token vectors are large.
    """
    vectors, packed = [], list[bytes]()
    for start in range(0, len(texts), PART):
        vectors_ND, tokens = encoder.encode_with_tokens(texts[start : start + PART])
        vectors.append(vectors_ND)
        packed += [packed_signs(tokens_JW) for tokens_JW in tokens]
    return np.concatenate(vectors), packed


def late_interaction(
    query_TW: Vectors, weight_T: NDArray[np.float64], passages: Sequence[bytes]
) -> NDArray[np.float64]:
    """m of each passage, (B,); 0 for a passage without tokens, and for a query without any that
    counts.

    Args:
        query_TW: the query's token vectors, of length one.
        weight_T: what each counts.
        passages: ``packed_signs`` of each.
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
    query: str,
    scores: Sequence[float],
    passages: Sequence[bytes],
    encoder: TokenEncoder,
    idf: Callable[[str], float],
) -> list[float]:
    """score(q, d) of passages that were found.

    Args:
        query: what was looked for.
        scores: their fused scores.
        passages: their ``packed_signs``; one that is cut off (past the first ``RERANKED``) counts
            as if nothing met.
        encoder: the index's own.
        idf: of a word of the query, in lower case.
    """
    query_TW, spans = encoder.query_tokens(query)
    matched_B = late_interaction(query_TW, token_weights(query, spans, idf), passages)
    matched_B = np.append(matched_B, np.zeros(len(scores) - len(matched_B)))
    return [
        (score + WEIGHT * matched) / (1 + WEIGHT)
        for score, matched in zip(scores, matched_B.tolist(), strict=True)
    ]


def token_weights(
    query: str, spans: Sequence[tuple[int, int]], idf: Callable[[str], float]
) -> NDArray[np.float64]:
    """(T,): what each token of a query counts, the idf of the word that it is a part of; 0 if it is
    of none.
    """
    words = [(word.start(), word.end(), idf(word.group().lower())) for word in WORD.finditer(query)]
    return np.array(
        [
            max(
                (weight for first, past, weight in words if first < end and begin < past),
                default=0.0,
            )
            for begin, end in spans
        ],
        np.float64,
    )


def with_reranker(
    query: str,
    scores: Mapping[Item, float],
    passages: Sequence[str],
    reranker: Reranker,
    weight: float = READ_WEIGHT,
) -> dict[Item, float]:
    """The same documents and the same scores, best first, with the first of them in another order.

    Args:
        query: what was looked for.
        scores: fused scores of the documents that were found, best first.
        passages: what to read of the first ``READ`` of them.
        reranker: gives s.
        weight: w.
    """
    if not passages:
        return dict(scores)
    found = list(scores)
    fused_B = np.array(list(scores.values())[: len(passages)])
    order_B = np.argsort(
        -_standard(fused_B) - weight * _standard(reranker.score(query, passages)), kind="stable"
    )
    return dict(
        zip([*(found[i] for i in order_B), *found[len(passages) :]], scores.values(), strict=True)
    )


def _standard(scores_B: NDArray[np.float64]) -> NDArray[np.float64]:
    """z: standard scores; zeros where all are equal."""
    standard_B: NDArray[np.float64] = (scores_B - scores_B.mean()) / max(scores_B.std(), 1e-12)
    return standard_B
