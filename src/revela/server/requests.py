"""What clients may send: bodies read within their limits, and their fields. The OpenAPI document is
made of the same classes.
"""

from __future__ import annotations

import asyncio
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from starlette.requests import Request

from revela.index.store import FILTER_LIMIT
from revela.server.batching import Role
from revela.server.problems import Refused
from revela.settings import Limits

Body = TypeVar("Body", bound=BaseModel)
# What others call our fields, where the spelling does not tell.
ELSEWHERE = {
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
    "description": "A text, or texts. Lists of token ids are refused: they belong to one tokenizer.",
}


def _several(value: Any, info: ValidationInfo) -> Any:
    """One text or a list of them as a list, refused if it is too long: before a look at its items,
    each of which costs.
    """
    limits = info.context
    if isinstance(limits, Limits) and isinstance(value, list) and len(value) > limits.max_texts:
        raise Refused(
            400,
            f"{len(value):,} texts in a request: send at most {limits.max_texts:,} at a time",
            "input",
        )
    return [value] if isinstance(value, str) else value


def _integral(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_integral)]  # to JSON 3.0 is an integer


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, body: Any) -> Any:
        """Name the field that is meant; pydantic would collect an error for every unknown one."""
        fields = list(cls.model_fields)
        for name in body if isinstance(body, dict) else ():
            if name not in fields:
                meant = [ELSEWHERE.get(name, ""), *get_close_matches(name[:40], fields, 1)]
                hint = next(
                    (f"send {field}" for field in meant if field in fields),
                    f"there are {', '.join(fields)}",
                )
                raise Refused(400, f"there is no field {name[:40]}: {hint}", name[:100])
        return body


class EmbeddingRequest(_Strict):
    """OpenAI's request for embeddings, with two fields more: ``input_type`` and ``truncate``."""

    model: str = Field(
        description="A name of /v1/models; its end, :query or :passage, says what the texts are."
    )
    input: Annotated[
        list[Annotated[str, Field(min_length=1)]],
        FailFast(),
        BeforeValidator(_several),
        Field(min_length=1),
        WithJsonSchema(ONE_OR_MORE),
    ]
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="float, or base64 of little-endian float32."
    )
    dimensions: Integer | None = Field(
        None, ge=1, description="Numbers in a vector; only those that the model was trained for."
    )
    user: str | None = Field(None, description="Read by nobody.")
    input_type: Role | None = Field(
        None,
        description="Which prompt the texts get; wins over the model's end. Without either: passage.",
    )
    truncate: bool | None = Field(
        None,
        description="Let the model cut texts that are longer than it reads, instead of refusing them.",
    )


class SearchRequest(_Strict):
    """What to look for in the index."""

    query: str = Field(pattern=r"\S")
    mode: Literal["hybrid", "dense", "lexical"] = Field(
        "hybrid", description="By meaning (dense), by words (lexical) or both."
    )
    fusion: Literal["score", "rank"] = Field(
        "score", description="How both are joined: by score, or by rank (RRF)."
    )
    rerank: Literal["tokens", "heads"] | None = Field(
        None,
        description="Order what was found again by token vectors, if the index keeps them, or by the heads of the server's language model.",
    )
    where: str | None = Field(
        None,
        max_length=FILTER_LIMIT,
        description="Only documents of which this holds: year > 2020 and lang in ('en', 'de'). See /v1/index.",
    )
    k: Integer = Field(10, ge=1, le=100, description="Most results.")


async def read_body(request: Request, shape: type[Body], limits: Limits) -> Body:
    """The body of a POST, read within the limits.

    Raises:
        Refused: 408, 413, 415, or 400 with the field that is wrong.
    """
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        raise Refused(415, "the body must be JSON: send it with content-type application/json")
    try:
        async with asyncio.timeout(limits.client_seconds):
            body = await _whole_body(request, limits.max_body_bytes)
    except TimeoutError:
        slow = f"the body took longer than {limits.client_seconds:g} s to arrive: send it faster, or less of it"
        raise Refused(408, slow, headers={"connection": "close"}) from None
    try:
        return shape.model_validate_json(body, context=limits)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = [str(part) for part in first["loc"]]
        message = f"{'.'.join(place) or 'the body'}: {first['msg'].lower()}"
        raise Refused(400, message[:300], param=place[0][:100] if place else None) from None


async def _whole_body(request: Request, limit: int) -> bytes:
    body = bytearray()
    size = 0
    async for part in request.stream():
        size += len(part)
        if size <= limit:
            body += part
        elif size > 2 * limit:
            # a body that is a little too long is read to its end, as many clients only listen after
            # they have sent it
            break
    if size > limit:
        raise Refused(
            413,
            f"the body is longer than {limit:,} bytes: send less at a time",
            headers={"connection": "close"},
        )
    return bytes(body)
