"""Requests and answers of the API as pydantic models, and errors in OpenAI's format.

FastAPI validates with the request models and makes the OpenAPI document from all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    WithJsonSchema,
    model_validator,
)
from starlette.exceptions import HTTPException

from revela.index.filters import EXAMPLE
from revela.server.batching import Role
from revela.types import Explanation

CLIENT_LEFT = 499  # an answer that nobody reads; the metrics count it
ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
FASTAPI_ERRORS = {
    404: "there is nothing at this address: see /openapi.json",
    405: "this address does not take that method: see /openapi.json",
}
# Names that other APIs use for our fields, where the spelling is not close.
ALIASES = {
    "top_k": "k",
    "topk": "k",
    "top_n": "k",
    "limit": "k",
    "size": "k",
    "q": "query",
    "filter": "where",
    "texts": "input",
}
ONE_OR_MORE = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
    ],
    "description": "A text, or a list of texts. Lists of token ids are refused.",
}


class APIError(HTTPException):
    """An error answer in OpenAI's format.

    Args:
        status: 4xx or 503.
        message: one sentence: what is wrong, and what to send instead. It may quote names that the
            client may know, never a path of this machine.
        param: the field that is wrong.
        code: an error code for programs.
        headers: extra headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param, self.code = param, code

    def response(self) -> JSONResponse:
        """``{"error": {"message", "type", "param", "code"}}``."""
        kind = ERROR_TYPES.get(self.status_code, "invalid_request_error")
        error = {"message": self.detail, "type": kind, "param": self.param, "code": self.code}
        return JSONResponse({"error": error}, self.status_code, self.headers)


async def _http_error(_: Request, error: Exception) -> JSONResponse:
    """Refusals of ours, and FastAPI's own: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    if not isinstance(error, APIError):
        message = FASTAPI_ERRORS.get(error.status_code, error.detail)
        error = APIError(error.status_code, message, headers=error.headers)
    return error.response()


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    """The first error of a body that does not fit its model."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if "json" not in request.headers.get("content-type", ""):
        message = "the body must be JSON: send it with content-type application/json"
        return APIError(400, message).response()
    in_json = first["type"] == "json_invalid"  # its place is an offset
    place = [] if in_json else [str(part) for part in first["loc"][1:]]
    message = f"{'.'.join(place) or 'the body'}: {first['msg'].lower()}"
    return APIError(400, message[:300], place[0][:100] if place else None).response()


async def _failed(_: Request, __: Exception) -> JSONResponse:
    """An error of the server; Starlette raises it again, so that uvicorn logs it."""
    message = "something went wrong here, the server's log says what: try again"
    return APIError(500, message).response()


ERROR_HANDLERS: dict[int | type[Exception], Callable[[Request, Any], Any]] = {
    HTTPException: _http_error,
    RequestValidationError: _invalid,
    Exception: _failed,
}


def _as_list(value: Any) -> Any:
    if isinstance(value, list) and value and isinstance(value[0], int | list):
        message = (
            "input has token ids, and those of another tokenizer mean other words here: send text "
            "(LangChain's OpenAIEmbeddings: check_embedding_ctx_length=False)"
        )
        raise APIError(400, message, "input")
    return [value] if isinstance(value, str) else value


def _integral(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _no_sql(value: Any) -> Any:
    if isinstance(value, str):
        raise APIError(400, f"where is a JSON object, not SQL: send one such as {EXAMPLE}", "where")
    return value


Integer = Annotated[int, BeforeValidator(_integral)]  # JSON Schema counts 3.0 as an integer


class RequestModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _check_unknown(cls, body: Any) -> Any:
        """Suggest the field that an unknown name stands for."""
        fields = list(cls.model_fields)
        for name in body if isinstance(body, dict) else ():
            if name not in fields:
                close = [ALIASES.get(name, ""), *get_close_matches(name[:40], fields, 1)]
                hint = next(
                    (f"send {field}" for field in close if field in fields),
                    f"there are {', '.join(fields)}",
                )
                raise APIError(400, f"there is no field {name[:40]}: {hint}", name[:100])
        return body


class EmbeddingRequest(RequestModel):
    """OpenAI's embeddings request, plus ``input_type`` and ``truncate``."""

    model: str = Field(
        description="A name from /v1/models; the suffix :query or :passage selects the prompt."
    )
    input: Annotated[
        list[Annotated[str, Field(min_length=1)]],
        FailFast(),
        BeforeValidator(_as_list),
        Field(min_length=1),
        WithJsonSchema(ONE_OR_MORE),
    ]
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="float, or base64 of little-endian float32."
    )
    dimensions: Integer | None = Field(
        None, ge=1, description="Numbers per vector, one of those that the model was trained for."
    )
    user: str | None = Field(None, description="Ignored.")
    input_type: Role | None = Field(
        None, description="Selects the prompt and overrides the model's suffix; default: passage."
    )
    truncate: bool | None = Field(
        None, description="Truncate texts that exceed the model's maximum length."
    )


class SearchRequest(RequestModel):
    """A search of the index."""

    query: str = Field(pattern=r"\S")
    mode: Literal["hybrid", "dense", "lexical"] = Field(
        "hybrid", description="Rank by vectors (dense), by words (lexical) or by both."
    )
    fusion: Literal["score", "rank"] = Field(
        "score", description="How hybrid search combines both: by score, or by rank (RRF)."
    )
    rerank: Literal["tokens", "heads", "none"] | None = Field(
        None,
        description="Re-rank the first results by token vectors, if the index keeps them, or by "
        "attention heads of the server's language model.",
    )
    where: Annotated[dict[str, Any] | None, BeforeValidator(_no_sql)] = Field(
        None,
        description="Filter by columns of /v1/index. Operators: eq, ne, gt, gte, lt, lte, in, "
        'not_in; "and", "or" and "not" combine filters.',
        examples=[{"year": {"gt": 2020}, "lang": "en"}],
    )
    k: Integer = Field(10, ge=1, le=100, description="Maximum number of results.")
    min_score: float | None = Field(None, description="Leave out documents of a lower score.")
    explain: bool = Field(False, description="Say what words and vectors gave each result.")


class AnswerModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Embedding(AnswerModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="A unit vector, or base64 of its float32.")


class Usage(AnswerModel):
    prompt_tokens: int = Field(description="Tokens that the model read, with prompts.")
    total_tokens: int


class Embeddings(AnswerModel):
    """OpenAI's embeddings answer, in the order of the texts."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class SearchResult(AnswerModel):
    """A document with its best chunk."""

    object: Literal["search.result"] = "search.result"
    rank: int
    id: str
    score: float
    title: str
    text: str
    chunk: int
    metadata: dict[str, Any]
    confidence: float | None = Field(
        None,
        description="How often a first result of this score is right, among questions of which the "
        "text answers half; as measured without labels.",
    )
    explanation: Explanation | None = None


class SearchResults(AnswerModel):
    """Results of a search, best first."""

    object: Literal["list"] = "list"
    model: str
    mode: str
    milliseconds: float
    data: list[SearchResult]


class IndexInfo(AnswerModel):
    """The index that is served."""

    object: Literal["index"] = "index"
    model: str
    passages: int
    columns: dict[str, str] = Field(description="Columns for filters, and their types.")
    tokens: bool = Field(description='Whether "rerank": "tokens" is available.')
    heads: bool = Field(description='Whether "rerank": "heads" is available.')


class Model(AnswerModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["revela"] = "revela"
    dimensions: int


class Models(AnswerModel):
    object: Literal["list"] = "list"
    data: list[Model]


class Health(AnswerModel):
    status: Literal["ok"] = "ok"


class ErrorDetail(AnswerModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(AnswerModel):
    """An error, in OpenAI's format."""

    error: ErrorDetail
