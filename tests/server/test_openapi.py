"""The OpenAPI document against the server: generated requests, good and bad, meet no 5xx and
nothing that the document does not say.
"""

from __future__ import annotations

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance
from served import encoder, index, make_service, running, server

EXAMPLES = 25
OPERATIONS = [
    ("post", "/v1/embeddings"),
    ("post", "/v1/search"),
    ("get", "/v1/index"),
    ("get", "/v1/models"),
    ("get", "/v1/models/{name}"),
    ("get", "/metrics"),
    ("get", "/healthz"),
    ("get", "/"),
]


@pytest.fixture(scope="module")
def document(make_service):
    with running(
        make_service(max_characters=100, client_seconds=60)
    ) as server:  # so few characters that no text has too many tokens
        yield schemathesis.openapi.from_url(f"{server.url}/openapi.json")


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_generated_requests_meet_what_the_document_says(document, method, path, mode):
    operation = document[path][method]
    if mode.is_negative and not (operation.body or operation.path_parameters):
        pytest.skip("it takes nothing that could be wrong")

    @given(case=operation.as_strategy(mode))
    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def meet(case):
        # No schema tells a filter that can be used, nor what does not go together with re-ranking.
        wild = (
            mode.is_positive
            and isinstance(case.body, dict)
            and (case.body.get("where") or case.body.get("rerank"))
        )
        case.call_and_validate(excluded_checks=[positive_data_acceptance] if wild else None)

    meet()


def test_the_document_tells_this_servers_limits(server):
    document = httpx.get(f"{server.url}/openapi.json").json()
    assert (
        document["openapi"] == "3.1.0" and "security" not in document["paths"]["/v1/search"]["post"]
    )
    operation = document["paths"]["/v1/embeddings"]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    asked = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["properties"]
    assert asked["model"]["enum"] == ["tiny", "tiny:query", "tiny:passage"] and asked["dimensions"][
        "enum"
    ] == [None, 32]
    assert asked["input"]["anyOf"][1]["maxItems"] == server.service.limits.max_texts
    routes = {route.path.replace("{name:path}", "{name}") for route in server.service.app().routes}
    assert set(document["paths"]) == routes - {"/openapi.json"} == {path for _, path in OPERATIONS}
