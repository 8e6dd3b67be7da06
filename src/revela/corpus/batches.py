"""A long stream in batches of bounded size, and over several processes with its order kept."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
AHEAD = 3  # batches a worker may be ahead of the reader


def batches(items: Iterable[Item], size: Callable[[Item], int], limit: int) -> Iterator[list[Item]]:
    """Neighbours together until their sizes reach ``limit``; at least one item each."""
    batch: list[Item] = []
    total = 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= limit:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def ordered_map(
    work: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Iterator[Result]:
    """``map`` over processes: results in the order of the items, only a few items ahead of the
    reader.

    Args:
        work: a function that can be pickled.
        items: read as they are needed.
        workers: processes; with one, or with fewer items than workers, everything happens here.
    """
    stream = iter(items)
    first = list(islice(stream, workers))
    if workers <= 1 or len(first) < workers:
        yield from map(work, first)
        yield from map(work, stream)
        return
    methods = multiprocessing.get_all_start_methods()
    # A forked child starts at once and runs Python only; spawned ones would run a caller's
    # unguarded script again.
    context = multiprocessing.get_context("fork" if "fork" in methods else None)
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        waiting: deque[Future[Result]] = deque(pool.submit(work, item) for item in first)
        for item in stream:
            waiting.append(pool.submit(work, item))
            if len(waiting) >= AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
