"""The service of a text while its index is being made: it searches by words, and says so."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Response
from starlette.middleware import Middleware

from revela.errors import QueryError
from revela.index.filters import OWN_COLUMNS
from revela.index.word_search import Words
from revela.server import Access, Limits, Site, schemas
from revela.server.app import page_headers, results_of
from revela.server.errors import ERROR_HANDLERS, APIError
from revela.server.middleware import BodyLimit, Guard
from revela.server.routing import Room, in_thread
from revela.server.schemas import SearchRequest

RETRY_SECONDS = 10


def first_app(words: Words, name: str, limits: Limits, access: Access, site: Site) -> FastAPI:
    """The page and search by words; other routes answer 503 until the index is made."""
    html = files("revela.server").joinpath("page.html").read_text(encoding="utf-8")
    headers, room, threads = page_headers(html), Room(limits.max_searches), ThreadPoolExecutor(1)
    app = FastAPI(
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        exception_handlers=ERROR_HANDLERS,
        middleware=[
            Middleware(Guard, access=access),
            Middleware(BodyLimit, limit=limits.max_body_bytes),
        ],
    )

    @app.get("/")
    async def page() -> Response:
        return Response(html, media_type="text/html", headers=headers)

    @app.get("/v1/index")
    async def index_info() -> schemas.IndexInfo:
        about: Any = dict(columns=OWN_COLUMNS, tokens=False, rerank="none")
        about |= dict(documents=len(words), passages=0, updated=datetime.now(UTC), examples=[])
        return schemas.IndexInfo(name=site.name, model=name, **about)

    @app.post("/v1/search")
    async def search(body: SearchRequest) -> schemas.SearchResults:
        if body.mode == "dense" or body.rerank == "tokens":
            raise not_yet()
        start = time.perf_counter()
        try:
            with room.one():
                found = await in_thread(threads, partial(results, body))
        except QueryError as error:
            raise APIError(400, str(error), error.param or None) from error
        return schemas.SearchResults(
            model=name,
            mode="lexical",
            milliseconds=round(1000 * (time.perf_counter() - start), 1),
            data=found,
            note=words.notice,
        )

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def other(path: str) -> Response:
        raise not_yet()

    def results(body: SearchRequest) -> list[schemas.SearchResult]:
        hits = words.search(body.query, body.k, body.where, body.min_score)
        return results_of(words, body, hits, site)

    def not_yet() -> APIError:
        message = f"{words.notice} Ask again then."
        return APIError(503, message, headers={"Retry-After": str(RETRY_SECONDS)})

    return app
