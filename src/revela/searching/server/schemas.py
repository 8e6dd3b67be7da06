"""Requests and answers of the API as pydantic models, which also make the OpenAPI document."""

from __future__ import annotations

import json
from dataclasses import fields
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, FailFast, Field, WithJsonSchema
from pydantic_core import PydanticKnownError

from revela.ranking.fusion import Fusion
from revela.ranking.steps import Mode, Rerank
from revela.searching.filters import EXAMPLE, Narrow
from revela.searching.results import Marked
from revela.searching.server.errors import APIError
from revela.types import Role, is_unicode

ONE_OR_MORE = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
    ],
    "description": "A text, or a list of texts. Lists of token ids are refused.",
}


def _as_list(value: Any) -> Any:
    if isinstance(value, list) and value and isinstance(value[0], int | list):
        message = (
            "input has token ids, which differ between tokenizers: send text "
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


def _from_json(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return _no_sql(value)


def _unicode(text: str) -> str:
    if not is_unicode(text):
        raise PydanticKnownError("string_unicode")
    return text


Integer = Annotated[int, BeforeValidator(_integral)]  # JSON Schema counts 3.0 as an integer
Query = Annotated[str, Field(json_schema_extra={"pattern": r"\S"})]  # check_query refuses others
Text = Annotated[str, AfterValidator(_unicode)]


class RequestModel(BaseModel, strict=True, extra="forbid", use_attribute_docstrings=True):
    """A body, or the parameters of an address."""


class EmbeddingRequest(RequestModel):
    """OpenAI's embeddings request, plus ``input_type`` and ``truncate``."""

    model: str
    "A name from /v1/models; the suffix :query or :passage selects the prompt."
    input: Annotated[
        list[Annotated[str, Field(min_length=1)]],
        FailFast(),
        BeforeValidator(_as_list),
        Field(min_length=1),
        WithJsonSchema(ONE_OR_MORE),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    "float, or base64 of little-endian float32."
    dimensions: Integer | None = Field(None, ge=1)
    "Numbers per vector, one of those that the model was trained for."
    user: str | None = None
    "Ignored."
    input_type: Role | None = None
    "Selects the prompt and overrides the model's suffix; default: passage."
    truncate: bool | None = None
    "Truncate texts that exceed the model's maximum length."


class SearchRequest(RequestModel):
    """A search of the index."""

    query: Query
    mode: Mode = "hybrid"
    "Rank by vectors (dense), by words (lexical) or by both."
    fusion: Fusion = "score"
    "How hybrid search combines both: by score, or by rank (RRF)."
    rerank: Rerank | None = None
    "Re-rank the first results by token vectors, if the index keeps them."
    where: Annotated[dict[str, Any] | None, BeforeValidator(_no_sql)] = Field(
        None, examples=[{"year": {"gt": 2020}, "lang": "en"}]
    )
    """Filter by columns of /v1/index. Operators: eq, ne, gt, gte, lt, lte, in, not_in; of text,
    prefix and contains; "and", "or" and "not" combine filters."""
    folder: str = ""
    "Only documents in this folder, or this file."
    since: str = ""
    "Only documents of this date or later: 2024, 2024-05 or 2024-05-31."
    until: str = ""
    "Only documents of this date or earlier."
    type: str = ""
    "Only documents with this file extension: pdf; or one of several: pdf,docx."
    language: str = ""
    "Only documents in this language: en; or one of several: en,de."
    title: str = ""
    "Only documents with this text in their title (case-insensitive)."
    k: Integer = Field(10, ge=1, le=100)
    "Maximum number of results."
    min_score: float | None = None
    "Leave out documents with a lower score."
    explain: bool = False
    "Add the parts of each score: words, vectors, tokens."
    marked: bool = False
    "Also return each whole passage as it is shown, with its highlights."

    def options(self) -> dict[str, Any]:
        """The options of ``Index.search``, by their names."""
        given = dict(self)
        narrow = Narrow(**{field.name: given.pop(field.name) for field in fields(Narrow)})
        del given["query"], given["marked"]
        return given | {"where": narrow.and_also(self.where)}


class SearchParameters(SearchRequest, strict=False):
    """The same as parameters of an address; ``where`` is JSON."""

    where: Annotated[dict[str, Any] | None, BeforeValidator(_from_json)] = None


class RerankRequest(RequestModel):
    """A query, and texts to rank by it."""

    query: Query
    documents: list[Text] = Field(min_length=1)
    model: str | None = None
    "A name from /v1/models."
    top_n: Integer | None = Field(None, ge=1)
    "Maximum number of results."
    return_documents: bool = False
    "Return the texts too."


class AnswerModel(BaseModel, extra="forbid", use_attribute_docstrings=True):
    """The body of an answer."""


class Embedding(AnswerModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    "A unit vector, or base64 of its float32."


class Usage(AnswerModel):
    prompt_tokens: int
    "Tokens that the model read, with prompts."
    total_tokens: int


class Embeddings(AnswerModel):
    """OpenAI's embeddings answer, in the order of the texts."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class Passage(AnswerModel):
    """A chunk of a document as it is shown."""

    chunk: int
    text: Marked
    line: int | None
    page: int | None


class DocumentText(AnswerModel):
    """A document as it was indexed, or some of its passages."""

    object: Literal["document"] = "document"
    id: str
    title: str
    date: str | None
    path: str | None
    "Its file, if the server answers only its own machine."
    file: str | None
    "The address of its file, under the same condition."
    chunks: int
    "The number of its passages."
    passages: list[Passage]
    note: str | None
    "Set if its file has changed since it was indexed, or no longer exists."


class RerankedDocument(AnswerModel):
    text: str


class RerankResult(AnswerModel):
    index: int
    "Place of the document in the request, from 0."
    relevance_score: float
    "Comparable within this request only."
    document: RerankedDocument | None = None


class RerankResults(AnswerModel):
    """Results, best first."""

    results: list[RerankResult]


class IndexInfo(AnswerModel):
    """The index that is served."""

    object: Literal["index"] = "index"
    name: str
    "Name of the documents."
    model: str
    documents: int
    passages: int
    updated: datetime
    "When it was last made, changed, or synchronised with its files."
    columns: dict[str, str]
    "Columns for filters, and their types."
    tokens: bool
    'Whether "rerank": "late-interaction" is available.'
    rerank: Rerank
    "Whether searches that do not set rerank are re-ranked."


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
