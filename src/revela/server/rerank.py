"""Routes that re-rank a client's own texts, in the forms of Jina, Cohere and TEI (Hugging Face's
text-embeddings-inference).
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import FastAPI, Request
from pydantic import BeforeValidator, Field

from revela.errors import QueryError
from revela.index.rerankers import HEADS_DEPTH
from revela.index.rerankers.texts import by_heads, by_tokens
from revela.server.routing import BODY_ERRORS, answers, in_thread, while_connected
from revela.server.schemas import AnswerModel, APIError, Integer, RequestModel, Usage

if TYPE_CHECKING:
    from revela.server.app import Service

NO_LM = "this server has no language model: start revela serve with --lm"


def _text_of(document: Any) -> Any:
    return document["text"] if isinstance(document, dict) and "text" in document else document


Text = Annotated[
    str,
    BeforeValidator(_text_of, json_schema_input_type=str | dict[str, Any]),
]
Query = Annotated[str, Field(pattern=r"\S")]
Truncate = Annotated[
    bool | None, Field(description="Truncate texts that exceed the model's maximum length.")
]


class RerankRequest(RequestModel):
    """A query and documents, as Jina and Cohere take them."""

    query: Query
    documents: list[Text] = Field(min_length=1, description='Strings, or objects with "text".')
    model: str | None = Field(
        None,
        description="The name from /v1/models re-ranks by token vectors, as with the suffix "
        ":tokens; with :heads by attention heads of the server's language model.",
    )
    top_n: Integer | None = Field(None, ge=1, description="Maximum number of results.")
    return_documents: bool | None = Field(None, description="Repeat the texts; default: false.")
    truncate: Truncate = True
    max_tokens_per_doc: Integer | None = Field(None, description="Ignored.")


class RerankTextsRequest(RequestModel):
    """A query and texts, as TEI takes them."""

    query: Query
    texts: list[Text] = Field(min_length=1)
    return_text: bool | None = Field(None, description="Repeat the texts; default: false.")
    truncate: Truncate = True
    raw_scores: bool | None = Field(None, description="Ignored.")


class RerankedDocument(AnswerModel):
    text: str


class RerankResult(AnswerModel):
    index: int = Field(description="Place of the document in the request, from 0.")
    relevance_score: float = Field(description="Comparable within this request only.")
    document: RerankedDocument | None = None


class RerankResults(AnswerModel):
    """Results, best first."""

    object: Literal["list"] = "list"
    model: str
    usage: Usage
    results: list[RerankResult]


class RerankedText(AnswerModel):
    """A result of TEI's form."""

    index: int
    score: float
    text: str | None = None


class Reranking:
    """The routes; they answer for a service, within its limits and by its batcher."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def add_to(self, app: FastAPI) -> None:
        """Add the routes."""
        how = dict(response_model_exclude_none=True, **answers(BODY_ERRORS))
        missing = answers({**BODY_ERRORS, 404: "No such model"})
        for path in ("/v1/rerank", "/v2/rerank"):
            app.post(path, response_model_exclude_none=True, **missing)(self.rerank)
        app.post("/rerank", **how)(self.rerank_texts)

    async def rerank(self, asked: RerankRequest, request: Request) -> RerankResults:
        """The documents in the order of their relevance, in the form of Jina and Cohere."""
        name = self.service.name
        by = {None: "tokens", name: "tokens", f"{name}:tokens": "tokens", f"{name}:heads": "heads"}
        if asked.model not in by:
            raise self.service.no_such_model()
        texts, truncate = asked.documents, bool(asked.truncate)
        work = self._reranked(asked.query, texts, by[asked.model], "documents", truncate)
        scores, tokens = await while_connected(request, work)
        return RerankResults(
            model=asked.model or name,
            usage=Usage(prompt_tokens=tokens, total_tokens=tokens),
            results=[
                RerankResult(
                    index=i,
                    relevance_score=score,
                    document=RerankedDocument(text=texts[i]) if asked.return_documents else None,
                )
                for i, score in list(scores.items())[: asked.top_n]
            ],
        )

    async def rerank_texts(self, asked: RerankTextsRequest, request: Request) -> list[RerankedText]:
        """The texts in the order of their relevance by token vectors, in the form of TEI."""
        texts, truncate = asked.texts, bool(asked.truncate)
        work = self._reranked(asked.query, texts, "tokens", "texts", truncate)
        scores, _ = await while_connected(request, work)
        return [
            RerankedText(index=i, score=score, text=texts[i] if asked.return_text else None)
            for i, score in scores.items()
        ]

    async def _reranked(
        self, query: str, texts: list[str], by: str, param: str, truncate: bool
    ) -> tuple[dict[int, float], int]:
        """Indices of texts and their scores, best first; and the number of tokens read."""
        most = HEADS_DEPTH if by == "heads" else self.service.limits.max_texts
        if len(texts) > most:
            message = f"{len(texts):,} texts in a request: send at most {most:,} at a time"
            raise APIError(400, message, param)
        with self.service.one_search():
            score = self._by_heads if by == "heads" else self._by_tokens
            return await score(query, texts, param, truncate)

    async def _by_tokens(
        self, query: str, texts: list[str], param: str, truncate: bool
    ) -> tuple[dict[int, float], int]:
        service = self.service
        try:
            ((read,), of_query), (passages, of_texts) = await asyncio.gather(
                service.encode([query], "query", False, "query", True),
                service.encode(texts, "passage", truncate, param, True),
            )
        except QueryError as error:
            message = "this server's model has no vectors of tokens to re-rank by: serve another"
            raise APIError(400, message, "model") from error
        score = partial(by_tokens, read, passages, service.index.term_weights(query))
        return await in_thread(service.text_threads, score), sum(of_query + of_texts)

    async def _by_heads(
        self, query: str, texts: list[str], param: str, truncate: bool
    ) -> tuple[dict[int, float], int]:
        service = self.service
        if service.reranker is None:
            raise APIError(400, NO_LM, "model")
        service.check_long([query], "query")
        service.check_long(texts, param)
        score = partial(by_heads, query, texts, service.reranker)
        return await in_thread(service.heads_thread, score), 0
