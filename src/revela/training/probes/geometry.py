"""Measure the geometry of a model's vectors: alignment, uniformity, anisotropy, effective rank.

- Alignment and uniformity (Wang & Isola, ICML 2020, section 4.1; alpha 2, t 2): how near a query is
  to its passage, and how evenly passages cover the sphere; lower is better. Uniformity is also
  measured over queries and passages together, as in DREAM (figure 4).
- Anisotropy (Ethayarajh, EMNLP 2019): the mean cosine of two passages; 0 is isotropic.
- Effective rank (Roy & Vetterli, EUSIPCO 2007): exp of the entropy of the singular values; at most
  the smaller of N and D.

Shapes: N pairs, D width of the vectors.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from revela.encoders.base import TextEncoder
from revela.errors import RevelaError
from revela.evaluation.collection import Collection
from revela.text.chunk import chunk
from revela.text.words import joined, words
from revela.types import Document, Vectors, unit

MIN_WORDS, MAX_WORDS = 40, 120  # per chunk; its halves are a pair

Pair = tuple[str, str]


@dataclass(frozen=True)
class Geometry:
    """The measures, on ``pairs`` pairs of vectors of width ``width``."""

    alignment: float
    uniformity: float
    uniformity_of_both: float
    anisotropy: float
    effective_rank: float
    pairs: int
    width: int


def pairs_of_collection(collection: Collection, count: int, seed: int) -> list[Pair]:
    """A sample of judged queries, each with its best judged passage. Each passage is taken once, as
    equal passages would distort uniformity and anisotropy.
    """
    texts = dict(zip(collection.document_ids, collection.documents, strict=True))
    query_of = {}
    for query_id, query in zip(collection.query_ids, collection.queries, strict=True):
        judged = collection.qrels[query_id]
        query_of[max(judged, key=lambda d: judged[d])] = query
    pairs = [(query, texts[d]) for d, query in query_of.items()]
    return _sampled(pairs, count, seed, f"{collection.name} has {len(pairs)} judged passages")


def pairs_of_text(documents: Sequence[Document], count: int, seed: int) -> list[Pair]:
    """Pairs without labels: the two halves of a chunk, one chunk per document."""
    rng, pairs = random.Random(seed), list[Pair]()
    for index in rng.sample(range(len(documents)), len(documents)):
        chunks = [words(piece.text) for piece in chunk(documents[index], index, MAX_WORDS)]
        if long := [chunk_words for chunk_words in chunks if len(chunk_words) >= MIN_WORDS]:
            drawn = rng.choice(long)
            middle = len(drawn) // 2
            pairs.append((joined(drawn[:middle]), joined(drawn[middle:])))
        if len(pairs) == count:
            break
    size = f"{len(pairs)} of {len(documents):,} documents have {MIN_WORDS} words"
    return _sampled(pairs, count, seed, size)


def _sampled(pairs: Sequence[Pair], count: int, seed: int, size: str) -> list[Pair]:
    if len(pairs) < 2:
        raise RevelaError(f"{size}: geometry needs at least two pairs: give more text")
    return random.Random(seed).sample(pairs, min(count, len(pairs)))


def geometry(pairs: Sequence[Pair], encoder: TextEncoder) -> Geometry:
    """Measure an encoder's vectors, at length one; anisotropy and effective rank are of
    passages.
    """
    queries_ND = unit(encoder.encode_queries([query for query, _ in pairs], progress=True))
    passages_ND = unit(encoder.encode_passages([passage for _, passage in pairs], progress=True))
    return Geometry(
        alignment(queries_ND, passages_ND),
        uniformity(passages_ND),
        uniformity(np.concatenate([queries_ND, passages_ND])),
        anisotropy(passages_ND),
        effective_rank(passages_ND),
        *passages_ND.shape,
    )


def alignment(queries_ND: Vectors, passages_ND: Vectors) -> float:
    """Mean squared distance of queries from their passages: 0 to 4 for unit vectors."""
    return float(((queries_ND.astype(np.float64) - passages_ND) ** 2).sum(axis=1).mean())


def uniformity(vectors_ND: Vectors) -> float:
    """Log of the mean of exp(-2 |x - y|^2) over all pairs of rows: 0 if all rows are equal, below
    -3.9 if they are spread evenly.
    """
    from scipy.spatial.distance import pdist

    return float(np.log(np.exp(-2 * pdist(vectors_ND.astype(np.float64), "sqeuclidean")).mean()))


def anisotropy(vectors_ND: Vectors) -> float:
    """Mean cosine of all pairs of unit vectors, from the squared length of their sum."""
    count = len(vectors_ND)
    squared = (vectors_ND.sum(axis=0, dtype=np.float64) ** 2).sum()
    return float((squared - count) / (count * (count - 1)))


def effective_rank(vectors_ND: Vectors) -> float:
    """exp of the entropy of the singular values, scaled to sum to one; no mean is subtracted."""
    from scipy.stats import entropy

    return float(np.exp(entropy(np.linalg.svd(vectors_ND.astype(np.float64), compute_uv=False))))
