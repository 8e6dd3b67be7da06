"""Routes that re-rank a client's own texts, in the formats of Jina, Cohere and TEI (Hugging Face's
text-embeddings-inference).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastapi import FastAPI, Request

from revela.errors import QueryError
from revela.index.rerank_texts import by_tokens
from revela.index.search import check_query
from revela.index.tokens import Weight
from revela.server.encoding import Encoding
from revela.server.errors import APIError, no_such_model
from revela.server.routing import BODY_ERRORS, Room, answers, in_thread, together, while_connected
from revela.server.schemas import (
    RerankedDocument,
    RerankedText,
    RerankRequest,
    RerankResult,
    RerankResults,
    RerankTextsRequest,
    Usage,
)

NO_TOKENS = "this server's model has no vectors of tokens to re-rank by: serve another"


@dataclass(frozen=True)
class Reranking:
    """The routes.

    Args:
        names: of the model; the first is the plain one.
        encoding: encodes queries and texts.
        room: for searches, of which this is one.
        weights: gives the weights of a query's terms.
    """

    names: Sequence[str]
    encoding: Encoding
    room: Room
    weights: Callable[[str], Sequence[Weight]]

    def add_to(self, app: FastAPI) -> None:
        """Add the routes."""
        missing = answers({**BODY_ERRORS, 404: "No such model"})
        for path in ("/v1/rerank", "/v2/rerank"):
            app.post(path, response_model_exclude_none=True, **missing)(self.rerank)
        refused = answers(BODY_ERRORS)
        app.post("/rerank", response_model_exclude_none=True, **refused)(self.rerank_texts)

    async def rerank(self, body: RerankRequest, request: Request) -> RerankResults:
        """The documents in the order of their relevance, in the form of Jina and Cohere."""
        if body.model not in (None, *self.names):
            raise no_such_model(self.names)
        texts = body.documents
        work = self._rerank(body.query, texts, "documents", bool(body.truncate))
        scores, tokens = await while_connected(request, work)
        return RerankResults(
            model=body.model or self.names[0],
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
        """The texts in the order of their relevance, in the form of TEI."""
        work = self._rerank(body.query, body.texts, "texts", bool(body.truncate))
        scores, _ = await while_connected(request, work)
        return [
            RerankedText(index=i, score=score, text=body.texts[i] if body.return_text else None)
            for i, score in list(scores.items())[: body.top_n]
        ]

    async def _rerank(
        self, query: str, texts: list[str], param: str, truncate: bool
    ) -> tuple[dict[int, float], int]:
        """Scores by index of the text, best first; and the number of tokens read."""
        encoding = self.encoding
        try:
            check_query(query)
            with self.room.one():
                # Check both before encoding either.
                query_tokens = await encoding.tokens([query], "query", truncate, "query")
                text_tokens = await encoding.tokens(texts, "passage", truncate, param)
                (encoded,), passages = await together(
                    encoding.encode([query], query_tokens, "query", True),
                    encoding.encode(texts, text_tokens, "passage", True),
                )
                scores = await in_thread(
                    encoding.threads, lambda: by_tokens(encoded, passages, self.weights(query))
                )
        except QueryError as error:
            message = str(error) if error.param else NO_TOKENS
            raise APIError(400, message, error.param or "model") from error
        return scores, sum(query_tokens + text_tokens)
