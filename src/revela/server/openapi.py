"""The OpenAPI 3.1 document of a server: paths as data, bodies from the classes that read them."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from pydantic import BaseModel

from revela.server.batching import ROLES
from revela.server.requests import EmbeddingRequest, SearchRequest
from revela.settings import Limits

Schema = dict[str, Any]
STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}


def describe(model: str, dimensions: list[int], limits: Limits, with_token: bool) -> Schema:
    """The document.

    Args:
        model: its name.
        dimensions: that vectors may have, the model's own last.
        limits: of the server.
        with_token: whether clients must send one.
    """
    models = [model, *(f"{model}:{role}" for role in ROLES)]
    embedding_request, search_request = _schema_of(EmbeddingRequest), _schema_of(SearchRequest)
    embedding_request["properties"]["model"]["enum"] = models
    embedding_request["properties"]["dimensions"] = {
        "enum": [None, *dimensions],
        "description": "Numbers in a vector.",
    }
    text, texts = embedding_request["properties"]["input"]["anyOf"]
    texts["maxItems"] = limits.max_texts
    text["maxLength"] = texts["items"]["maxLength"] = search_request["properties"]["query"][
        "maxLength"
    ] = limits.max_characters
    guarded: Schema = {"security": [{"bearer": []}]} if with_token else {}
    strangers = {401: "The token is missing or wrong"} if with_token else {}
    sent = {
        400: "The body is not what the schema says",
        408: "The body arrived too slowly",
        413: "The body is too long",
        415: "Not JSON",
    }
    busy = {429: "The queue is full; Retry-After says for how long"}
    named = [
        {
            "name": "name",
            "in": "path",
            "required": True,
            "schema": {"type": "string", "enum": models},
        }
    ]
    paths: Schema = {
        "/v1/embeddings": {
            "post": {
                "operationId": "embeddings",
                "summary": "Vectors of texts, in OpenAI's shape",
                "requestBody": _body(embedding_request),
                "responses": _answers(
                    _json("Vectors, in the order of the texts", "Embeddings"),
                    {**sent, 404: "No such model", **busy, **strangers},
                ),
                **guarded,
            }
        },
        "/v1/search": {
            "post": {
                "operationId": "search",
                "summary": "The best documents, each with its best passage",
                "requestBody": _body(search_request),
                "responses": _answers(
                    _json("Results, best first", "Results"), {**sent, **busy, **strangers}
                ),
                **guarded,
            }
        },
        "/v1/index": {
            "get": {
                "operationId": "index",
                "summary": "What is searched, and the columns that filters may name, with their types",
                "responses": _answers(_json("It", "Index"), strangers),
                **guarded,
            }
        },
        "/v1/models": {
            "get": {
                "operationId": "models",
                "summary": "The model's names: plain (passages), and one a role",
                "responses": _answers(_json("Names", "Models"), strangers),
                **guarded,
            }
        },
        "/v1/models/{name}": {
            "get": {
                "operationId": "model",
                "summary": "One of them",
                "parameters": named,
                "responses": _answers(_json("It", "Model"), {404: "No such model", **strangers}),
                **guarded,
            }
        },
        "/metrics": {
            "get": {
                "operationId": "metrics",
                "summary": "Prometheus's text format",
                "responses": _answers(_text("Metrics", "text/plain"), strangers),
                **guarded,
            }
        },
        "/healthz": {
            "get": {
                "operationId": "health",
                "summary": "Whether texts would be encoded",
                "responses": _answers(_json("Yes", "Health"), {503: "The server is stopping"}),
            }
        },
        "/": {
            "get": {
                "operationId": "page",
                "summary": "A page to try it on",
                "responses": _answers(_text("The page", "text/html"), {}),
            }
        },
    }
    components: Schema = {"schemas": _shapes(models, dimensions)}
    if with_token:
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "revela",
            "version": version("revela"),
            "description": "Embeddings and search of one retriever and its index.",
        },
        "paths": paths,
        "components": components,
    }


def _shapes(models: list[str], dimensions: list[int]) -> Schema:
    model = _object(
        id={"enum": models},
        object={"const": "model"},
        created=INTEGER,
        owned_by=STRING,
        dimensions={"const": dimensions[-1]},
    )
    numbers = {
        "type": "array",
        "items": NUMBER,
        "minItems": dimensions[0],
        "maxItems": dimensions[-1],
    }
    embedding = _object(
        object={"const": "embedding"}, index=INTEGER, embedding={"anyOf": [numbers, STRING]}
    )
    result = _object(
        object={"const": "search.result"},
        rank=INTEGER,
        id=STRING,
        score=NUMBER,
        title=STRING,
        text=STRING,
        chunk=INTEGER,
        metadata={"type": "object"},
    )
    return {
        "Embeddings": _object(
            object={"const": "list"},
            data=_list(embedding),
            model=STRING,
            usage=_object(prompt_tokens=INTEGER, total_tokens=INTEGER),
        ),
        "Results": _object(
            object={"const": "list"},
            model=STRING,
            mode=STRING,
            milliseconds=NUMBER,
            data=_list(result),
        ),
        "Index": _object(
            object={"const": "index"},
            model=STRING,
            passages=INTEGER,
            columns={"type": "object", "additionalProperties": STRING},
            tokens={"type": "boolean"},
            heads={"type": "boolean"},
        ),
        "Models": _object(object={"const": "list"}, data=_list(model)),
        "Model": model,
        "Health": _object(status={"const": "ok"}),
        "Error": _object(
            error=_object(
                message=STRING,
                type=STRING,
                param={"type": ["string", "null"]},
                code={"type": ["string", "null"]},
            )
        ),
    }


def _schema_of(shape: type[BaseModel]) -> Schema:
    return shape.model_json_schema()


def _object(**properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _body(schema: Schema) -> Schema:
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def _json(description: str, name: str) -> Schema:
    return {
        "description": description,
        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}},
    }


def _text(description: str, media_type: str) -> Schema:
    return {"description": description, "content": {media_type: {"schema": STRING}}}


def _answers(good: Schema, refusals: dict[int, str]) -> Schema:
    """A 200, and refusals in OpenAI's shape."""
    answers = {
        "200": good,
        **{str(status): _json(sentence, "Error") for status, sentence in refusals.items()},
    }
    if 429 in refusals:
        answers["429"]["headers"] = {"Retry-After": {"schema": INTEGER, "description": "Seconds"}}
    return answers
