"""Batch items, and map a function over processes."""

from __future__ import annotations

import gc
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import chain, islice
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
AHEAD = 3  # maximum results per worker that wait to be read


def batches(items: Iterable[Item], size: Callable[[Item], int], limit: int) -> Iterator[list[Item]]:
    """Batches of consecutive items; their sizes sum to ``limit`` or more, except in the last.

    >>> list(batches(["a", "bb", "ccc", "d"], len, limit=3))
    [['a', 'bb'], ['ccc'], ['d']]
    """
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


def pack(lengths: Sequence[int], limit: int) -> Iterator[range]:
    """Ranges of consecutive indices whose lengths sum to at most ``limit``, or of one longer item.

    >>> list(pack([1, 2, 4, 1], limit=3))
    [range(0, 2), range(2, 3), range(3, 4)]
    """
    start = total = 0
    for i, length in enumerate(lengths):
        if i > start and total + length > limit:
            yield range(start, i)
            start, total = i, 0
        total += length
    if lengths:
        yield range(start, len(lengths))


def ordered_map(
    work: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Iterator[tuple[Item, Result]]:
    """Each item and its result, in order, computed in processes with a few items read ahead.

    With one worker, or fewer items than workers, it runs in this process.
    """
    stream = iter(items)
    first = list(islice(stream, workers))
    if workers <= 1 or len(first) < workers:
        yield from ((item, work(item)) for item in chain(first, stream))
        return
    methods = multiprocessing.get_all_start_methods()
    # Fork if possible: a forked worker starts at once, but a spawned one imports the caller's
    # script, and runs it if it has no `if __name__ == "__main__"`.
    context = multiprocessing.get_context("fork" if "fork" in methods else None)
    # A worker must not collect its parent's garbage: OpenVINO's objects would wait for threads that
    # exist only in the parent.
    with ProcessPoolExecutor(workers, mp_context=context, initializer=gc.freeze) as pool:
        waiting = deque[tuple[Item, Future[Result]]]()
        for item in chain(first, stream):
            waiting.append((item, pool.submit(work, item)))
            if len(waiting) >= AHEAD * workers:
                done, future = waiting.popleft()
                yield done, future.result()
        for done, future in waiting:
            yield done, future.result()
