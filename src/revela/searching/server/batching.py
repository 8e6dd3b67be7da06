"""Dynamic batching: one thread owns the model and encodes the texts of several requests at once.

When the model is free, it takes what is in the queue, without waiting for a full batch. From a long
queue several batches are formed at once and sorted by length, which saves padding. Batches of
queries and of passages alternate, so that a search waits for at most one batch of passages. Between
the batches of a large request, other requests have their turn.
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
from typing import Any

from revela.encoders.base import TextEncoder
from revela.ranking.late_interaction import encode_packed
from revela.searching.server.errors import queue_full
from revela.text.parallel import pack
from revela.types import ROLES, QueryTokens, Role, Vectors

BATCHES_AHEAD = 4  # batches formed at once


@dataclass(eq=False)
class _Job:
    """The texts of one request.

    Attributes:
        batched: number of texts, the first ones, that are in a batch or done.
        left: number of texts not encoded yet.
    """

    texts: Sequence[str]
    tokens: Sequence[int]
    with_tokens: bool
    left: int
    batched: int = 0
    future: Future[list[Any]] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.encoded: list[Any] = [None] * len(self.texts)

    def receive(self, i: int, encoded: Vectors | QueryTokens | tuple[Vectors, bytes]) -> None:
        if isinstance(encoded, tuple) and not self.with_tokens:
            encoded = encoded[0]  # the tokens are for another request of the batch
        self.encoded[i] = encoded
        self.left -= 1
        if not self.left and self.future.set_running_or_notify_cancel():
            self.future.set_result(self.encoded)

    def fail(self, error: Exception) -> None:
        if not self.future.done() and self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


_Batch = list[tuple[_Job, int]]  # texts: requests, and indices into them


class Batcher:
    """Encodes the texts of many requests in batches, in a thread of its own.

    Args:
        encoder: of all requests.
        batch_tokens: maximum number of tokens per batch; a longer text is a batch of its own.
        max_tokens: maximum number of waiting tokens, separately for queries and passages.
    """

    def __init__(self, encoder: TextEncoder, batch_tokens: int, max_tokens: int) -> None:
        self._encoder = encoder
        self._batch_tokens, self._max_tokens = batch_tokens, max_tokens
        self._jobs: dict[Role, deque[_Job]] = {role: deque() for role in ROLES}
        self._batches: dict[Role, deque[_Batch]] = {role: deque() for role in ROLES}
        self.waiting_tokens: dict[Role, int] = dict.fromkeys(ROLES, 0)
        self._last: Role = "passage"
        self._closing = False
        self._tokens_done, self._seconds_busy = 0, 0.0
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._thread.start()

    async def encode(
        self, texts: Sequence[str], tokens: Sequence[int], role: Role, with_tokens: bool = False
    ) -> list[Any]:
        """The vector (D,) of each text, as the encoder gives it. A cancelled call leaves the queue.

        Args:
            texts: at least one.
            tokens: the number of tokens of each text.
            role: selects the prompt.
            with_tokens: give the ``QueryTokens`` of each query, or the vector of each passage and
                the ``packed_signs`` of its tokens.

        Raises:
            APIError: too many tokens are waiting, and no text was queued (429).
        """
        job = _Job(texts, tokens, with_tokens, left=len(texts))
        with self._change:
            self._drop_done(role)
            waiting = self.waiting_tokens[role]
            if self._closing or waiting + sum(tokens) > self._max_tokens:
                seconds = self._seconds_until(waiting + sum(tokens) - self._max_tokens)
                raise queue_full("texts", seconds)
            self.waiting_tokens[role] += sum(tokens)
            self._jobs[role].append(job)
            self._change.notify()
        return await asyncio.wrap_future(job.future)

    def close(self) -> None:
        """Refuse new texts, encode those in the queue, and end the thread."""
        with self._change:
            self._closing = True
            self._change.notify()
        self._thread.join()

    def _seconds_until(self, tokens: int) -> int:
        """Seconds to encode this many tokens at the speed so far, rounded up, at least 1."""
        speed = self._tokens_done / self._seconds_busy if self._seconds_busy else math.inf
        return max(1, math.ceil(tokens / speed))

    def _work(self) -> None:
        while following := self._next_batch():
            try:
                self._encode_batch(*following)
            except Exception as error:
                for job, _ in following[1]:
                    job.fail(error)

    def _encode_batch(self, role: Role, batch: _Batch) -> None:
        encode = self._encode_with(role, any(job.with_tokens for job, _ in batch))
        start = time.perf_counter()
        encoded = encode([job.texts[i] for job, i in batch])
        self._seconds_busy += time.perf_counter() - start
        if len(encoded) != len(batch):
            raise ValueError(f"{len(encoded)} vectors of {len(batch)} texts")
        for (job, i), vector in zip(batch, encoded, strict=True):
            job.receive(i, vector)
        self._tokens_done += sum(job.tokens[i] for job, i in batch)

    def _encode_with(self, role: Role, with_tokens: bool) -> Callable[[Sequence[str]], Any]:
        encoder = self._encoder
        if role == "query":
            return encoder.query_tokens if with_tokens else encoder.encode_queries
        if not with_tokens:
            return encoder.encode_passages
        return lambda texts: list(zip(*encode_packed(encoder, texts), strict=True))

    def _next_batch(self) -> tuple[Role, _Batch] | None:
        """Wait for texts; None when the batcher closes and the queue is empty."""
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
            self._form_batches(role)
        batch = self._batches[role].popleft() if self._batches[role] else []
        self.waiting_tokens[role] -= sum(job.tokens[i] for job, i in batch)
        return batch

    def _form_batches(self, role: Role) -> None:
        """Form batches of similar length from the first texts of the queue."""
        jobs, room = self._jobs[role], BATCHES_AHEAD * self._batch_tokens
        texts: _Batch = []
        while jobs and (not texts or room > 0):
            job = jobs.popleft()
            while job.batched < len(job.texts) and (not texts or job.tokens[job.batched] <= room):
                room -= job.tokens[job.batched]
                texts.append((job, job.batched))
                job.batched += 1
            if job.batched < len(job.texts):
                if texts[0][0] is job:  # alone: others pass before its next part
                    jobs.append(job)
                else:
                    jobs.appendleft(job)
                break
        texts.sort(key=lambda text: text[0].tokens[text[1]])
        runs = pack([job.tokens[i] for job, i in texts], self._batch_tokens)
        self._batches[role] += [texts[run.start : run.stop] for run in runs]

    def _drop_done(self, role: Role) -> None:
        """Drop the texts of requests that were cancelled or failed in an earlier batch."""
        for job in [job for job in self._jobs[role] if job.future.done()]:
            self._jobs[role].remove(job)
            self.waiting_tokens[role] -= sum(job.tokens[job.batched :])
        kept: deque[_Batch] = deque()
        for batch in self._batches[role]:
            self.waiting_tokens[role] -= sum(job.tokens[i] for job, i in batch if job.future.done())
            if waiting := [(job, i) for job, i in batch if not job.future.done()]:
                kept.append(waiting)
        self._batches[role] = kept
