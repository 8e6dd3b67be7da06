"""The routes: OpenAI's embeddings and models, search, index, health, metrics and the web page.

Requests are validated by schemas.py, limited by middleware.py, encoded by batching.py and run on
uvicorn by lifecycle.py.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib.resources import files
from typing import Annotated, Any

import numpy as np
from anyio import to_thread
from fastapi import FastAPI, Query, Response
from fastapi.responses import FileResponse
from prometheus_fastapi_instrumentator import Instrumentator
from pydantic_core import to_json
from starlette.middleware import Middleware

from revela import __version__
from revela.encoders.base import TextEncoder
from revela.errors import QueryError
from revela.ranking.rerank_texts import by_tokens
from revela.ranking.steps import QUERY_CHARACTERS, check_query
from revela.searching.filters import OWN_COLUMNS
from revela.searching.index import Index
from revela.searching.results import SearchResults, ranked, results_of
from revela.searching.server import Access, Limits, Site, schemas
from revela.searching.server.documents import file_response, read_document
from revela.searching.server.encoding import Encoding, in_thread
from revela.searching.server.errors import ERROR_HANDLERS, APIError, no_such_model, queue_full
from revela.searching.server.middleware import BodyLimit, Guard
from revela.searching.word_search import Words
from revela.types import ROLES, Hits, Role, Vectors, shortened

THREADS = 4  # for searches
RETRY_SECONDS = 10  # while an index is being made
NO_TOKENS = "this server's model has no token vectors to re-rank by: serve another model"


class SearchService:
    """What is searched, and its routes: the page, ``/v1/index`` and search.

    This one answers by words while the index of a text is being made, and 503 on any other route;
    ``Service`` takes over when the index is there.
    """

    index: Words | Index

    def __init__(
        self, index: Words | Index, name: str, limits: Limits, access: Access, site: Site
    ) -> None:
        self.index, self.name, self.site = index, name, site
        self.limits, self.access = limits, access
        self.slots = asyncio.Semaphore(limits.max_searches)
        self.search_threads = ThreadPoolExecutor(THREADS, "search")
        page = files("revela.searching.server") / "page.html"
        self.page_html = page.read_text(encoding="utf-8")
        self.page_headers = page_headers(self.page_html)

    def app(self) -> FastAPI:
        """The ASGI application; its shutdown closes the service."""
        app = FastAPI(
            title="revela",
            version=__version__,
            description="Embeddings and search of one retriever and its index.",
            docs_url=None,
            redoc_url=None,
            openapi_url=None if isinstance(self.index, Words) else "/openapi.json",
            redirect_slashes=False,
            responses={"default": {"description": "An error", "model": schemas.Error}},
            exception_handlers=ERROR_HANDLERS,
            middleware=[
                Middleware(Guard, access=self.access),
                Middleware(BodyLimit, limit=self.limits.max_body_bytes),
            ],
            lifespan=self._lifespan,
        )
        app.get("/", **_as_text("text/html"))(self.page)
        app.head("/", include_in_schema=False)(self.page)
        app.get("/v1/index")(self.index_info)
        app.get("/v1/search")(self.search_by_address)
        app.post("/v1/search")(self.search)
        app.get("/v1/documents/{name:path}")(self.document)
        app.get("/v1/files/{name:path}", response_class=FileResponse)(self.file)
        self.add_routes(app)
        return app

    def add_routes(self, app: FastAPI) -> None:
        """Add the other routes."""
        app.api_route("/{path:path}", methods=["GET", "HEAD", "POST"])(self.not_yet)

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        yield
        await to_thread.run_sync(self.close)

    def close(self) -> None:
        """End the threads."""
        self.search_threads.shutdown(wait=False)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold a slot for a search; raises APIError (429) when all are taken."""
        if self.slots.locked():
            raise queue_full("searches", 1)
        async with self.slots:
            yield

    async def page(self) -> Response:
        """The web page for searching."""
        return Response(self.page_html, media_type="text/html", headers=self.page_headers)

    async def not_yet(self) -> Response:
        """The answer to requests that need vectors, while these are being made."""
        message = f"{self.index.notice} Try again later."
        raise APIError(503, message, headers={"Retry-After": str(RETRY_SECONDS)})

    def index_info(self) -> schemas.IndexInfo:
        """The index: its size, the columns for filters, and whether it keeps tokens."""
        return schemas.IndexInfo(
            name=self.site.name,
            model=self.name,
            documents=len(self.index),
            passages=0,
            updated=datetime.now(UTC),
            columns=OWN_COLUMNS,
            tokens=False,
            rerank="none",
        )

    async def document(
        self,
        name: str,
        query: Annotated[str, Query(max_length=QUERY_CHARACTERS)] = "",
        chunk: Annotated[int, Query(ge=0)] = 0,
    ) -> schemas.DocumentText:
        """A document around one of its passages, with the words of a query marked."""
        given = self.index, name, query, chunk, self.access.local_only
        async with self.slot():
            return await in_thread(self.search_threads, read_document, *given)

    async def file(self, name: str) -> FileResponse:
        """The file of a document, for requests from the server's own machine."""
        if not self.access.local_only:
            message = "files are served only to the server's own machine, without a token"
            raise APIError(403, message)
        async with self.slot():
            return await in_thread(self.search_threads, file_response, self.index, name)

    async def search_by_address(
        self, asked: Annotated[schemas.SearchParameters, Query()]
    ) -> SearchResults:
        """Search, by an address that can be bookmarked."""
        return await self.search(asked)

    async def search(self, body: schemas.SearchRequest) -> SearchResults:
        """Search: the best documents, each with its best passage."""
        start = time.perf_counter()
        async with self.slot():
            hits = await in_thread(self.search_threads, await self._finder(body))
            # Do not tell strangers where files are.
            how = dict(whole=body.marked, with_files=self.access.local_only)
            shown = partial(results_of, self.index, body.query, hits, **how)
            results = ranked(await in_thread(self.search_threads, shown))
        return SearchResults(
            query=body.query,
            model=self.name,
            mode="lexical" if isinstance(self.index, Words) else body.mode,
            milliseconds=round(1000 * (time.perf_counter() - start), 1),
            answer=None if self.index.notice else hits.answer,
            data=[replace(result, url=self.site.url(result.id)) for result in results],
            note=" ".join(filter(None, (self.index.notice, hits.notice))) or None,
        )

    async def _finder(self, body: schemas.SearchRequest) -> Callable[[], Hits]:
        """Check a request, and encode its query; returns the search, to be run in a thread."""
        if body.mode == "dense" or body.rerank == "late-interaction":
            await self.not_yet()
        given = dict(where=body.options()["where"], min_score=body.min_score)
        return partial(self.index.search, body.query, body.k, **given)


class Service(SearchService):
    """An index and its retriever, and their routes.

    Args:
        name: of the retriever, for clients.
        encoder: the retriever.
        dimensions: shorter widths that it was trained for.
    """

    index: Index

    def __init__(
        self,
        index: Index,
        name: str,
        encoder: TextEncoder,
        limits: Limits,
        access: Access = Access(),  # noqa: B008  (frozen)
        site: Site = Site(),  # noqa: B008  (frozen)
        dimensions: Iterable[int] = (),
    ) -> None:
        super().__init__(index, name, limits, access, site)
        self.created = int(time.time())
        self.width = warm(encoder)
        self.dimensions = [*sorted(d for d in dimensions if d < self.width), self.width]
        self.encoding = Encoding(encoder, limits)

    @property
    def names(self) -> list[str]:
        """The model's names: the plain one (passages), and one per role."""
        return [self.name, *(f"{self.name}:{role}" for role in ROLES)]

    def add_routes(self, app: FastAPI) -> None:
        """Add the routes that need the retriever, and those for operators."""
        app.get("/healthz")(self.healthz)
        app.head("/healthz", include_in_schema=False)(self.healthz)
        app.get("/v1/models")(self.models)
        app.get("/v1/models/{name:path}")(self.model)
        app.post("/v1/embeddings", response_model=schemas.Embeddings)(self.embeddings)
        app.post("/v1/rerank", response_model_exclude_none=True)(self.rerank)
        Instrumentator().instrument(app).expose(app, **_as_text("text/plain"))

    def close(self) -> None:
        """Encode what waits, and end the threads."""
        self.encoding.batcher.close()
        super().close()

    async def embeddings(self, body: schemas.EmbeddingRequest) -> Response:
        """Vectors of texts, in OpenAI's format."""
        if body.model not in self.names:
            raise no_such_model(self.names)
        if body.dimensions not in (None, *self.dimensions):
            trained = ", ".join(map(str, self.dimensions))
            message = f"not a width of this model: leave it out, or give one of {trained}"
            raise APIError(400, message, "dimensions")
        role: Role = body.input_type or ("query" if body.model.endswith(":query") else "passage")
        tokens = await self.encoding.tokens(body.input, role, bool(body.truncate), "input")
        rows = await self.encoding.batcher.encode(body.input, tokens, role)
        vectors = shortened(np.stack(rows), body.dimensions or self.width)
        given = vectors, body.encoding_format, self.name, sum(tokens)
        content = await in_thread(self.encoding.threads, embeddings_json, *given)
        return Response(content, media_type="application/json")

    async def rerank(self, body: schemas.RerankRequest) -> schemas.RerankResults:
        """The client's own texts, the most relevant first."""
        if body.model not in (None, *self.names):
            raise no_such_model(self.names)
        if self.encoding.encoder.lacks_tokens:
            raise APIError(400, NO_TOKENS)
        check_query(body.query)
        async with self.slot():
            scores = await self._reranked(body)
        results = list[schemas.RerankResult]()
        for i, score in list(scores.items())[: body.top_n]:
            text = body.documents[i] if body.return_documents else None
            document = None if text is None else schemas.RerankedDocument(text=text)
            results.append(schemas.RerankResult(index=i, relevance_score=score, document=document))
        return schemas.RerankResults(results=results)

    async def _reranked(self, body: schemas.RerankRequest) -> dict[int, float]:
        """Scores by index of the document, best first."""
        encoding = self.encoding
        # Check both before encoding either.
        query_tokens = await encoding.tokens([body.query], "query", True, "query")
        text_tokens = await encoding.tokens(body.documents, "passage", True, "documents")
        query = encoding.batcher.encode([body.query], query_tokens, "query", True)
        texts = encoding.batcher.encode(body.documents, text_tokens, "passage", True)
        try:
            async with asyncio.TaskGroup() as group:  # if one fails, the other leaves the queue
                encoded, passages = group.create_task(query), group.create_task(texts)
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

        def ranked() -> dict[int, float]:
            (read,), weights = encoded.result(), self.index.term_weights(body.query)
            return by_tokens(read, passages.result(), weights)

        return await in_thread(encoding.threads, ranked)

    async def _finder(self, body: schemas.SearchRequest) -> Callable[[], Hits]:
        asked = body.options()
        check_query(body.query)
        by_tokens = await in_thread(self.search_threads, self._checked, asked)
        encoded = None
        if body.mode != "lexical":
            # Truncated for the model only: all of its words are searched for.
            tokens = await self.encoding.tokens([body.query], "query", True, "query")
            batcher = self.encoding.batcher
            (encoded,) = await batcher.encode([body.query], tokens, "query", by_tokens)
        return partial(self.index.search, body.query, encoded=encoded, **asked)

    def _checked(self, asked: Mapping[str, Any]) -> bool:
        """Whether a search with these options re-ranks by tokens; reads the index."""
        by_tokens = self.index.options(**asked).rerank == "late-interaction"
        if by_tokens and not self.index.info.settings.keep_tokens:
            raise QueryError(
                "this index keeps no token vectors: make it with revela index --keep-tokens, or "
                "send no rerank",
                "rerank",
            )
        return by_tokens

    def index_info(self) -> schemas.IndexInfo:
        """The index: its size, the columns for filters, and whether it keeps tokens."""
        index = self.index
        return schemas.IndexInfo(
            name=self.site.name,
            model=self.name,
            documents=index.documents,
            passages=len(index),
            updated=index.updated,
            columns={**OWN_COLUMNS, **index.info.columns},
            tokens=index.info.settings.keep_tokens,
            rerank=index.options().rerank,
        )

    async def models(self) -> schemas.Models:
        """The model's names: the plain one (passages), and one per role."""
        return schemas.Models(data=[await self.model(name) for name in self.names])

    async def model(self, name: str) -> schemas.Model:
        """One of the model's names."""
        if name not in self.names:
            raise no_such_model(self.names)
        return schemas.Model(id=name, created=self.created, dimensions=self.width)

    async def healthz(self) -> schemas.Health:
        """Whether the server runs."""
        return schemas.Health()


def _as_text(media_type: str) -> dict[str, Any]:
    """The options of a route that answers with text."""
    content = {media_type: {"schema": {"type": "string"}}}
    return {"response_class": Response, "responses": {200: {"content": content}}}


def warm(encoder: TextEncoder) -> int:
    """Warm up an encoder, so that no request waits for its preparation; returns the width of its
    vectors.
    """
    if encoder.lacks_tokens:
        return int(encoder.encode_queries(["warm"]).shape[1])
    return len(encoder.query_tokens(["warm"])[0].vector)


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


def embeddings_json(
    vectors: Vectors, encoding_format: str | None, model: str, tokens: int
) -> bytes:
    """OpenAI's embeddings answer as JSON."""
    if encoding_format == "base64":
        values = [base64.b64encode(row.tobytes()).decode() for row in vectors.astype("<f4")]
    else:
        values = vectors.tolist()
    data = [{"object": "embedding", "index": i, "embedding": v} for i, v in enumerate(values)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return to_json({"object": "list", "data": data, "model": model, "usage": usage})
