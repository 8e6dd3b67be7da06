"""Micro-batches: one thread owns the model, and encodes together what waits, from as many requests as a batch holds.

It never waits for a batch to fill: whatever is there when the model is free goes next. Queries and passages take turns, so that a
search waits for one batch of somebody's passages at most; a request that fills a batch alone lets the others go before its next.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from revela.types import Encoder, Vectors

Role = Literal["query", "passage"]
ROLES: tuple[Role, ...] = ("query", "passage")


class QueueFull(Exception):
    """Too many tokens wait; ``seconds`` from now there should be room."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"full for another {seconds} s")
        self.seconds = seconds


@dataclass(eq=False)
class _Job:
    """The texts of one request; those before ``taken`` have been given to the model."""

    texts: Sequence[str]
    tokens: Sequence[int]
    future: Future[Vectors] = field(default_factory=Future)
    taken: int = 0
    parts: list[Vectors] = field(default_factory=list)

    def take(self, room: int, at_least_one: bool) -> tuple[list[str], int]:
        """The next texts that fit into this many tokens, and their tokens."""
        start, used = self.taken, 0
        while self.taken < len(self.texts) and (used + self.tokens[self.taken] <= room or (at_least_one and self.taken == start)):
            used += self.tokens[self.taken]
            self.taken += 1
        return list(self.texts[start : self.taken]), used

    def receive(self, vectors: Vectors) -> None:
        self.parts.append(vectors)
        if sum(map(len, self.parts)) == len(self.texts) and self.future.set_running_or_notify_cancel():
            self.future.set_result(self.parts[0] if len(self.parts) == 1 else np.concatenate(self.parts))

    def fail(self, error: Exception) -> None:
        if not self.future.done() and self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class Batcher:
    """Encodes for many requests at a time.

    Args:
        encoder: used by the batcher's own thread only.
        batch_tokens: most tokens in a batch (one longer text makes a batch of its own).
        max_tokens: most tokens that wait, of queries and of passages each.
        observe: told of each batch: role, texts, tokens, seconds.
    """

    def __init__(
        self, encoder: Encoder, batch_tokens: int, max_tokens: int, observe: Callable[[Role, int, int, float], None] = lambda *_: None
    ) -> None:
        self._encode = {"query": encoder.encode_queries, "passage": encoder.encode_passages}
        self._batch_tokens, self._max_tokens, self._observe = batch_tokens, max_tokens, observe
        self._jobs: dict[Role, deque[_Job]] = {role: deque() for role in ROLES}
        self.waiting_tokens: dict[Role, int] = dict.fromkeys(ROLES, 0)
        self._last: Role = "passage"
        self._closing = False
        self._tokens_done, self._seconds_busy = 0, 0.0
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._thread.start()

    async def encode(self, texts: Sequence[str], tokens: Sequence[int], role: Role) -> Vectors:
        """(N, D) float32 vectors, the encoder's own. A cancelled call gives its place up.

        Args:
            texts: at least one.
            tokens: how many tokens the model reads of each.
            role: which prompt they get.

        Raises:
            QueueFull: nothing was queued.
        """
        job = _Job(texts, tokens)
        with self._change:
            self._drop_done(role)
            waiting = self.waiting_tokens[role]
            if self._closing or waiting + sum(tokens) > self._max_tokens:
                raise QueueFull(self._seconds_until(waiting + sum(tokens) - self._max_tokens))
            self.waiting_tokens[role] += sum(tokens)
            self._jobs[role].append(job)
            self._change.notify()
        return await asyncio.wrap_future(job.future)

    @property
    def alive(self) -> bool:
        """Whether texts would be encoded."""
        return self._thread.is_alive() and not self._closing

    def close(self) -> None:
        """Finish what was taken, take no more, and end the thread."""
        with self._change:
            self._closing = True
            self._change.notify()
        self._thread.join()

    def _seconds_until(self, tokens: int) -> int:
        """How long so many tokens of the queue will take, by the speed so far; a whole second at least."""
        speed = self._tokens_done / self._seconds_busy if self._seconds_busy else math.inf
        return max(1, math.ceil(tokens / speed))

    def _work(self) -> None:
        while batch := self._next_batch():
            role, shares, tokens = batch
            texts = [text for _, some in shares for text in some]
            begun = time.perf_counter()
            try:
                vectors = self._encode[role](texts)
                if not np.isfinite(vectors).all():
                    raise FloatingPointError("the model gave vectors that are not finite")
            except Exception as error:  # the requests of this batch fail; the next may not
                for job, _ in shares:
                    job.fail(error)
                continue
            finally:
                seconds = time.perf_counter() - begun
            start = 0
            for job, some in shares:
                job.receive(vectors[start : start + len(some)])
                start += len(some)
            self._tokens_done, self._seconds_busy = self._tokens_done + tokens, self._seconds_busy + seconds
            self._observe(role, len(texts), tokens, seconds)

    def _next_batch(self) -> tuple[Role, list[tuple[_Job, list[str]]], int] | None:
        """Wait for texts; None once the batcher closes and nothing is left."""
        with self._change:
            while True:
                for role in sorted(ROLES, key=lambda role: role == self._last):
                    shares, tokens = self._take(role)
                    if shares:
                        self._last = role
                        return role, shares, tokens
                if self._closing:
                    return None
                self._change.wait()

    def _take(self, role: Role) -> tuple[list[tuple[_Job, list[str]]], int]:
        self._drop_done(role)
        jobs, used = self._jobs[role], 0
        shares: list[tuple[_Job, list[str]]] = []
        while jobs:
            job = jobs.popleft()
            some, tokens = job.take(self._batch_tokens - used, at_least_one=not shares)
            if some:
                shares.append((job, some))
                used += tokens
            if job.taken < len(job.texts):
                if some and len(shares) == 1:
                    jobs.append(job)  # it has had a batch of its own: the others' turn
                else:
                    jobs.appendleft(job)
                break
        self.waiting_tokens[role] -= used
        return shares, used

    def _drop_done(self, role: Role) -> None:
        """Forget jobs that were cancelled, or failed in an earlier batch."""
        done = [job for job in self._jobs[role] if job.future.done()]
        for job in done:
            self._jobs[role].remove(job)
            self.waiting_tokens[role] -= sum(job.tokens[job.taken :])
