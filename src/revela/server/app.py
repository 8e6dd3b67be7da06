"""The routes: OpenAI's embeddings and models, search, health, metrics, the OpenAPI document, and
the page.

Requests are parsed in requests.py, refused in errors.py, guarded in guard.py, encoded in
batching.py.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
from anyio import CapacityLimiter, to_thread
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from revela.errors import RevelaError
from revela.index.store import Index
from revela.server.batching import ROLES, Batcher, QueueFull, Role
from revela.server.filters import refuse_wild
from revela.server.guard import Guard
from revela.server.openapi import describe
from revela.server.page import page_response
from revela.server.problems import HANDLERS, Refused
from revela.server.requests import EmbeddingRequest, SearchRequest, read_body
from revela.server.telemetry import Measured, Metrics
from revela.settings import Limits
from revela.types import Hit, Reranker, TokenEncoder, Vectors

T = TypeVar("T")
SEARCH_THREADS = 4


class Counts(Protocol):
    """What counts tokens (``models.token_counter``)."""

    limit: int | None

    def count_queries(self, texts: Sequence[str]) -> list[int]: ...

    def count_passages(self, texts: Sequence[str]) -> list[int]: ...


class Service:
    """One index and its model behind HTTP.

    Args:
        index: what is searched.
        encoder: the index's own; the batcher's thread uses it, and searches that re-rank do.
        counter: of the same model.
        name: what clients call the model.
        limits: past which requests are refused.
        dimensions: that the model's vectors may be cut to.
        token: clients must send it, if given.
        local_only: answer to loopback names only.
        reranker: for searches that ask for it; one at a time.
    """

    def __init__(
        self,
        index: Index,
        encoder: TokenEncoder,
        counter: Counts,
        name: str,
        limits: Limits,
        dimensions: Sequence[int] = (),
        token: str | None = None,
        local_only: bool = False,
        reranker: Reranker | None = None,
    ) -> None:
        self.reranker = reranker
        self.index, self.name, self.limits, self.token, self.local_only = (
            index,
            name,
            limits,
            token,
            local_only,
        )
        self.created = int(time.time())
        self.width = encoder.encode_passages(["warm"]).shape[1]
        self.dimensions = [
            *(wanted for wanted in sorted(dimensions) if wanted < self.width),
            self.width,
        ]
        self.cut_at = counter.limit
        self.count: dict[Role, Callable[[Sequence[str]], list[int]]] = {
            "query": counter.count_queries,
            "passage": counter.count_passages,
        }
        self.metrics = Metrics()
        self.batcher = Batcher(
            encoder, limits.batch_tokens, limits.max_tokens, self.metrics.observe_batch
        )
        self.metrics.watch(self.batcher)
        self.searching = 0
        self.search_threads, self.reading_threads = (
            CapacityLimiter(SEARCH_THREADS),
            CapacityLimiter(1),
        )
        self.document = describe(name, self.dimensions, limits, token is not None)

    @property
    def columns(self) -> dict[str, str]:
        """The columns that filters may name, and their Arrow types."""
        return {"id": "string", "title": "string", **self.index.info.columns}

    @property
    def names(self) -> list[str]:
        """The model's names: plain (passages), and one a role."""
        return [self.name, *(f"{self.name}:{role}" for role in ROLES)]

    def app(self) -> Starlette:
        """The ASGI application; it closes the batcher when it is shut down."""
        routes = [
            Route("/", page_response(), methods=["GET"]),
            Route("/healthz", self.healthz, methods=["GET"]),
            Route("/metrics", self.prometheus, methods=["GET"]),
            Route("/openapi.json", self.openapi, methods=["GET"]),
            Route("/v1/index", self.index_info, methods=["GET"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            Route("/v1/search", self.search, methods=["POST"]),
        ]
        middleware = [
            Middleware(Measured, metrics=self.metrics),
            Middleware(Guard, token=self.token, local_only=self.local_only),
        ]
        app = Starlette(
            routes=routes,
            middleware=middleware,
            exception_handlers=HANDLERS,
            lifespan=self._lifespan,
        )
        app.router.redirect_slashes = False
        return app

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        yield
        await to_thread.run_sync(self.batcher.close)

    async def embeddings(self, request: Request) -> Response:
        """OpenAI's POST /v1/embeddings."""
        asked = await read_body(request, EmbeddingRequest, self.limits)
        if asked.model not in self.names:
            sentence = f"this server has no such model: ask for one of {', '.join(self.names)}"
            raise Refused(404, sentence, "model", "model_not_found")
        if asked.dimensions not in (None, *self.dimensions):
            trained = ", ".join(map(str, self.dimensions))
            raise Refused(
                400,
                f"this model was trained for other dimensions: leave them away, or give one of {trained}",
                "dimensions",
            )
        role: Role = asked.input_type or ("query" if asked.model.endswith(":query") else "passage")
        vectors, tokens = await unless_left(
            request, self.encode(asked.input, role, bool(asked.truncate), "input")
        )
        vectors = cut(vectors, asked.dimensions or self.width)
        body = await to_thread.run_sync(
            partial(
                embeddings_json, vectors, asked.encoding_format or "float", self.name, sum(tokens)
            )
        )
        return Response(body, media_type="application/json")

    async def search(self, request: Request) -> Response:
        """POST /v1/search: the best documents, each with its best chunk."""
        asked = await read_body(request, SearchRequest, self.limits)
        if self.searching >= self.limits.max_searches:
            raise full("searches", 1)
        begun = time.perf_counter()
        self.searching += 1
        try:
            hits = await unless_left(request, self._search(asked))
        except RevelaError as error:
            if str(self.index.folder) in str(error):
                raise  # the index's fault, and it names a path
            raise Refused(400, str(error)) from error
        finally:
            self.searching -= 1
        data = [
            {"object": "search.result", "rank": rank, **asdict(hit)}
            for rank, hit in enumerate(hits, 1)
        ]
        milliseconds = round(1000 * (time.perf_counter() - begun), 1)
        return JSONResponse(
            {
                "object": "list",
                "model": self.name,
                "mode": asked.mode,
                "milliseconds": milliseconds,
                "data": data,
            }
        )

    async def _search(self, asked: SearchRequest) -> list[Hit]:
        self._refuse_long([asked.query], "query")
        if asked.where:
            refuse_wild(asked.where, self.columns)
        if asked.rerank == "tokens" and not self.index.info.settings.keep_tokens:
            raise Refused(
                400,
                "this index keeps no token vectors: make it with revela index --keep-tokens, or send no rerank",
                "rerank",
            )
        if asked.rerank == "heads" and self.reranker is None:
            raise Refused(
                400,
                "this server has no language model: start revela serve with --lm, or send no rerank",
                "rerank",
            )
        vector = None
        if asked.mode != "lexical":
            vector = (await self.encode([asked.query], "query", False, "query"))[0][0]
        rerank = self.reranker if asked.rerank == "heads" else asked.rerank
        run = partial(
            self.index.search,
            asked.query,
            asked.k,
            asked.mode,
            asked.where,
            asked.fusion,
            rerank,
            vector,
        )
        if (
            asked.rerank == "heads"
        ):  # takes seconds: nothing else waits for it, and those whose client has left are not begun
            return await to_thread.run_sync(run, limiter=self.reading_threads)
        return await to_thread.run_sync(run, limiter=self.search_threads, abandon_on_cancel=True)

    async def encode(
        self, texts: Sequence[str], role: Role, truncate: bool, param: str
    ) -> tuple[Vectors, list[int]]:
        """Vectors, and the tokens that the model read of each text.

        Raises:
            Refused: too many tokens, or a text that is too long (400); the queue is full (429).
        """
        limits = self.limits
        self._refuse_long(texts, param)
        tokens = await to_thread.run_sync(self.count[role], texts)
        cut_at = self.cut_at or max(tokens)
        for i, count in enumerate(tokens):
            if count > cut_at and not truncate:
                sentence = f"text {i} has {count:,} tokens and the model reads {cut_at:,}: cut it, or send truncate: true with embeddings"
                raise Refused(400, sentence, param, "context_length_exceeded")
        tokens = [min(count, cut_at) for count in tokens]
        if sum(tokens) > limits.max_tokens:
            raise Refused(
                400,
                f"{sum(tokens):,} tokens in a request: send at most {limits.max_tokens:,} at a time",
                param,
            )
        try:
            return await self.batcher.encode(texts, tokens, role), tokens
        except QueueFull as error:
            raise full("texts", error.seconds) from error
        except RevelaError as error:  # the model's fault, and it names a path
            raise RuntimeError("the model gives no vectors") from error

    def _refuse_long(self, texts: Sequence[str], param: str) -> None:
        """Before anything is done with them."""
        for i, text in enumerate(texts):
            if len(text) > self.limits.max_characters:
                raise Refused(
                    400,
                    f"text {i} has {len(text):,} characters: send at most {self.limits.max_characters:,}",
                    param,
                )

    async def index_info(self, _: Request) -> Response:
        """GET /v1/index: what is searched, the columns that filters may name, and how it can be
        ordered again.
        """
        passages = await to_thread.run_sync(self.index.__len__)
        return JSONResponse(
            {
                "object": "index",
                "model": self.name,
                "passages": passages,
                "columns": self.columns,
                "tokens": self.index.info.settings.keep_tokens,
                "heads": self.reranker is not None,
            }
        )

    async def models(self, _: Request) -> Response:
        """OpenAI's GET /v1/models."""
        return JSONResponse(
            {"object": "list", "data": [self._described(name) for name in self.names]}
        )

    async def model(self, request: Request) -> Response:
        """OpenAI's GET /v1/models/NAME."""
        name = request.path_params["name"]
        if name not in self.names:
            raise Refused(
                404,
                f"this server has no such model: ask for one of {', '.join(self.names)}",
                "model",
                "model_not_found",
            )
        return JSONResponse(self._described(name))

    def _described(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "revela",
            "dimensions": self.width,
        }

    async def healthz(self, _: Request) -> Response:
        """Whether texts would be encoded."""
        if not self.batcher.alive:
            raise Refused(503, "the server is stopping: ask another")
        return JSONResponse({"status": "ok"})

    async def prometheus(self, _: Request) -> Response:
        """GET /metrics."""
        return Response(self.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def openapi(self, _: Request) -> Response:
        """GET /openapi.json."""
        return JSONResponse(self.document)


def cut(vectors: Vectors, dimensions: int) -> Vectors:
    """The first dimensions of unit vectors, of length one again."""
    if vectors.shape[1] == dimensions:
        return vectors
    shorter = vectors[:, :dimensions]
    cut_vectors: Vectors = shorter / np.maximum(
        np.linalg.norm(shorter, axis=1, keepdims=True), 1e-12
    )
    return cut_vectors


def full(what: str, seconds: int) -> Refused:
    """The 429 of a full queue."""
    return Refused(
        429,
        f"too many {what} wait: try again in {seconds} s",
        code="queue_full",
        headers={"retry-after": str(seconds)},
    )


async def unless_left(request: Request, work: Coroutine[object, object, T]) -> T:
    """The result of ``work``; if the client leaves first, work is cancelled.

    Raises:
        ClientDisconnect: it left.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(request))
    try:
        done, _ = await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task in done:
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        gone.cancel()


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def embeddings_json(vectors: Vectors, encoding_format: str, model: str, tokens: int) -> bytes:
    """OpenAI's answer. Row by row, so that a long one does not keep the interpreter to itself."""
    rows = []
    for i, vector in enumerate(vectors):
        written = (
            vector.tolist()
            if encoding_format == "float"
            else base64.b64encode(vector.astype(np.dtype("<f4")).tobytes()).decode()
        )
        rows.append(
            json.dumps(
                {"object": "embedding", "index": i, "embedding": written}, separators=(",", ":")
            )
        )
    usage = json.dumps({"prompt_tokens": tokens, "total_tokens": tokens})
    return f'{{"object":"list","data":[{",".join(rows)}],"model":{json.dumps(model)},"usage":{usage}}}'.encode()
