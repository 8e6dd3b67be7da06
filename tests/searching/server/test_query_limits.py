"""What a query may be is the same everywhere, and what is refused is not computed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from mcp.server.mcpserver.exceptions import ToolError
from served import encoder, index, make_service, running, server, slow
from test_app import EMBEDDINGS, RERANK, SEARCH, embedding, post

import revela
from conftest import wait_for
from revela.cli.search import search
from revela.errors import QueryError
from revela.evaluation.collection import Collection
from revela.evaluation.runs import search_runs
from revela.ranking.steps import QUERY_CHARACTERS
from revela.searching.server import Site
from revela.searching.server.mcp import Tools

LONG = "ocean01 " * (QUERY_CHARACTERS // 8)
TOO_LONG = LONG + "."
SENTENCE = "the query has 10,001 characters: give at most 10,000"


@pytest.fixture
def nothing_is_encoded(index, monkeypatch):
    monkeypatch.setattr(index, "_encoder", None)
    monkeypatch.setattr(type(index), "encoder", property(lambda _: pytest.fail("encodes")))


@pytest.mark.parametrize("mode", ["dense", "lexical", "hybrid"])
def test_python_and_the_shell(index, nothing_is_encoded, monkeypatch, mode):
    tools = Tools(Site("notes"), lambda: index, index.info.columns)
    monkeypatch.setattr("revela.searching.folder_index.open_any", lambda *_, **__: index)
    for ask in (
        lambda: index.search(TOO_LONG, mode=mode),
        lambda: list(index.search_many(["ocean01", TOO_LONG], mode=mode)),
        lambda: search([str(index.folder), TOO_LONG], mode=mode),
        lambda: revela.rerank(TOO_LONG, ["ocean01"], None),
        lambda: tools.search(TOO_LONG),
    ):
        with pytest.raises((QueryError, ToolError)) as refused:
            ask()
        assert str(refused.value) == SENTENCE


def test_an_evaluation_of_an_index_cuts_a_query_and_says_so(index, caplog):
    collection = Collection("c", ["d0"], ["ocean"], ["q"], [TOO_LONG], {"q": {"d0": 1}})
    ((_, run),) = search_runs(collection, {"index": index}, None)
    assert run["q"] == {hit.id: hit.score for hit in index.search(LONG, 100)}
    assert "1 query is cut to 10,000 characters, the maximum for an index (c)" in caplog.text


def test_what_is_refused_is_not_encoded(make_service, slow):
    texts, searched = {"query": "a", "documents": ["ocean01"]}, {"query": "a"}
    too_long = {"query": TOO_LONG}
    with running(make_service(encoder=slow)) as up:
        slow.batches.clear()
        for path, body in (
            *((SEARCH, {**too_long, "mode": mode}) for mode in ("dense", "lexical", "hybrid")),
            (SEARCH, {**searched, "rerank": "late-interaction", "fusion": "rank"}),
            (SEARCH, {**searched, "where": {"no": 1}}),
            (RERANK, {**texts, **too_long}),
            (RERANK, {**texts, "documents": ["ocean01"] * 3000}),
            (RERANK, {**texts, "documents": ["ocean01 " * 600] * 800}),
        ):
            refused = post(up, path, body)
            error = refused.json()["error"]
            assert refused.status_code == 400, body
            if body["query"] == TOO_LONG:
                assert (error["param"], error["message"]) == ("query", SENTENCE)
        assert not slow.batches


def test_a_query_longer_than_the_model_reads_is_cut_everywhere(server, index, encoder):
    assert sum(encoder.count_tokens([LONG], "query")) > encoder.limit
    found = post(server, SEARCH, {"query": LONG, "k": 3}).json()["data"]
    hits = index.search(LONG, 3)
    assert [hit["id"] for hit in found] == [hit.id for hit in hits]
    assert [hit["score"] for hit in found] == pytest.approx([hit.score for hit in hits], abs=1e-5)
    body = {"query": LONG, "documents": ["ocean01", "engine"]}
    assert len(post(server, RERANK, body).json()["results"]) == 2


def test_texts_whose_query_finds_no_room_leave_the_queue(make_service, slow):
    """And a query whose texts find none."""
    texts = {"query": "ocean01", "documents": [f"engine {i}" for i in range(9)]}
    with running(make_service(encoder=slow, max_tokens=200)) as up, ThreadPoolExecutor(2) as pool:
        waiting = up.service.encoding.batcher.waiting_tokens
        for role in ("query", "passage"):
            slow.stop()
            held = [pool.submit(post, up, EMBEDDINGS, embedding(input="a", input_type=role))]
            assert slow.begun.wait(60)
            empty = sum(slow.count_tokens([""], role))
            full = embedding(input="?" * (195 - empty), input_type=role)  # a token each
            held.append(pool.submit(post, up, EMBEDDINGS, full))
            wait_for(lambda role=role: waiting[role] > 190)
            assert post(up, RERANK, texts).status_code == 429
            slow.open.set()
            assert [answer.result(60).status_code for answer in held] == [200, 200]
            read = [text for _, batch in slow.batches for text in batch]
            assert not {"ocean01", *texts["documents"]} & set(read)


def test_half_a_surrogate_pair_is_refused_wherever_it_stands(server):
    bad = "\udfff"
    bodies = [
        *((SEARCH, {"query": "a", **more}) for more in ({bad: 1}, {"where": {bad: 1}})),
        *((SEARCH, {"query": "a", "where": {"lang": v}}) for v in (bad, {bad: 1}, {"eq": bad})),
        (RERANK, {"query": "a", "documents": [bad]}),
        (RERANK, {"query": bad, "documents": ["a"]}),
        (RERANK, {"query": "a", "documents": ["a"], bad: 1}),
        (EMBEDDINGS, embedding(**{bad: 1})),
        (EMBEDDINGS, embedding(input=[bad])),
    ]
    for path, body in bodies:
        refused = post(server, path, body)
        assert refused.status_code == 400, body
        assert refused.json()["error"]["type"] == "invalid_request_error"
    wrong = post(server, RERANK, {"query": "a", "documents": ["a"], "model": bad})
    assert wrong.status_code == 404
