"""Chunks -> groups: the 16 chunks that an objective compares with one another.

Group construction decides everything in Revela: random regrouping collapses its BEIR mean from 33.6 to 3.9 (tables 8-9).
A group is contiguous chunks of one or two documents, shuffled; short documents fill a group together.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from revela.types import Chunk


def document_groups(chunks: Sequence[Chunk], size: int, seed: int, epoch: int = 0) -> Iterator[list[int]]:
    """Groups of ``size`` chunk indices for one epoch, the same for the same seed and epoch.

    A document with at least ``size`` chunks gives whole groups, from a random start. What is left of it, if at least half a
    group, shares a group with one other document's rest. Shorter rests fill groups together. A chunk that no group has
    room for this epoch has its chance in the next, where the starts differ.

    Args:
        chunks: all chunks, each document's next to one another and in order.
        size: chunks a group, at least 2.
        seed: of the run.
        epoch: from 0.
    """
    rng = random.Random(f"{seed}/{epoch}")
    halves: list[list[int]] = []
    shorts: list[list[int]] = []
    groups: list[list[int]] = []
    for indices in _by_document(chunks):
        offset = rng.randrange(min(size, len(indices) - size + 1)) if len(indices) > size else 0
        for piece in _pieces(indices, size, offset):
            (groups if len(piece) == size else halves if 2 * len(piece) >= size else shorts).append(piece)
    rng.shuffle(halves)
    rng.shuffle(shorts)
    while len(halves) > 1:
        first, second = halves.pop(), halves.pop()
        groups.append((first + second)[:size])
    filling = [i for piece in halves + shorts for i in piece]
    groups += [filling[i : i + size] for i in range(0, len(filling) - size + 1, size)]
    rng.shuffle(groups)
    for group in groups:
        rng.shuffle(group)
        yield group


def _by_document(chunks: Sequence[Chunk]) -> Iterator[list[int]]:
    start = 0
    for i in range(1, len(chunks) + 1):
        if i == len(chunks) or chunks[i].document != chunks[start].document:
            yield list(range(start, i))
            start = i


def _pieces(indices: list[int], size: int, offset: int) -> Iterator[list[int]]:
    if offset:
        yield indices[:offset]
    for start in range(offset, len(indices), size):
        yield indices[start : start + size]
