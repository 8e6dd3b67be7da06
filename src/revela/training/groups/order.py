"""Order rows so that similar ones are neighbours: by words, by a surrogate model, or by the
retriever in training, every ``refresh_every`` steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from revela.encoders.base import TextEncoder
from revela.encoders.load import load_encoder
from revela.files import atomic_write
from revela.terminal import progress_bar
from revela.text.spool import ArrowList, LazyTexts, vectors_on_disk
from revela.training.distributed import from_rank_zero, gathered, is_rank_zero, my_share, world_size
from revela.training.find_model import find_weights
from revela.training.groups.similarity import order_by_similarity, paired
from revela.training.groups.strategies import groups_along, with_queries
from revela.training.retriever.lexical import lexical_vectors
from revela.training.settings import Recipe
from revela.types import Chunk, Document, Vectors

ENCODING_BATCH = 2**14  # texts per write to disk
POOL = 8  # rows sampled for a round of iterative groups, per row that the round needs
ORDER = "groups-order.npy"  # file of a run
BEGINNING = 2000  # characters of a document that its vector is computed from

Model = Callable[[], SentenceTransformer]
Encode = Callable[[Sequence[str]], Vectors]


def vectors_of_beginnings(recipe: Recipe, documents: Sequence[Document], model: Model) -> Vectors:
    """A vector per document, from its first words."""
    beginnings = LazyTexts(documents, lambda document: document.full_text[:BEGINNING])
    return lexical_vectors(model(), beginnings, recipe.fit.token_weighting)


def similar_order(recipe: Recipe, rows: ArrowList[Chunk], model: Model) -> NDArray[np.int64]:
    """The order of rows by the surrogate, or by words if there is none."""
    vectors = _vectors(recipe, rows, *_surrogate(recipe, model))
    return order_by_similarity(*vectors, recipe.groups.group_size, recipe.training.seed)


def _surrogate(recipe: Recipe, model: Model) -> tuple[Encode, Encode]:
    """Encoders of queries and passages: the surrogate, or the word vectors of ``model``."""
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
    return encode_in_batches(encoder.encode_queries), encode_in_batches(encoder.encode_passages)


class IterativeGroups:
    """Round -> groups of similar rows, by the retriever in training, from a random sample.

    Groups are stored in ``folder``, so that a resumed run reads the same.
    """

    def __init__(
        self, recipe: Recipe, rows: ArrowList[Chunk], encoder: TextEncoder, folder: Path
    ) -> None:
        self.recipe, self.rows, self.encoder, self.folder = recipe, rows, encoder, folder

    def __call__(self, round_: int) -> Iterator[list[int]]:
        file = self.folder / f"groups-{round_}.npy"
        build = functools.partial(self._build, round_)
        yield from load_or_make(file, build).tolist()

    def _build(self, round_: int) -> NDArray[np.int64]:
        recipe, size = self.recipe, self.recipe.groups.group_size
        n_groups = recipe.groups.refresh_every * recipe.training.groups_per_step
        rng = np.random.default_rng([recipe.training.seed, round_])
        pool = min(len(self.rows), POOL * n_groups * size)
        sample = np.sort(rng.choice(len(self.rows), pool, replace=False))
        rows = self.rows.select(sample)
        encoders = self.encoder.encode_queries, self.encoder.encode_passages
        vectors = _vectors(recipe, rows, *map(encode_on_all_ranks, encoders))
        seed = int(rng.integers(2**31))
        order = from_rank_zero(lambda: order_by_similarity(*vectors, size, seed))
        groups = with_queries(recipe, rows, groups_along(recipe, rows, order))(round_)
        built = [sample[group] for group in islice(groups, n_groups)]
        return np.array(built, dtype=np.int64)


def _vectors(
    recipe: Recipe, rows: ArrowList[Chunk], encode_queries: Encode, encode_passages: Encode
) -> tuple[Vectors, Vectors | None]:
    """The vectors to order by: chunks', or pairs' for objectives that read queries."""
    passages_RD = encode_passages(LazyTexts(rows, lambda row: row.text))
    if recipe.objective.reads != "queries":
        return passages_RD, None
    return paired(encode_queries(LazyTexts(rows, lambda row: row.query or row.text)), passages_RD)


def load_or_make(file: Path, make: Callable[[], NDArray[np.int64]]) -> NDArray[np.int64]:
    """Load an array on all ranks; if the file is missing, all ranks make it and the first saves."""
    array = from_rank_zero(lambda: np.load(file) if file.is_file() else None)
    if array is None:
        array = make()
        if is_rank_zero():
            with atomic_write(file) as temporary:
                np.save(temporary, array)
    return array


def encode_in_batches(encode: Encode) -> Encode:
    """``encode`` for many texts: a batch at a time, with the vectors on disk."""

    def encode_all(texts: Sequence[str]) -> Vectors:
        width = encode(texts[:1]).shape[1]
        vectors_ND = vectors_on_disk(len(texts), width)
        with progress_bar("encoding", "text", total=len(texts)) as bar:
            for start in range(0, len(texts), ENCODING_BATCH):
                batch = texts[start : start + ENCODING_BATCH]
                vectors_ND[start : start + len(batch)] = encode(batch)
                bar.update(len(batch))
        return vectors_ND

    return encode_all


def encode_on_all_ranks(encode: Encode) -> Encode:
    """``encode_in_batches`` with each rank encoding its share; rank 0 gets all vectors."""
    encode = encode_in_batches(encode)

    def encode_share(texts: Sequence[str]) -> Vectors:
        share = texts[my_share(len(texts))]
        shares = gathered(encode(share) if share else None)
        vectors = [vectors_ND for vectors_ND in shares if vectors_ND is not None]
        return np.concatenate(vectors) if vectors else np.zeros((0, 1), dtype=np.float32)

    return encode_share if world_size() > 1 else encode
