"""Strategies to group rows. A method compares the chunks of a group, 16 by default.

Random regrouping lowers Revela's BEIR mean from 33.6 to 3.9 (tables 8-9). By default a group is
contiguous chunks of one or two documents, shuffled. Short documents share a group with similar
ones, because chunks of random documents teach nothing after the first steps.

To add a strategy, write a function here, call it in ``TrainingSet._groups_of``, and add its
name to the setting ``groups``.

Shapes: N documents, D width of a document's vector, R rows.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from revela.ranking.queries import query_hash
from revela.text.spool import ArrowList
from revela.training.settings import Reads
from revela.types import Chunk, Vectors

BLOCK = 2**16  # vectors read at a time
# Sources with one query for several chunks of a document, which must not share a group.
QUERIES_PER_DOCUMENT = ("title", "authors-words")

Indices = NDArray[np.int64]
"""Indices of rows, or a number for each row."""
Groups = Callable[[int], Iterator[list[int]]]
"""Epoch -> groups, as indices of rows."""


def groups_along(
    order_R: Indices, rows: ArrowList[Chunk], size: int, seed: int, reads: Reads
) -> Groups:
    """Epoch -> groups of neighbours in this order; no two rows of a group share a query."""
    if reads != "queries":
        return functools.partial(ordered_groups, [order_R], size, seed)
    query_of = np.array([query_hash(query) for query in rows.column("query")], np.int64)
    return lambda epoch: ordered_groups(
        rounds_of_queries(order_R, query_of, seed, epoch), size, seed, epoch
    )


def with_queries(rows: ArrowList[Any], groups: Groups, reads: Reads) -> Groups:
    """Drop groups without any query, if the method reads queries."""
    if reads != "queries":
        return groups
    has_query = rows.column("query") != ""
    return lambda epoch: (group for group in groups(epoch) if has_query[group].any())


def document_groups(
    owners: Indices, size: int, seed: int, epoch: int = 0, vectors_ND: Vectors | None = None
) -> Iterator[list[int]]:
    """Groups of ``size`` chunk indices, the same for the same seed and epoch.

    A document with at least ``size`` chunks gives whole groups, from a random start. A remainder of
    at least half a group is paired with another document's. Shorter remainders are joined: those of
    similar documents if there are vectors, otherwise random ones. Starts and neighbours differ by
    epoch, so a chunk left out of one epoch may be in the next.

    Args:
        owners: the document of each chunk, in the order of the corpus.
        vectors_ND: a vector per document.
    """
    rng = random.Random(f"{seed}/{epoch}")
    halves: list[Sequence[int]] = []
    shorts: list[Sequence[int]] = []
    groups: list[Sequence[int]] = []
    for indices in _by_document(owners):
        offset = rng.randrange(min(size, len(indices) - size + 1)) if len(indices) > size else 0
        bounds = sorted({0, *range(offset, len(indices), size), len(indices)})
        for start, end in pairwise(bounds):
            piece = indices[start:end]
            kind = groups if len(piece) == size else halves if 2 * len(piece) >= size else shorts
            kind.append(piece)
    rng.shuffle(halves)
    rng.shuffle(shorts)
    while len(halves) > 1:
        first, second = halves.pop(), halves.pop()
        groups.append([*first, *second][:size])
    if vectors_ND is not None and shorts:
        first_chunks = [piece[0] for piece in shorts]
        shorts = [shorts[i] for i in _neighbours_together(vectors_ND[owners[first_chunks]], rng)]
    filling = [i for piece in halves + shorts for i in piece]
    groups += [filling[i : i + size] for i in range(0, len(filling) - size + 1, size)]
    yield from _shuffled(groups, rng)


def random_groups(chunks: int, size: int, seed: int, epoch: int = 0) -> Iterator[list[int]]:
    """Groups of random chunks, as a baseline for the other strategies."""
    order = np.random.default_rng([seed, epoch]).permutation(chunks)
    for start in range(0, chunks - size + 1, size):
        yield order[start : start + size].tolist()


def interleaved_groups(
    owners: Indices, size: int, passages: int, seed: int, epoch: int = 0
) -> Iterator[list[int]]:
    """Groups of consecutive chunks of d11, d21, ..., dn1, d12, d22, ... (Revela, section 4.1).

    ``passages``, the n of the paper, is a number of random documents whose chunks take turns; a
    document that has no more is skipped. The next n documents follow.
    """
    documents = list(_by_document(owners))
    random.Random(f"{seed}/{epoch}").shuffle(documents)
    blocks = (documents[i : i + passages] for i in range(0, len(documents), passages))
    turns = (chunk for block in blocks for turn in zip_longest(*block) for chunk in turn)
    order_R = np.array([chunk for chunk in turns if chunk is not None], dtype=np.int64)
    yield from ordered_groups([order_R], size, seed, epoch)


def ordered_groups(
    orders: Sequence[Indices], size: int, seed: int, epoch: int = 0
) -> Iterator[list[int]]:
    """Groups of consecutive chunks of each order, from a random start. None spans two orders."""
    rng = random.Random(f"{seed}/{epoch}")
    groups: list[Sequence[int]] = []
    for order in orders:
        rolled = np.roll(order, -rng.randrange(size))
        starts = range(0, len(rolled) - size + 1, size)
        groups += [rolled[start : start + size].tolist() for start in starts]
    yield from _shuffled(groups, rng)


def rounds_of_queries(order: Indices, query_of: Indices, seed: int, epoch: int) -> list[Indices]:
    """Split an order so that no part has two chunks of one query, which would be each other's
    negatives.

    The first part has a random chunk of every query, and all chunks without a query (-1 in
    ``query_of``); the second has another chunk of every query with more, and so on.
    """
    drawn = np.random.default_rng([seed, epoch]).permutation(order)
    drawn = drawn[np.argsort(query_of[drawn], kind="stable")]
    first_of_query = np.flatnonzero(np.diff(query_of[drawn], prepend=-2))
    sizes = np.diff(first_of_query, append=len(drawn))
    round_of = np.zeros(len(query_of), dtype=np.int64)
    round_of[drawn] = np.arange(len(drawn)) - np.repeat(first_of_query, sizes)
    round_of[query_of == -1] = 0
    by_round = order[np.argsort(round_of[order], kind="stable")]
    return np.split(by_round, np.flatnonzero(np.diff(round_of[by_round])) + 1)


def mixed_groups(
    parts: Sequence[Iterable[list[int]]], proportions: Sequence[float], seed: int
) -> Iterator[list[int]]:
    """Mix the groups of several corpora in these proportions, until one corpus is used up. Each
    corpus keeps its order.
    """
    corpora = [list(part) for part in parts]
    weighted = list(zip(map(len, corpora), proportions, strict=True))
    rounds = min(count / weight for count, weight in weighted)
    counts = [min(count, round(rounds * weight)) for count, weight in weighted]
    turns = [i for i, count in enumerate(counts) for _ in range(count)]
    random.Random(f"{seed}/0").shuffle(turns)  # as in an epoch 0
    remaining = [iter(groups) for groups in corpora]
    for i in turns:
        yield next(remaining[i])


def spread_groups(
    owners: Indices, size: int, seed: int, epoch: int = 0, vectors_ND: Vectors | None = None
) -> Iterator[list[int]]:
    """Groups of chunks of different documents, for contrastive methods.

    Each round takes a chunk of every document that has one left; with vectors, similar documents
    are neighbours. A group has two chunks of a document only if it spans two rounds, or if there
    are fewer documents than ``size``.
    """
    rng = random.Random(f"{seed}/{epoch}")
    left = [rng.sample(indices, len(indices)) for indices in _by_document(owners)]
    order: list[int] = []
    while left:
        picked = [indices.pop() for indices in left]
        if vectors_ND is None:
            rng.shuffle(picked)
        else:
            picked = [picked[i] for i in _neighbours_together(vectors_ND[owners[picked]], rng)]
        order += picked
        left = [indices for indices in left if indices]
    groups = [order[i : i + size] for i in range(0, len(order) - size + 1, size)]
    rng.shuffle(groups)
    yield from groups


def _neighbours_together(vectors_ND: Vectors, rng: random.Random) -> list[int]:
    """Order vectors so that similar ones are close, by a random-projection tree (Dasgupta & Freund,
    STOC 2008).

    Each part is halved along the line between two random members, so neighbours differ between
    calls.
    """
    order: list[int] = []
    stack = [np.arange(len(vectors_ND))]
    while stack:
        part = stack.pop()
        if len(part) < 3:
            order += part.tolist()
            continue
        first, second = rng.sample(range(len(part)), 2)
        axis_D = vectors_ND[part[first]] - vectors_ND[part[second]]
        starts = range(0, len(part), BLOCK)  # the vectors may be on disk
        sides = [vectors_ND[part[i : i + BLOCK]] @ axis_D for i in starts]
        part = part[np.argsort(np.concatenate(sides), kind="stable")]
        stack += [part[len(part) // 2 :], part[: len(part) // 2]]
    return order


def _shuffled(groups: list[Sequence[int]], rng: random.Random) -> Iterator[list[int]]:
    rng.shuffle(groups)
    for members in groups:
        group = list(members)
        rng.shuffle(group)
        yield group


def _by_document(owners: Indices) -> Iterator[range]:
    """The chunks of each document."""
    bounds = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(owners)]
    for start, end in pairwise(bounds):
        if end > start:
            yield range(start, end)
