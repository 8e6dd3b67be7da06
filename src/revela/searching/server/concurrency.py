"""Shared parts of routes: answers in the OpenAPI document, and work that a client waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from fastapi import Request, Response

from revela.searching.server.errors import APIError, queue_full
from revela.searching.server.schemas import Error

T = TypeVar("T")
CLIENT_LEFT = 499  # for the metrics; the client does not read it
RETRY_AFTER = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds"}}
BODY_ERRORS = {
    400: "The body does not match the schema",
    413: "The body is too long",
    429: "The queue is full; Retry-After says for how long",
}


def answers(errors: dict[int, str], text: str = "", media_type: str = "") -> dict[str, Any]:
    """A route's errors, and a 200 that is text, for the OpenAPI document."""
    responses: dict[int, dict[str, Any]] = {
        status: {"description": description, "model": Error}
        for status, description in errors.items()
    }
    if 429 in errors:
        responses[429]["headers"] = RETRY_AFTER
    if not text:
        return {"responses": responses}
    content = {media_type: {"schema": {"type": "string"}}}
    responses[200] = {"description": text, "content": content}
    return {"responses": responses, "response_class": Response}


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


async def in_thread(threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    """Run ``work`` in a thread; it does not start if the call is cancelled before."""
    return await asyncio.get_running_loop().run_in_executor(threads, work)


async def while_connected(request: Request, work: Coroutine[object, object, T]) -> T:
    """Run ``work``; cancel it if the client disconnects.

    Raises:
        APIError: the client has left.
    """
    task, left = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        done, _ = await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if task in done:
            return task.result()
        raise APIError(CLIENT_LEFT, "the client has left")
    finally:
        task.cancel()
        left.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
