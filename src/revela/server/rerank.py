"""Routes that re-rank a client's own texts, in the forms of Jina, Cohere and TEI (Hugging Face's
text-embeddings-inference).
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request

from revela.errors import QueryError
from revela.index.rerankers import HEADS_DEPTH
from revela.index.rerankers.texts import by_heads, by_tokens
from revela.server.errors import APIError, check_count
from revela.server.routing import BODY_ERRORS, answers, in_thread, while_connected
from revela.server.schemas import (
    RerankedDocument,
    RerankedText,
    RerankRequest,
    RerankResult,
    RerankResults,
    RerankTextsRequest,
    Usage,
)

if TYPE_CHECKING:
    from revela.server.app import Service

NO_LM = "this server has no language model: start revela serve with --lm"


class Reranking:
    """The routes; they answer for a service, within its limits and by its batcher."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def add_to(self, app: FastAPI) -> None:
        """Add the routes."""
        missing = answers({**BODY_ERRORS, 404: "No such model"})
        for path in ("/v1/rerank", "/v2/rerank"):
            app.post(path, response_model_exclude_none=True, **missing)(self.rerank)
        refused = answers(BODY_ERRORS)
        app.post("/rerank", response_model_exclude_none=True, **refused)(self.rerank_texts)

    async def rerank(self, body: RerankRequest, request: Request) -> RerankResults:
        """The documents in the order of their relevance, in the form of Jina and Cohere."""
        name = self.service.name
        by = {None: "tokens", name: "tokens", f"{name}:tokens": "tokens", f"{name}:heads": "heads"}
        if body.model not in by:
            raise self.service.no_such_model()
        texts, truncate = body.documents, bool(body.truncate)
        work = self._rerank(body.query, texts, by[body.model], "documents", truncate)
        scores, tokens = await while_connected(request, work)
        return RerankResults(
            model=body.model or name,
            usage=Usage(prompt_tokens=tokens, total_tokens=tokens),
            results=[
                RerankResult(
                    index=i,
                    relevance_score=score,
                    document=RerankedDocument(text=texts[i]) if body.return_documents else None,
                )
                for i, score in list(scores.items())[: body.top_n]
            ],
        )

    async def rerank_texts(self, body: RerankTextsRequest, request: Request) -> list[RerankedText]:
        """The texts in the order of their relevance by token vectors, in the form of TEI."""
        work = self._rerank(body.query, body.texts, "tokens", "texts", bool(body.truncate))
        scores, _ = await while_connected(request, work)
        return [
            RerankedText(index=i, score=score, text=body.texts[i] if body.return_text else None)
            for i, score in scores.items()
        ]

    async def _rerank(
        self, query: str, texts: list[str], by: str, param: str, truncate: bool
    ) -> tuple[dict[int, float], int]:
        """Scores by index of the text, best first; and the number of tokens read."""
        most = HEADS_DEPTH if by == "heads" else self.service.limits.max_texts
        check_count(len(texts), "texts", most, param)
        with self.service.one_search():
            score = self._by_heads if by == "heads" else self._by_tokens
            return await score(query, texts, param, truncate)

    async def _by_tokens(
        self, query: str, texts: list[str], param: str, truncate: bool
    ) -> tuple[dict[int, float], int]:
        service = self.service
        try:
            ((encoded,), query_tokens), (passages, text_tokens) = await asyncio.gather(
                service.encode([query], "query", False, "query", True),
                service.encode(texts, "passage", truncate, param, True),
            )
        except QueryError as error:
            message = "this server's model has no vectors of tokens to re-rank by: serve another"
            raise APIError(400, message, "model") from error
        score = partial(by_tokens, encoded, passages, service.index.term_weights(query))
        return await in_thread(service.text_threads, score), sum(query_tokens + text_tokens)

    async def _by_heads(
        self, query: str, texts: list[str], param: str, truncate: bool
    ) -> tuple[dict[int, float], int]:
        service = self.service
        if service.reranker is None:
            raise APIError(400, NO_LM, "model")
        service.check_length([query], "query")
        service.check_length(texts, param)
        score = partial(by_heads, query, texts, service.reranker)
        return await in_thread(service.heads_thread, score), 0
