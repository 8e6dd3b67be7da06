"""Re-rank a client's own texts, over HTTP and in Python."""

from __future__ import annotations

import pytest
from served import encoder, index, make_service, running, server
from test_app import RERANK, post

import revela
from revela.encoders.load import load_encoder
from revela.errors import RevelaError

TEXTS = ["the castle and its garden", "ocean1 ocean2 of the sea", "an engine", ""]
QUERY = "ocean1 ocean2"


def test_texts_are_ranked_as_in_python(server, encoder):
    body = {"model": "tiny", "query": QUERY, "documents": TEXTS, "top_n": 3}
    results = post(server, RERANK, body).json()["results"]
    assert len(results) == 3 and results[0]["index"] == 1
    scores = [result["relevance_score"] for result in results]
    assert scores == sorted(scores, reverse=True) and scores[0] <= 1
    assert all(set(result) == {"index", "relevance_score"} for result in results)
    repeated = post(server, RERANK, body | {"return_documents": True}).json()["results"]
    documents = [{"text": TEXTS[result["index"]]} for result in results]
    assert [result.pop("document") for result in repeated] == documents and repeated == results
    in_python = revela.rerank(QUERY, TEXTS, encoder)
    assert in_python[0][0] == 1 and sorted(i for i, _ in in_python) == [0, 1, 2, 3]


def test_long_texts_are_truncated(server):
    body = {"query": QUERY, "documents": ["word " * 600, QUERY]}
    assert post(server, RERANK, body).json()["results"][0]["index"] == 1


def test_a_model_without_tokens_says_so(make_service, static_folder):
    table = load_encoder(static_folder, "auto")
    service = make_service(encoder=table)
    with running(service) as server:
        body = {"query": "ocean", "documents": ["ocean"]}
        assert "no token vectors" in post(server, RERANK, body).json()["error"]["message"]
    with pytest.raises(RevelaError, match="no token vectors"):
        revela.rerank("ocean", ["ocean"], table)


def test_python_refuses_what_it_cannot_rank(encoder):
    assert revela.rerank("ocean", [], encoder) == []
    with pytest.raises(RevelaError, match="query is empty"):
        revela.rerank(" ", ["a"], encoder)
