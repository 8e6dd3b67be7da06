"""Order rows so that similar ones are neighbours: by words, or by a surrogate model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from sentence_transformers import SentenceTransformer

from revela.files import atomic_write
from revela.terminal import progress_bar
from revela.text.spool import ArrowList, LazyTexts, vectors_on_disk
from revela.training.distributed import from_rank_zero, gathered, is_rank_zero, my_share, world_size
from revela.training.groups.similarity import concatenate_sides, order_by_similarity
from revela.training.groups.strategies import Indices
from revela.training.models import load_surrogate
from revela.training.retriever.fit import lexical_vectors
from revela.training.settings import Groups, Reads, TorchPrecision
from revela.types import Chunk, Vectors

ENCODING_BATCH = 2**14  # texts per write to disk
ORDER = "groups-order.npy"  # file of a run

Model = Callable[[], SentenceTransformer]
Encode = Callable[[Sequence[str]], Vectors]
Encoders = tuple[Encode, Encode]
"""Of queries and of passages."""


def similar_order(
    rows: ArrowList[Chunk], encoders: Encoders, settings: Groups, seed: int, reads: Reads
) -> Indices:
    """Order rows by the similarity of their vectors: of chunks, or of pairs of query and passage
    for methods that read queries. All ranks call it; the first one needs all vectors.
    """
    queries_RD, vectors_RD = encode_both_sides(rows, encoders, reads)
    second_RD = None
    if queries_RD is not None:
        vectors_RD, second_RD = concatenate_sides(queries_RD, vectors_RD)
    return from_rank_zero(lambda: order_by_similarity(vectors_RD, second_RD, settings, seed))


def encode_both_sides(
    rows: ArrowList[Chunk], encoders: Encoders, reads: Reads
) -> tuple[Vectors | None, Vectors]:
    """The vectors of queries, for methods that read queries, and of passages."""
    encode_queries, encode_passages = encoders
    vectors_RD = encode_passages(LazyTexts(rows, lambda row: row.text))
    if reads != "queries":
        return None, vectors_RD
    return encode_queries(LazyTexts(rows, lambda row: row.query or row.text)), vectors_RD


def encoders_by(
    settings: Groups, precision: TorchPrecision, model: Model, token_weighting: float
) -> Encoders:
    """Encoders of queries and passages: the surrogate, or the word vectors of ``model``."""
    if not settings.surrogate:
        by_words = functools.partial(lexical_vectors, model(), token_weighting=token_weighting)
        return by_words, by_words
    encoder = load_surrogate(settings.surrogate, precision, settings.surrogate_tokens)
    return encode_on_all_ranks(encoder.encode_queries), encode_on_all_ranks(encoder.encode_passages)


def load_or_make(file: Path, make: Callable[[], Indices]) -> Indices:
    """Load an array on all ranks; if the file is missing, all ranks make it and the first saves."""
    array = from_rank_zero(lambda: np.load(file) if file.is_file() else None)
    if array is None:
        array = make()
        if is_rank_zero():
            with atomic_write(file) as temporary:
                np.save(temporary, array)
    return array


def encode_on_all_ranks(encode: Encode) -> Encode:
    """``encode`` for many texts: a batch at a time, with the vectors on disk. Each rank encodes its
    share; rank 0 gets all vectors.
    """

    def encode_share(texts: Sequence[str]) -> Vectors:
        share = my_share(len(texts))
        first, number = share.start, share.stop - share.start
        vectors_ND = vectors_on_disk(number, encode(texts[:1]).shape[1])
        with progress_bar("encoding", "text", total=number) as bar:
            for start in range(first, share.stop, ENCODING_BATCH):
                batch = texts[start : min(start + ENCODING_BATCH, share.stop)]
                vectors_ND[start - first : start - first + len(batch)] = encode(batch)
                bar.update(len(batch))
        return np.concatenate(gathered(vectors_ND)) if world_size() > 1 else vectors_ND

    return encode_share
