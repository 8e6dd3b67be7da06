"""Chunks -> groups: the 16 chunks that an objective compares with one another.

Group construction decides everything in Revela: random regrouping collapses its BEIR mean from 33.6 to 3.9 (tables 8-9).
A group is contiguous chunks of one or two documents, shuffled; short documents fill a group together, each beside its like:
strangers picked at random are told apart at a glance, and teach nothing after the first steps.

Shapes: N documents, D width of a document's vector.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from revela.types import Vectors

Groups = Callable[[int], Iterator[list[int]]]
"""Epoch -> its groups, as indices of chunks."""


def document_groups(
    owners: NDArray[np.int64], size: int, seed: int, epoch: int = 0, vectors_ND: Vectors | None = None
) -> Iterator[list[int]]:
    """Groups of ``size`` chunk indices for one epoch, the same for the same seed and epoch.

    A document with at least ``size`` chunks gives whole groups, from a random start. What is left of it, if at least half a
    group, shares a group with one other document's rest. Shorter rests fill groups together: with those of similar
    documents if there are vectors, otherwise at random. A chunk that no group has room for this epoch has its chance in the
    next, where starts and neighbours differ.

    Args:
        owners: the document of each chunk; a document's chunks are next to one another and in order.
        size: chunks a group, at least 2.
        seed: of the run.
        epoch: from 0.
        vectors_ND: a vector for each document, by its number in ``owners``.
    """
    rng = random.Random(f"{seed}/{epoch}")
    halves: list[list[int]] = []
    shorts: list[list[int]] = []
    groups: list[list[int]] = []
    for indices in _by_document(owners):
        offset = rng.randrange(min(size, len(indices) - size + 1)) if len(indices) > size else 0
        for piece in _pieces(indices, size, offset):
            (groups if len(piece) == size else halves if 2 * len(piece) >= size else shorts).append(piece)
    rng.shuffle(halves)
    rng.shuffle(shorts)
    while len(halves) > 1:
        first, second = halves.pop(), halves.pop()
        groups.append((first + second)[:size])
    if vectors_ND is not None and shorts:
        first_chunks = [piece[0] for piece in shorts]
        shorts = [shorts[i] for i in _neighbours_together(vectors_ND[owners[first_chunks]], rng)]
    filling = [i for piece in halves + shorts for i in piece]
    groups += [filling[i : i + size] for i in range(0, len(filling) - size + 1, size)]
    rng.shuffle(groups)
    for group in groups:
        rng.shuffle(group)
        yield group


def spread_groups(
    owners: NDArray[np.int64], size: int, seed: int, epoch: int = 0, vectors_ND: Vectors | None = None
) -> Iterator[list[int]]:
    """Groups of chunks of different documents, as contrastive objectives need them; the same for the same seed and epoch.

    Rounds: in each, every document that has chunks left gives one. Only where one round ends and the next begins can a group have two
    chunks of a document, or where there are fewer documents than chunks to a group.

    Args:
        owners, size, seed, epoch: as for ``document_groups``.
        vectors_ND: a vector for each document; each round then puts similar documents together.
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


def with_queries(groups: Iterable[list[int]], has_query: NDArray[np.bool_]) -> Iterator[list[int]]:
    """The groups in which at least one chunk has a query."""
    return (group for group in groups if has_query[group].any())


def _neighbours_together(vectors_ND: Vectors, rng: random.Random) -> list[int]:
    """An order in which similar vectors stand close: halved again and again between two members drawn at random.

    Each call draws other pairs, so that every epoch has other neighbours (a random-projection tree; Dasgupta & Freund, STOC 2008).
    """
    order: list[int] = []
    stack = [np.arange(len(vectors_ND))]
    while stack:
        part = stack.pop()
        if len(part) < 3:
            order += part.tolist()
            continue
        first, second = rng.sample(range(len(part)), 2)
        sides = vectors_ND[part] @ (vectors_ND[part[first]] - vectors_ND[part[second]])
        part = part[np.argsort(sides, kind="stable")]
        stack += [part[len(part) // 2 :], part[: len(part) // 2]]
    return order


def _by_document(owners: NDArray[np.int64]) -> Iterator[list[int]]:
    bounds = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(owners)]
    for start, end in pairwise(bounds):
        if end > start:
            yield list(range(start, end))


def _pieces(indices: list[int], size: int, offset: int) -> Iterator[list[int]]:
    if offset:
        yield indices[:offset]
    for start in range(offset, len(indices), size):
        yield indices[start : start + size]
