"""Strategies of grouping: chunks -> groups, the 16 chunks that an objective compares.

Random regrouping lowers Revela's BEIR mean from 33.6 to 3.9 (tables 8-9). By default a group is
contiguous chunks of one or two documents, shuffled. Short documents fill a group together with
similar ones, because chunks of random documents teach nothing after the first steps.

Shapes: N documents, D width of a document's vector.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from revela.types import Vectors

BLOCK = 2**16  # vectors read at a time

Groups = Callable[[int], Iterator[list[int]]]
"""Epoch -> its groups, as indices of chunks."""


def document_groups(
    owners: NDArray[np.int64],
    size: int,
    seed: int,
    epoch: int = 0,
    vectors_ND: Vectors | None = None,
) -> Iterator[list[int]]:
    """Groups of ``size`` chunk indices, the same for the same seed and epoch.

    A document with at least ``size`` chunks gives whole groups, from a random start. A rest of at
    least half a group shares a group with one other document's rest. Shorter rests fill groups
    together: with those of similar documents if there are vectors, otherwise at random. Starts and
    neighbours differ by epoch, so a chunk that is left out in one has its chance in the next.
    ``owners`` is the document of each chunk, in the order of the corpus.
    """
    rng = random.Random(f"{seed}/{epoch}")
    halves: list[Sequence[int]] = []
    shorts: list[Sequence[int]] = []
    groups: list[Sequence[int]] = []
    for indices in _by_document(owners):
        offset = rng.randrange(min(size, len(indices) - size + 1)) if len(indices) > size else 0
        for piece in _pieces(indices, size, offset):
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
    """Any chunks together: the ablation that says what the other strategies are worth."""
    order = np.random.default_rng([seed, epoch]).permutation(chunks)
    for start in range(0, chunks - size + 1, size):
        yield order[start : start + size].tolist()


def ordered_groups(
    orders: Sequence[NDArray[np.int64]], size: int, seed: int, epoch: int = 0
) -> Iterator[list[int]]:
    """Groups along each order, none with chunks of two; each epoch begins to cut elsewhere."""
    rng = random.Random(f"{seed}/{epoch}")
    groups: list[Sequence[int]] = []
    for order in orders:
        turned = np.roll(order, -rng.randrange(size))
        starts = range(0, len(turned) - size + 1, size)
        groups += [turned[start : start + size].tolist() for start in starts]
    yield from _shuffled(groups, rng)


def rounds_of_queries(
    order: NDArray[np.int64], query_of: NDArray[np.int64], seed: int, epoch: int = 0
) -> list[NDArray[np.int64]]:
    """The order in parts in which no two chunks have the same query, as they would be negatives of
    it in one group: a random chunk of every query, then one of every query that has more, and so
    on. Chunks without a query (-1 in ``query_of``) are all in the first part.
    """
    drawn = np.random.default_rng([seed, epoch]).permutation(order)
    drawn = drawn[np.argsort(query_of[drawn], kind="stable")]  # those of a query together
    first_of_query = np.flatnonzero(np.diff(query_of[drawn], prepend=-2))
    sizes = np.diff(first_of_query, append=len(drawn))
    round_of = np.zeros(len(query_of), dtype=np.int64)
    round_of[drawn] = np.arange(len(drawn)) - np.repeat(first_of_query, sizes)
    round_of[query_of == -1] = 0
    by_round = order[np.argsort(round_of[order], kind="stable")]
    return np.split(by_round, np.flatnonzero(np.diff(round_of[by_round])) + 1)


def mixed_groups(
    parts: Sequence[Iterable[list[int]]], proportions: Sequence[float], seed: int, epoch: int = 0
) -> Iterator[list[int]]:
    """Groups of several corpora in these proportions, until one corpus has no more; each keeps its
    own order.
    """
    held = [list(part) for part in parts]
    weighted = list(zip(map(len, held), proportions, strict=True))
    rounds = min(count / weight for count, weight in weighted)
    counts = [min(count, round(rounds * weight)) for count, weight in weighted]
    turns = [which for which, count in enumerate(counts) for _ in range(count)]
    random.Random(f"{seed}/{epoch}").shuffle(turns)
    left = [iter(groups) for groups in held]
    for which in turns:
        yield next(left[which])


def spread_groups(
    owners: NDArray[np.int64],
    size: int,
    seed: int,
    epoch: int = 0,
    vectors_ND: Vectors | None = None,
) -> Iterator[list[int]]:
    """Groups of chunks of different documents, as contrastive objectives need them.

    In each round, every document that has chunks left gives one; with vectors, similar documents
    come together. A group has two chunks of a document only where two rounds meet, or where there
    are fewer documents than chunks to a group.
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
    """An order in which similar vectors stand close, from a random-projection tree (Dasgupta &
    Freund, STOC 2008): halved again and again between two members drawn at random. Each call draws
    other pairs, so every epoch has other neighbours.
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
        starts = range(0, len(part), BLOCK)  # the vectors may lie on disk
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


def _by_document(owners: NDArray[np.int64]) -> Iterator[range]:
    """The chunks of each document; a range takes no more room for many than for few."""
    bounds = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(owners)]
    for start, end in pairwise(bounds):
        if end > start:
            yield range(start, end)


def _pieces(indices: range, size: int, offset: int) -> Iterator[range]:
    if offset:
        yield indices[:offset]
    for start in range(offset, len(indices), size):
        yield indices[start : start + size]
