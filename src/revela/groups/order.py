"""Which rows share a group, and in what order groups come: rows of one document, random ones, or
similar ones.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from revela.corpus.judgements import judged
from revela.corpus.spool import ArrowList, Texts, vectors_on_disk
from revela.distributed import from_rank_zero, gathered, is_rank_zero, my_share, world_size
from revela.errors import RevelaError
from revela.files import atomic_write
from revela.groups.similarity import order_by_similarity, paired
from revela.groups.store import GroupFolder
from revela.groups.strategies import (
    Groups,
    document_groups,
    ordered_groups,
    random_groups,
    rounds_of_queries,
    spread_groups,
)
from revela.queries.from_text import query_hash
from revela.retriever.build import untrained_retriever
from revela.retriever.fit import lexical_vectors
from revela.retriever.load import load_encoder
from revela.settings import Recipe
from revela.silence import waiting
from revela.types import Chunk, Document, Encoder, Vectors
from revela.weights import find_weights

log = logging.getLogger(__name__)

# Queries that all chunks of a document may have: two of these chunks must not share a group.
SHARED = ("title", "authors-words")
ENCODING_BATCH = 2**14  # texts of a corpus that are encoded between two writes to disk
POOL = 8  # chunks that iterative groups are chosen from, for each that a round needs
NEIGHBOUR_CHARACTERS = 2000  # of a document, that say what it is about

Model = Callable[[], SentenceTransformer]
Encode = Callable[[Sequence[str]], Vectors]


def order_of_groups(
    recipe: Recipe,
    rows: ArrowList[Chunk],
    vectors_ND: Vectors | None = None,
    order_N: NDArray[np.int64] | None = None,
    unasked: bool = False,
) -> Groups:
    """epoch -> the groups of that epoch, as the objective needs them.

    Args:
        vectors_ND: a vector per document, so that short documents share groups with similar ones.
        order_N: the rows, similar ones next to each other, for groups of similar chunks.
        unasked: give groups in which no chunk has a query, too: it may be written later.
    """
    size, seed = recipe.groups.group_size, recipe.training.seed
    groups: Groups
    if recipe.groups.kind == "random":
        groups = functools.partial(random_groups, len(rows), size, seed)
    elif recipe.groups.kind in ("cluster", "iterative"):
        groups = groups_along(recipe, rows, np.arange(len(rows)) if order_N is None else order_N)
    else:
        reads = recipe.objective.reads
        shared = reads == "queries" and recipe.queries.source in SHARED
        apart = reads == "windows" or shared or judged(recipe)
        build = spread_groups if apart else document_groups
        owners = rows.column("document")
        groups = functools.partial(build, owners, size, seed, vectors_ND=vectors_ND)
    return groups if unasked else _only_with_queries(recipe, rows, groups)


def groups_along(recipe: Recipe, rows: ArrowList[Chunk], order_N: NDArray[np.int64]) -> Groups:
    """epoch -> groups of neighbours in this order, no two of them with the same query."""
    size, seed = recipe.groups.group_size, recipe.training.seed
    if recipe.objective.reads != "queries":
        return functools.partial(ordered_groups, [order_N], size, seed)
    query_of = np.array([query_hash(query) for query in rows.column("query")], np.int64)
    return lambda epoch: ordered_groups(
        rounds_of_queries(order_N, query_of, seed, epoch), size, seed, epoch
    )


def stored_groups(recipe: Recipe, folder: GroupFolder) -> tuple[Groups, int]:
    """epoch -> the groups of a folder, in the order of this recipe's seed; and their number."""
    if folder.size != recipe.groups.group_size:
        raise RevelaError(
            f"{folder.folder} holds groups of {folder.size}: give --group-size {folder.size}"
        )
    groups = folder.order(recipe.training.seed, recipe.training.groups_per_batch)
    if recipe.objective.reads != "queries":
        return groups, len(folder)
    has_query = folder.rows.column("query").reshape(len(folder), folder.size) != ""
    return _only_with_queries(recipe, folder.rows, groups), int(has_query.any(axis=1).sum())


def vectors_of_beginnings(recipe: Recipe, documents: Sequence[Document], model: Model) -> Vectors:
    """A vector per document, of the words it begins with."""
    beginnings = Texts(documents, lambda document: document.full_text[:NEIGHBOUR_CHARACTERS])
    return lexical_vectors(model(), beginnings, recipe.fit.token_weighting)


def similar_order(recipe: Recipe, rows: ArrowList[Chunk], model: Model) -> NDArray[np.int64]:
    """The rows, similar ones next to each other; pairs of query and chunk by both texts."""
    vectors = _vectors(recipe, rows, *_surrogate(recipe, model))
    return order_by_similarity(*vectors, recipe.groups.group_size, recipe.training.seed)


def passage_encoder(recipe: Recipe) -> Encode:
    """Vectors of passages by the surrogate, or by words."""
    folder = find_weights(recipe.retriever.model, recipe.retriever.offline_model)
    return _surrogate(recipe, lambda: untrained_retriever(recipe, folder, []))[1]


def _surrogate(recipe: Recipe, model: Model) -> tuple[Encode, Encode]:
    """What encodes queries and passages to find similar ones: another model, or words."""
    if not recipe.groups.surrogate:
        by_words = functools.partial(
            lexical_vectors, model(), token_weighting=recipe.fit.token_weighting
        )
        return by_words, by_words
    encoder = load_encoder(
        find_weights(recipe.groups.surrogate, ""),
        recipe.training.precision,
        recipe.groups.surrogate_tokens,
    )
    return in_parts(encoder.encode_queries), in_parts(encoder.encode_passages)


class IterativeGroups:
    """Groups of what the retriever in training finds similar, rebuilt every so many steps from a
    random part of the corpus.

    Called with the number of a round, gives its groups. They are kept in ``folder``, so that a run
    that is resumed goes through the same ones.
    """

    def __init__(
        self, recipe: Recipe, rows: ArrowList[Chunk], encoder: Encoder, folder: Path
    ) -> None:
        self.recipe, self.rows, self.encoder, self.folder = recipe, rows, encoder, folder

    def __call__(self, round_: int) -> Iterator[list[int]]:
        file = self.folder / f"groups-{round_}.npy"
        yield from kept(file, lambda: np.array(self._build(round_), dtype=np.int64)).tolist()

    def _build(self, round_: int) -> list[list[int]]:
        recipe = self.recipe
        size = recipe.groups.group_size
        wanted = recipe.groups.refresh_every * recipe.training.groups_per_step
        rng = np.random.default_rng([recipe.training.seed, round_])
        pool = min(len(self.rows), POOL * wanted * size)
        some = np.sort(rng.choice(len(self.rows), pool, replace=False))
        rows = self.rows.select(some)
        encode = self.encoder.encode_queries, self.encoder.encode_passages
        vectors = _vectors(recipe, rows, *(by_all(in_parts(each)) for each in encode))
        largest, seed = size, int(rng.integers(2**31))
        order = from_rank_zero(lambda: order_by_similarity(*vectors, largest, seed))
        groups = _only_with_queries(recipe, rows, groups_along(recipe, rows, order))(round_)
        return [some[group].tolist() for group in islice(groups, wanted)]


def _vectors(
    recipe: Recipe, rows: ArrowList[Chunk], encode_queries: Encode, encode_passages: Encode
) -> tuple[Vectors, Vectors | None]:
    """What ``order_by_similarity`` reads: of chunks, or for an objective that asks, of pairs."""
    passages_ND = encode_passages(Texts(rows, lambda row: row.text))
    if recipe.objective.reads != "queries":
        return passages_ND, None
    return paired(encode_queries(Texts(rows, lambda row: row.query or row.text)), passages_ND)


def kept(file: Path, make: Callable[[], NDArray[np.int64]]) -> NDArray[np.int64]:
    """What is in this file, for all processes; a missing one is made by all and written by the
    first.
    """
    found = from_rank_zero(lambda: np.load(file) if file.is_file() else None)
    if found is None:
        found = make()
        if is_rank_zero():
            with atomic_write(file) as temporary:
                np.save(temporary, found)
    return found


def in_parts(encode: Encode) -> Encode:
    """The same for many texts: a part at a time, its vectors on disk."""

    def encode_all(texts: Sequence[str]) -> Vectors:
        first = encode(texts[:1])
        vectors_ND = vectors_on_disk(len(texts), first.shape[1])
        with waiting("encoding", "text", total=len(texts)) as bar:
            for start in range(0, len(texts), ENCODING_BATCH):
                some = texts[start : start + ENCODING_BATCH]
                vectors_ND[start : start + len(some)] = encode(some)
                bar.update(len(some))
        return vectors_ND

    return encode_all


def by_all(encode: Encode) -> Encode:
    """The same, with each process encoding its share; the first gets all vectors."""

    def encode_share(texts: Sequence[str]) -> Vectors:
        mine = texts[my_share(len(texts))]
        found = gathered(encode(mine) if mine else None)
        parts = [vectors_ND for vectors_ND in found if vectors_ND is not None]
        return np.concatenate(parts) if parts else np.zeros((0, 1), dtype=np.float32)

    return encode_share if world_size() > 1 else encode


def _only_with_queries(recipe: Recipe, rows: ArrowList[Any], groups: Groups) -> Groups:
    """The groups in which a chunk has a query, for an objective that reads queries."""
    if recipe.objective.reads != "queries":
        return groups
    has_query = rows.column("query") != ""
    return lambda epoch: (group for group in groups(epoch) if has_query[group].any())
