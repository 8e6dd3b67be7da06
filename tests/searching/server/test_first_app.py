"""What ``revela serve FOLDER`` answers while its vectors are made."""

from __future__ import annotations

import httpx
import pytest

from revela.searching.server import Access, Limits, Site
from revela.searching.server.app import SearchService
from revela.searching.server.lifecycle import in_background, listen
from revela.searching.word_search import Words
from revela.types import Document

DOCUMENTS = [Document("a.md", "The garden opens at nine."), Document("b.md", "An engine.", "B")]


@pytest.fixture
def listening():
    with listen("127.0.0.1", 0) as listening:
        yield listening


def ask(listening, method, path, **more):
    url = f"http://127.0.0.1:{listening.getsockname()[1]}{path}"
    return httpx.request(method, url, timeout=60, **more)


def test_it_searches_by_words_and_says_how_far_the_vectors_are(listening):
    words = Words(DOCUMENTS, 120)
    words.tell(0.4)
    app = SearchService(words, "docs", Limits(), Access(), Site()).app()
    with in_background(app, Limits(), listening):
        found = ask(listening, "POST", "/v1/search", json={"query": "gardens", "k": 1}).json()
        (hit,) = found["data"]
        assert (hit["id"], hit["rank"], found["mode"]) == ("a.md", 1, "lexical")
        assert "2 documents are being encoded (40 % of the text is done)" in found["note"]
        assert ask(listening, "GET", "/v1/index").json()["documents"] == 2
        page = ask(listening, "GET", "/")
        assert "<html" in page.text and "script-src" in page.headers["content-security-policy"]
        wrong = {"query": "garden", "where": {"id": "a.md"}}
        refused = ask(listening, "POST", "/v1/search", json=wrong)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "where"
        for method, path, body in (
            ("POST", "/v1/search", {"query": "garden", "mode": "dense"}),
            ("POST", "/v1/embeddings", {"input": "garden"}),
            ("GET", "/v1/models", None),
            ("GET", "/healthz", None),
            ("GET", "/openapi.json", None),
        ):
            later = ask(listening, method, path, json=body)
            assert later.status_code == 503 and later.headers["retry-after"] == "10"
            assert "40 % of the text is done" in later.json()["error"]["message"]


def test_it_asks_for_the_token_and_leaves_the_socket_to_the_whole_service(listening):
    services = [
        SearchService(Words(DOCUMENTS[i:], 120), f"docs{i}", Limits(), Access("sesame"), Site())
        for i in range(2)
    ]
    for i, service in enumerate(services):
        with in_background(service.app(), Limits(), listening):
            refused = ask(listening, "POST", "/v1/search", json={"query": "engine"})
            assert refused.status_code == 401
            given = {"authorization": "Bearer sesame"}
            assert ask(listening, "GET", "/v1/index", headers=given).json()["model"] == f"docs{i}"
