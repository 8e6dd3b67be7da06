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

READ = ("/v1/index", "/v1/models", "/v1/models/{name}", "/metrics", "/healthz", "/")
OPERATIONS = [("post", f"/v1/{name}") for name in ("embeddings", "search", "rerank")]
OPENED = ("/v1/search", "/v1/documents/{name}", "/v1/files/{name}")
OPERATIONS += [("get", path) for path in (*READ, *OPENED)]


@pytest.fixture(scope="module")
def document(make_service):
    # So few characters that no text has too many tokens.
    with running(make_service(max_characters=100)) as server:
        yield schemathesis.openapi.from_url(f"{server.url}/openapi.json")


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_generated_requests_meet_what_the_document_says(document, method, path, mode):
    operation = document[path][method]
    if mode.is_negative and not (operation.body or operation.query):
        pytest.skip("it takes nothing that could be wrong")

    @given(case=operation.as_strategy(mode))
    @settings(
        max_examples=12, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    def meet(case):
        # No schema tells the models, dimensions, limits and columns of this server.
        case.call_and_validate(excluded_checks=[positive_data_acceptance])

    meet()


def test_the_document_has_every_route(server):
    document = httpx.get(f"{server.url}/openapi.json").json()
    routes = {route.path.replace("{name:path}", "{name}") for route in server.service.app().routes}
    assert set(document["paths"]) == routes - {"/openapi.json"} == {path for _, path in OPERATIONS}
