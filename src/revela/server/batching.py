"""Micro-batches: one thread owns the model, and encodes together what waits, from as many requests
as a batch holds.

It never waits for a batch to fill: whatever is there when the model is free goes next. Of a long
queue some batches are cut at a time, so that texts of like length go together, which costs the
model less. Queries and passages take turns, so that a search waits for one batch of somebody's
passages at most; a request that is too large to be cut at once lets the others go before its rest.
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
CUT_AHEAD = 4  # batches that are cut at a time


class QueueFull(Exception):
    """Too many tokens wait; ``seconds`` from now there should be room."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"full for another {seconds} s")
        self.seconds = seconds


@dataclass(eq=False)
class _Job:
    """The texts of one request; those before ``cut`` are in a batch, and ``left`` of them all have
    no vector yet.
    """

    texts: Sequence[str]
    tokens: Sequence[int]
    left: int
    cut: int = 0
    vectors: Vectors | None = None
    future: Future[Vectors] = field(default_factory=Future)

    def receive(self, place: int, vector: Vectors) -> None:
        if self.vectors is None:
            self.vectors = np.empty((len(self.texts), len(vector)), dtype=np.float32)
        self.vectors[place] = vector
        self.left -= 1
        if not self.left and self.future.set_running_or_notify_cancel():
            self.future.set_result(self.vectors)

    def fail(self, error: Exception) -> None:
        if not self.future.done() and self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


_Batch = list[tuple[_Job, int]]  # texts, as places in requests


class Batcher:
    """Encodes for many requests at a time.

    Args:
        encoder: used by the batcher's own thread only.
        batch_tokens: most tokens in a batch (one longer text makes a batch of its own).
        max_tokens: most tokens that wait, of queries and of passages each.
        observe: told of each batch: role, texts, tokens, seconds.
    """

    def __init__(
        self,
        encoder: Encoder,
        batch_tokens: int,
        max_tokens: int,
        observe: Callable[[Role, int, int, float], None] = lambda *_: None,
    ) -> None:
        self._encode = {"query": encoder.encode_queries, "passage": encoder.encode_passages}
        self._batch_tokens, self._max_tokens, self._observe = batch_tokens, max_tokens, observe
        self._jobs: dict[Role, deque[_Job]] = {role: deque() for role in ROLES}
        self._batches: dict[Role, deque[_Batch]] = {role: deque() for role in ROLES}
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
        job = _Job(texts, tokens, left=len(texts))
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
        """How long so many tokens of the queue will take, by the speed so far; a whole second at
        least.
        """
        speed = self._tokens_done / self._seconds_busy if self._seconds_busy else math.inf
        return max(1, math.ceil(tokens / speed))

    def _work(self) -> None:
        while found := self._next_batch():
            role, batch = found
            tokens = sum(job.tokens[place] for job, place in batch)
            begun = time.perf_counter()
            try:
                vectors = self._encode[role]([job.texts[place] for job, place in batch])
            except Exception as error:  # the requests of this batch fail; the next may not
                for job, _ in batch:
                    job.fail(error)
                continue
            seconds = time.perf_counter() - begun
            for (job, place), vector in zip(batch, vectors, strict=True):
                job.receive(place, vector)
            self._tokens_done, self._seconds_busy = (
                self._tokens_done + tokens,
                self._seconds_busy + seconds,
            )
            self._observe(role, len(batch), tokens, seconds)

    def _next_batch(self) -> tuple[Role, _Batch] | None:
        """Wait for texts; None once the batcher closes and nothing is left."""
        with self._change:
            while True:
                for role in sorted(ROLES, key=lambda role: role == self._last):
                    if batch := self._take(role):
                        self._last = role
                        return role, batch
                if self._closing:
                    return None
                self._change.wait()

    def _take(self, role: Role) -> _Batch:
        self._drop_done(role)
        if not self._batches[role]:
            self._cut(role)
        batch = self._batches[role].popleft() if self._batches[role] else []
        self.waiting_tokens[role] -= sum(job.tokens[place] for job, place in batch)
        return batch

    def _cut(self, role: Role) -> None:
        """The first texts of the queue into batches, by length."""
        jobs, room = self._jobs[role], CUT_AHEAD * self._batch_tokens
        texts: _Batch = []
        while jobs and (not texts or room > 0):
            job = jobs.popleft()
            while job.cut < len(job.texts) and (not texts or job.tokens[job.cut] <= room):
                room -= job.tokens[job.cut]
                texts.append((job, job.cut))
                job.cut += 1
            if job.cut < len(job.texts):
                alone = texts[0][0] is job
                if alone:
                    jobs.append(job)
                else:
                    jobs.appendleft(job)
                break
        texts.sort(key=lambda text: text[0].tokens[text[1]])
        batch: _Batch = []
        used = 0
        for job, place in texts:
            if batch and used + job.tokens[place] > self._batch_tokens:
                self._batches[role].append(batch)
                batch, used = [], 0
            batch.append((job, place))
            used += job.tokens[place]
        if batch:
            self._batches[role].append(batch)

    def _drop_done(self, role: Role) -> None:
        """Forget texts of requests that were cancelled, or failed in an earlier batch."""
        for job in [job for job in self._jobs[role] if job.future.done()]:
            self._jobs[role].remove(job)
            self.waiting_tokens[role] -= sum(job.tokens[job.cut :])
        kept: deque[_Batch] = deque()
        for batch in self._batches[role]:
            self.waiting_tokens[role] -= sum(
                job.tokens[place] for job, place in batch if job.future.done()
            )
            if still := [(job, place) for job, place in batch if not job.future.done()]:
                kept.append(still)
        self._batches[role] = kept
