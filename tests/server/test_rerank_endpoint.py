"""Re-ranking a client's own texts, over HTTP and in Python."""

from __future__ import annotations

import numpy as np
import pytest
from served import encoder, index, make_service, running, server
from test_app import post
from tokenizers import Tokenizer

import revela
from revela.encoder.static_encoder import StaticEncoder
from revela.errors import RevelaError
from revela.server import Limits
from revela.server.app import Service
from revela.server.encoding import ServedModel

TEXTS = ["the castle and its garden", "ocean1 ocean2 of the sea", "an engine", ""]
QUERY = "ocean1 ocean2"


def test_the_forms_of_jina_cohere_and_tei_agree_with_each_other(server, encoder):
    jina = {"model": "tiny", "query": QUERY, "documents": TEXTS, "top_n": 3}
    answer = post(server, "/v1/rerank", jina).json()
    results = answer["results"]
    assert len(results) == 3 and results[0]["index"] == 1 and answer["usage"]["total_tokens"] > 20
    scores = [result["relevance_score"] for result in results]
    assert scores == sorted(scores, reverse=True) and scores[0] <= 1
    assert all(set(result) == {"index", "relevance_score"} for result in results)
    cohere = {**jina, "documents": [{"text": t, "id": 3} for t in TEXTS], "return_documents": True}
    repeated = post(server, "/v2/rerank", cohere | {"max_tokens_per_doc": 100}).json()["results"]
    assert [r["document"]["text"] for r in repeated] == [TEXTS[r["index"]] for r in results]
    tei = {"query": QUERY, "texts": TEXTS, "raw_scores": False}
    ranked = post(server, "/rerank", tei).json()
    assert [r["index"] for r in ranked[:3]] == [r["index"] for r in results] and len(ranked) == 4
    assert [r["score"] for r in ranked[:3]] == pytest.approx(scores, abs=1e-5)
    assert set(ranked[0]) == {"index", "score"}
    in_python = revela.rerank(QUERY, TEXTS, encoder)
    assert in_python[0][0] == 1 and sorted(i for i, _ in in_python) == [0, 1, 2, 3]


def test_what_other_clients_send_beside_is_taken_where_it_is_harmless(server):
    cohere = {"query": QUERY, "documents": [{"text": t} for t in TEXTS], "top_n": 2}
    wanted = post(server, "/v1/rerank", cohere).json()["results"]
    cohere |= {"rank_fields": ["text"], "max_chunks_per_doc": 10, "max_tokens_per_doc": 4096}
    assert post(server, "/v1/rerank", cohere).json()["results"] == wanted
    litellm = {"raw_scores": False, "truncate": False, "truncation_direction": "Right"}
    litellm |= {"query": QUERY, "texts": TEXTS, "top_n": 2, "return_text": True}
    ranked = post(server, "/rerank", litellm).json()
    assert [r["index"] for r in ranked] == [r["index"] for r in wanted]
    assert post(server, "/rerank", litellm | {"truncation_direction": "left"}).status_code == 400


def test_long_texts_are_cut_unless_the_request_says_otherwise(server):
    body = {"query": QUERY, "documents": ["word " * 600, QUERY]}
    assert post(server, "/v1/rerank", body).json()["results"][0]["index"] == 1
    refused = post(server, "/v1/rerank", body | {"truncate": False})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "documents"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"documents": ["a"]}, 400, "query"),
        ({"query": " ", "documents": ["a"]}, 400, "query"),
        ({"query": "a", "documents": []}, 400, "documents"),
        ({"query": "a", "documents": [{"title": "a"}]}, 400, "documents"),
        ({"query": "a", "documents": ["a"] * 3000}, 400, "documents"),
        ({"query": "a", "documents": ["a " * 200_000]}, 400, "documents"),
        ({"query": "a", "documents": ["a"], "top_n": 0}, 400, "top_n"),
        ({"query": "a", "documents": ["a"], "rank_fields": ["a"]}, 400, "rank_fields"),
        ({"query": "a", "documents": ["a"], "model": "rerank-v3"}, 404, "model"),
        ({"query": "a", "documents": ["a"], "model": "tiny:heads"}, 404, "model"),
    ],
)
def test_bad_requests_are_refused(server, body, status, param):
    answer = post(server, "/v1/rerank", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


@pytest.fixture
def word_table(tiny_tokenizer) -> StaticEncoder:
    table = np.random.default_rng(0).normal(size=(400, 32)).astype(np.float32)
    return StaticEncoder(table, Tokenizer.from_str(tiny_tokenizer.backend_tokenizer.to_str()))


def test_a_model_without_tokens_says_so(index, word_table):
    service = Service(index, ServedModel("table", word_table, word_table.counter), Limits())
    with running(service) as server:
        error = post(server, "/rerank", {"query": "ocean", "texts": ["ocean"]}).json()["error"]
        assert "no vectors of tokens" in error["message"]
    with pytest.raises(RevelaError, match="no token vectors"):
        revela.rerank("ocean", ["ocean"], word_table)


def test_python_refuses_what_it_cannot_rank(encoder):
    assert revela.rerank("ocean", [], encoder) == []
    with pytest.raises(RevelaError, match="query is empty"):
        revela.rerank(" ", ["a"], encoder)
