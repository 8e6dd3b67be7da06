"""The routes: OpenAI's embeddings and models, search, index, health, metrics and the web page.

Requests are validated by schemas.py, limited and measured by middleware.py, encoded by batching.py
and run on uvicorn by lifecycle.py; re-ranking is in rerank.py.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np
from anyio import to_thread
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic_core import to_json
from starlette.middleware import Middleware

from revela import __version__
from revela.errors import QueryError, RevelaError
from revela.index.filters import OWN_COLUMNS, where_sql
from revela.index.index import Index
from revela.server import Access, Limits, schemas
from revela.server.batching import ROLES, Batcher, QueueFull, Role
from revela.server.errors import ERROR_HANDLERS, APIError, check_count, queue_full
from revela.server.middleware import BodyLimit, Guard, Measured, Metrics
from revela.server.rerank import NO_LM, Reranking
from revela.server.routing import BODY_ERRORS, answers, in_thread, while_connected
from revela.server.schemas import EmbeddingRequest, SearchRequest
from revela.types import Hit, Reranker, TokenEncoder, Vectors

if TYPE_CHECKING:
    from revela.encoder.token_counter import TokenCounter

THREADS = 4  # for texts (counting tokens, writing answers), and for searches


@dataclass(frozen=True)
class ServedModel:
    """The retriever of an index, as a service offers it.

    Args:
        name: for clients; if the index has a context, "@" and 8 digits of its digest are added.
        encoder: used by the batcher's thread only.
        counter: its token counter.
        dimensions: shorter widths that it was trained for.
    """

    name: str
    encoder: TokenEncoder
    counter: TokenCounter
    dimensions: Sequence[int] = ()


class Service:
    """An index and its retriever, and their routes; ``reranker`` is for "rerank": "heads"."""

    def __init__(
        self,
        index: Index,
        model: ServedModel,
        limits: Limits,
        access: Access = Access(),  # noqa: B008  (frozen)
        reranker: Reranker | None = None,
    ) -> None:
        self.index, self.reranker = index, reranker
        self.name, self.limits, self.access = model.name, limits, access
        if context := index.info.context:  # vectors of another context are those of another model
            self.name += f"@{context['digest'][:8]}"
        self.created = int(time.time())
        self.width = model.encoder.encode_queries(["warm"]).shape[1]
        self.dimensions = [*sorted(d for d in model.dimensions if d < self.width), self.width]
        self.max_text_tokens = model.counter.limit
        self.count: dict[Role, Callable[[Sequence[str]], list[int]]] = {
            "query": model.counter.count_queries,
            "passage": model.counter.count_passages,
        }
        self.metrics = Metrics()
        observe = self.metrics.observe_batch
        self.batcher = Batcher(model.encoder, limits.batch_tokens, limits.max_tokens, observe)
        self.metrics.observe_queue(self.batcher)
        self.searching = 0
        # Work of a client that has left keeps its thread to the end, which bounds the threads.
        self.text_threads = ThreadPoolExecutor(THREADS, "texts")
        self.search_threads = ThreadPoolExecutor(THREADS, "search")
        self.heads_thread = ThreadPoolExecutor(1, "heads")
        self.page_html = files("revela.server").joinpath("page.html").read_text(encoding="utf-8")
        self.page_headers = page_headers(self.page_html)

    @property
    def columns(self) -> dict[str, str]:
        """The columns for filters, and their Arrow types."""
        return {**OWN_COLUMNS, **self.index.info.columns}

    @property
    def names(self) -> list[str]:
        """The model's names: the plain one (passages), and one per role."""
        return [self.name, *(f"{self.name}:{role}" for role in ROLES)]

    def app(self) -> FastAPI:
        """The ASGI application; its shutdown closes the batcher."""
        app = FastAPI(
            title="revela",
            version=__version__,
            description="Embeddings and search of one retriever and its index.",
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
            exception_handlers=ERROR_HANDLERS,
            middleware=[
                Middleware(Measured, metrics=self.metrics),
                Middleware(Guard, access=self.access),
                Middleware(BodyLimit, limit=self.limits.max_body_bytes),
            ],
            lifespan=self._lifespan,
        )
        unknown = {404: "No such model"}
        app.get("/", **answers({}, "The page", "text/html"))(self.page)
        app.get("/healthz", **answers({503: "The server is stopping"}))(self.healthz)
        app.get("/metrics", **answers({}, "Metrics", "text/plain"))(self.prometheus)
        app.get("/v1/index", **answers({}))(self.index_info)
        app.get("/v1/models", **answers({}))(self.models)
        app.get("/v1/models/{name:path}", **answers(unknown))(self.model)
        app.post(
            "/v1/embeddings",
            response_model=schemas.Embeddings,
            **answers({**BODY_ERRORS, **unknown}),
        )(self.embeddings)
        app.post("/v1/search", **answers(BODY_ERRORS))(self.search)
        Reranking(self).add_to(app)
        return app

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        yield
        await to_thread.run_sync(self.batcher.close)

    async def embeddings(self, body: EmbeddingRequest, request: Request) -> Response:
        """Vectors of texts, in OpenAI's format."""
        if body.model not in self.names:
            raise self.no_such_model()
        if body.dimensions not in (None, *self.dimensions):
            trained = ", ".join(map(str, self.dimensions))
            message = f"this model was not trained for that: leave it out, or give one of {trained}"
            raise APIError(400, message, "dimensions")
        check_count(len(body.input), "texts", self.limits.max_texts, "input")
        role: Role = body.input_type or ("query" if body.model.endswith(":query") else "passage")
        work = self.encode(body.input, role, bool(body.truncate), "input")
        rows, tokens = await while_connected(request, work)
        vectors = truncated(np.stack(rows), body.dimensions or self.width)
        form = body.encoding_format or "float"
        write = partial(embeddings_json, vectors, form, self.name, sum(tokens))
        content = await in_thread(self.text_threads, write)
        return Response(content, media_type="application/json")

    async def search(self, body: SearchRequest, request: Request) -> schemas.SearchResults:
        """The best documents, each with its best passage."""
        start = time.perf_counter()
        try:
            with self.one_search():
                hits = await while_connected(request, self._search(body))
        except QueryError as error:  # any other is the index's fault
            raise APIError(400, str(error)) from error
        return schemas.SearchResults(
            model=self.name,
            mode=body.mode,
            milliseconds=round(1000 * (time.perf_counter() - start), 1),
            data=[schemas.SearchResult(rank=i, **asdict(hit)) for i, hit in enumerate(hits, 1)],
        )

    @contextmanager
    def one_search(self) -> Iterator[None]:
        """Count a search that runs or waits; over the limit it is refused (429)."""
        if self.searching >= self.limits.max_searches:
            raise queue_full("searches", 1)
        self.searching += 1
        try:
            yield
        finally:
            self.searching -= 1

    async def _search(self, body: SearchRequest) -> list[Hit]:
        self.check_length([body.query], "query")
        rerank = body.rerank or self.index.reranking(body.mode, body.fusion)
        try:
            where_sql(body.where or {}, self.index.info.columns)
        except RevelaError as error:
            raise APIError(400, str(error), "where") from error
        if rerank == "tokens" and not self.index.info.settings.keep_tokens:
            message = (
                "this index keeps no token vectors: make it with revela index --keep-tokens, or "
                "send no rerank"
            )
            raise APIError(400, message, "rerank")
        if rerank == "heads" and self.reranker is None:
            raise APIError(400, f"{NO_LM}, or send no rerank", "rerank")
        encoded = None
        if body.mode != "lexical":
            by_tokens = rerank == "tokens"
            (encoded,), _ = await self.encode([body.query], "query", False, "query", by_tokens)
        search = partial(
            self.index.search,
            body.query,
            body.k,
            body.mode,
            where=body.where,
            fusion=body.fusion,
            rerank=self.reranker if rerank == "heads" else rerank,
            encoded=encoded,
            min_score=body.min_score,
            explain=body.explain,
        )
        # Re-ranking by heads takes seconds, for which other searches do not wait.
        return await in_thread(
            self.heads_thread if rerank == "heads" else self.search_threads, search
        )

    async def encode(
        self,
        texts: Sequence[str],
        role: Role,
        truncate: bool,
        param: str,
        with_tokens: bool = False,
    ) -> tuple[list[Any], list[int]]:
        """The result of ``Batcher.encode`` and the number of tokens for each text.

        Raises:
            APIError: too many tokens, or a text that is too long (400); the queue is full (429).
            QueryError: the model has no vectors of tokens.
        """
        self.check_length(texts, param)
        tokens = await in_thread(self.text_threads, partial(self.count[role], texts))
        longest = self.max_text_tokens or max(tokens)
        for i, count in enumerate(tokens):
            if count > longest and not truncate:
                message = (
                    f"text {i} has {count:,} tokens and the model reads {longest:,}: shorten it, "
                    "or send truncate: true with embeddings"
                )
                raise APIError(400, message, param, "context_length_exceeded")
        tokens = [min(count, longest) for count in tokens]
        check_count(sum(tokens), "tokens", self.limits.max_tokens, param)
        try:
            return await self.batcher.encode(texts, tokens, role, with_tokens), tokens
        except QueueFull as error:
            raise queue_full("texts", error.seconds) from error
        except QueryError:
            raise
        except RevelaError as error:  # the model's fault, and it names a path
            raise RuntimeError("the model gives no vectors") from error

    def check_length(self, texts: Sequence[str], param: str) -> None:
        """Refuse texts of too many characters (400)."""
        most = self.limits.max_characters
        for i, text in enumerate(texts):
            if len(text) > most:
                message = f"text {i} has {len(text):,} characters: send at most {most:,}"
                raise APIError(400, message, param)

    async def index_info(self) -> schemas.IndexInfo:
        """The index: its size, the columns for filters, and the ways to re-rank."""
        return schemas.IndexInfo(
            model=self.name,
            passages=await in_thread(self.text_threads, self.index.__len__),
            columns=self.columns,
            tokens=self.index.info.settings.keep_tokens,
            heads=self.reranker is not None,
        )

    async def models(self) -> schemas.Models:
        """The model's names: the plain one (passages), and one per role."""
        return schemas.Models(data=[self._model(name) for name in self.names])

    async def model(self, name: str) -> schemas.Model:
        """One of the model's names."""
        if name not in self.names:
            raise self.no_such_model()
        return self._model(name)

    def _model(self, name: str) -> schemas.Model:
        return schemas.Model(id=name, created=self.created, dimensions=self.width)

    def no_such_model(self) -> APIError:
        """The 404 of a model's name."""
        message = f"this server has no such model: ask for one of {', '.join(self.names)}"
        return APIError(404, message, "model", "model_not_found")

    async def healthz(self) -> schemas.Health:
        """Whether the server encodes texts."""
        if not self.batcher.alive:
            raise APIError(503, "the server is stopping: ask another")
        return schemas.Health()

    async def prometheus(self) -> Response:
        """Prometheus's text format."""
        return Response(self.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def page(self) -> Response:
        """The web page for searching."""
        return Response(self.page_html, media_type="text/html", headers=self.page_headers)


def page_headers(html: str) -> dict[str, str]:
    """Headers of the page; the Content-Security-Policy allows its own style and script only."""

    def hashes(tag: str) -> str:
        blocks = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.S)
        digests = (hashlib.sha256(block.encode()).digest() for block in blocks)
        return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)

    policy = [
        "default-src 'none'",
        f"style-src {hashes('style')}",
        f"script-src {hashes('script')}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    return {
        "content-security-policy": "; ".join(policy),
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }


def truncated(vectors: Vectors, dimensions: int) -> Vectors:
    """The first dimensions of unit vectors (N, D), scaled to length one."""
    if vectors.shape[1] == dimensions:
        return vectors
    short = vectors[:, :dimensions]
    unit: Vectors = short / np.maximum(np.linalg.norm(short, axis=1, keepdims=True), 1e-12)
    return unit


def embeddings_json(vectors: Vectors, encoding_format: str, model: str, tokens: int) -> bytes:
    """OpenAI's embeddings answer as JSON."""
    if encoding_format == "float":
        values = vectors.tolist()
    else:
        rows = vectors.astype(np.dtype("<f4"))
        values = [base64.b64encode(row.tobytes()).decode() for row in rows]
    data = [{"object": "embedding", "index": i, "embedding": v} for i, v in enumerate(values)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return to_json({"object": "list", "data": data, "model": model, "usage": usage})
