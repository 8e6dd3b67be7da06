"""Count and limit the tokens of the texts of requests, which are then encoded in batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from revela.encoders.base import TextEncoder
from revela.searching.server import Limits
from revela.searching.server.batching import Batcher
from revela.searching.server.errors import APIError, check_count
from revela.types import Role

THREADS = 4
P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(
    threads: ThreadPoolExecutor, work: Callable[P, T], *given: P.args, **options: P.kwargs
) -> T:
    """Run ``work`` in a thread; it does not start if the call is cancelled before."""
    return await asyncio.wrap_future(threads.submit(work, *given, **options))


class Encoding:
    """The batcher of many requests; refuses texts above the limits."""

    def __init__(self, encoder: TextEncoder, limits: Limits) -> None:
        self.limits, self.encoder = limits, encoder
        self.batcher = Batcher(encoder, limits.batch_tokens, limits.max_tokens)
        self.threads = ThreadPoolExecutor(THREADS, "texts")

    async def tokens(
        self, texts: Sequence[str], role: Role, truncate: bool, param: str
    ) -> list[int]:
        """The number of tokens that the model reads of each text.

        Raises:
            APIError: too many texts or tokens, or a text that is too long (400).
        """
        check_count(len(texts), "texts", self.limits.max_texts, param)
        for i, text in enumerate(texts):
            if len(text) > (most := self.limits.max_characters):
                message = f"text {i} has {len(text):,} characters: send at most {most:,}"
                raise APIError(400, message, param)
        tokens = await in_thread(self.threads, self.encoder.count_tokens, texts, role)
        longest = self.encoder.limit or max(tokens)
        for i, count in enumerate(tokens):
            if count > longest and not truncate:
                message = (
                    f"text {i} has {count:,} tokens and the model reads {longest:,}: shorten it, "
                    "or send truncate: true"
                )
                raise APIError(400, message, param, "context_length_exceeded")
        tokens = [min(count, longest) for count in tokens]
        check_count(sum(tokens), "tokens", self.limits.max_tokens, param)
        return tokens
