"""Prometheus metrics of one server, in a registry of their own, so that several servers fit into
one process (and tests do).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from revela.server.batching import ROLES, Batcher, Role

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
SIZES = tuple(2.0**i for i in range(0, 17))


class Metrics:
    """Requests and their latency by route, batches by role, and what waits."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        to = self.registry
        self.requests = Counter("revela_requests", "Answers", ["route", "status"], registry=to)
        self.seconds = Histogram(
            "revela_request_seconds",
            "From the first byte to the answer",
            ["route"],
            buckets=SECONDS,
            registry=to,
        )
        self.under_way = Gauge(
            "revela_requests_under_way", "Requests without an answer yet", registry=to
        )
        self.batch_texts = Histogram(
            "revela_batch_texts",
            "Texts that were encoded together",
            ["role"],
            buckets=SIZES,
            registry=to,
        )
        self.batch_tokens = Histogram(
            "revela_batch_tokens",
            "Tokens that were encoded together",
            ["role"],
            buckets=SIZES,
            registry=to,
        )
        self.batch_seconds = Histogram(
            "revela_batch_seconds",
            "Seconds of the model for a batch",
            ["role"],
            buckets=SECONDS,
            registry=to,
        )
        self.queue = Gauge(
            "revela_queue_tokens", "Tokens that wait for the model", ["role"], registry=to
        )

    def observe_batch(self, role: Role, texts: int, tokens: int, seconds: float) -> None:
        """The ``observe`` of a Batcher."""
        self.batch_texts.labels(role).observe(texts)
        self.batch_tokens.labels(role).observe(tokens)
        self.batch_seconds.labels(role).observe(seconds)

    def watch(self, batcher: Batcher) -> None:
        """Report this batcher's queue."""
        for role in ROLES:
            self.queue.labels(role).set_function(_depth(batcher, role))

    def text(self) -> bytes:
        """Prometheus's text format."""
        return generate_latest(self.registry)


def _depth(batcher: Batcher, role: Role) -> Callable[[], float]:
    return lambda: batcher.waiting_tokens[role]


class Measured:
    """Middleware: counts and times each request under its route's pattern; unknown routes share one
    name.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        status, begun = 500, time.perf_counter()

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            with self.metrics.under_way.track_inprogress():
                await self.app(scope, receive, note)
        finally:
            endpoint = scope.get("endpoint")
            route = endpoint.__name__ if endpoint else "other"
            self.metrics.requests.labels(route, str(status)).inc()
            self.metrics.seconds.labels(route).observe(time.perf_counter() - begun)
