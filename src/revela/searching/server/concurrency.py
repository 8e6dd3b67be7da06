"""Work that a client waits for: its limit, and where it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from revela.searching.server.errors import queue_full

T = TypeVar("T")


class ConcurrencyLimit:
    """Limits the number of searches that run or wait."""

    def __init__(self, limit: int) -> None:
        self.limit, self.taken = limit, 0

    @contextmanager
    def acquire(self) -> Iterator[None]:
        """Hold one slot; raises APIError (429) when all are taken."""
        if self.taken >= self.limit:
            raise queue_full("searches", 1)
        self.taken += 1
        try:
            yield
        finally:
            self.taken -= 1


async def together(*work: Coroutine[object, object, T]) -> list[T]:
    """The results of all coroutines; when one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)  # until what they have queued is taken out


async def in_thread(threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    """Run ``work`` in a thread; it does not start if the call is cancelled before."""
    return await asyncio.get_running_loop().run_in_executor(threads, work)
