"""The service on a real server: OpenAI's client, search, bad input, tokens, full queues, slow
clients, shutdown.
"""

from __future__ import annotations

import base64
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError
from served import Backwards, build, documents, encoder, index, make_service, running, server, slow

from revela.errors import QueryError, RevelaError
from revela.retriever.tokens import TokenCounter
from revela.server import Limits, lifecycle, middleware
from revela.server.app import THREADS, Service
from revela.server.lifecycle import listen
from revela.server.schemas import EmbeddingRequest

TEXTS = [
    "ocean1 ocean2",
    "engine3",
    "a longer text about the garden and the planet",
    "ocean1 ocean2",
]
EMBEDDINGS, SEARCH = "/v1/embeddings", "/v1/search"


def client_of(server, key="unused") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.mark.parametrize("encoding_format", ["float", "base64", openai.NOT_GIVEN])
def test_openais_client_gets_the_encoders_own_vectors(server, encoder, encoding_format):
    client = client_of(server)
    answer = client.embeddings.create(model="tiny", input=TEXTS, encoding_format=encoding_format)
    assert [row.index for row in answer.data] == [0, 1, 2, 3] and answer.model == "tiny"
    vectors = [row.embedding for row in answer.data]
    if isinstance(vectors[0], str):
        vectors = [np.frombuffer(base64.b64decode(text), dtype="<f4") for text in vectors]
    np.testing.assert_allclose(np.array(vectors), encoder.encode_passages(TEXTS), atol=1e-6)
    tokenizer = encoder.model.tokenizer
    assert (
        answer.usage.prompt_tokens
        == answer.usage.total_tokens
        == sum(len(tokenizer("passage: " + text).input_ids) for text in TEXTS)
    )


def test_base64_holds_the_same_bits_as_floats(server):
    both = [
        httpx.post(
            server.url + EMBEDDINGS,
            json={"model": "tiny", "input": TEXTS[0], "encoding_format": form},
        ).json()["data"][0]["embedding"]
        for form in ("float", "base64")
    ]
    assert np.array_equal(
        np.array(both[0], dtype=np.float32), np.frombuffer(base64.b64decode(both[1]), dtype="<f4")
    )


def test_queries_get_the_query_prompt(server, encoder):
    client = client_of(server)
    by_name = client.embeddings.create(model="tiny:query", input=TEXTS[0]).data[0].embedding
    by_field = (
        client.embeddings.create(
            model="tiny:passage", input=TEXTS[0], extra_body={"input_type": "query"}
        )
        .data[0]
        .embedding
    )
    np.testing.assert_allclose(by_name, encoder.encode_queries(TEXTS[:1])[0], atol=1e-6)
    np.testing.assert_allclose(by_field, by_name, atol=1e-6)
    assert not np.allclose(by_name, encoder.encode_passages(TEXTS[:1])[0], atol=1e-3)


def test_models_are_listed_and_retrieved(server):
    client = client_of(server)
    assert [model.id for model in client.models.list()] == ["tiny", "tiny:query", "tiny:passage"]
    assert client.models.retrieve("tiny:query").owned_by == "revela"
    with pytest.raises(openai.NotFoundError, match="ask for one of tiny"):
        client.models.retrieve("other")


@pytest.mark.parametrize("mode", ["hybrid", "dense", "lexical"])
def test_search_is_the_indexs_own(server, index, encoder, mode):
    answer = httpx.post(
        server.url + SEARCH, json={"query": "ocean01 ocean02", "mode": mode, "k": 3}
    ).json()
    want = index.search("ocean01 ocean02", 3, mode)
    assert answer["mode"] == mode and answer["model"] == "tiny"
    assert [(hit["rank"], hit["id"], hit["title"], hit["text"]) for hit in answer["data"]] == [
        (rank, hit.id, hit.title, hit.text) for rank, hit in enumerate(want, 1)
    ]
    assert [hit["score"] for hit in answer["data"]] == pytest.approx(
        [hit.score for hit in want], abs=1e-6
    )


def test_search_takes_filters(server):
    ask = {"query": "ocean01 ocean02", "k": 50, "mode": "dense"}
    found = httpx.post(
        server.url + SEARCH, json={**ask, "where": {"year": {"gte": 2030}, "lang": "en"}}
    ).json()["data"]
    assert sorted(hit["metadata"]["year"] for hit in found) == list(range(2030, 2040))
    assert httpx.get(server.url + "/v1/index").json() == {
        "object": "index",
        "model": "tiny",
        "passages": 40,
        "columns": {"id": "string", "title": "string", "year": "int64", "lang": "string"},
        "tokens": True,
        "heads": False,
    }


def test_vectors_are_cut_where_the_model_was_trained_for_it(make_service, encoder):
    with running(make_service(dimensions=[8, 16])) as server:
        short = np.array(
            [
                row.embedding
                for row in client_of(server)
                .embeddings.create(model="tiny", input=TEXTS, dimensions=8)
                .data
            ]
        )
        whole = encoder.encode_passages(TEXTS)
        np.testing.assert_allclose(
            short, whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True), atol=1e-6
        )
        with pytest.raises(openai.BadRequestError, match="one of 8, 16, 32"):
            client_of(server).embeddings.create(model="tiny", input=TEXTS, dimensions=12)


def post(server, path, content, content_type="application/json", **headers):
    return httpx.post(
        server.url + path,
        content=content,
        headers={"content-type": content_type, **headers},
        timeout=120,
    )


def embedding(**fields):
    return json.dumps({"model": "tiny", "input": "a", **fields})


BAD = {
    "nothing": (EMBEDDINGS, b"", 400, None),
    "not JSON": (EMBEDDINGS, b"{", 400, None),
    "not UTF-8": (EMBEDDINGS, b'{"model": "tiny", "input": "\xff"}', 400, None),
    "a list": (EMBEDDINGS, b"[]", 400, None),
    "null": (EMBEDDINGS, b"null", 400, None),
    "deep": (
        EMBEDDINGS,
        b'{"model": "tiny", "input": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        400,
        None,
    ),
    "deep elsewhere": (
        SEARCH,
        b'{"query": "a", "x": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
        400,
        None,
    ),
    "no model": (EMBEDDINGS, b'{"input": "a"}', 400, "model"),
    "unknown model": (EMBEDDINGS, embedding(model="gpt"), 404, "model"),
    "a number": (EMBEDDINGS, embedding(input=1), 400, "input"),
    "token ids": (EMBEDDINGS, embedding(input=[1, 2]), 400, "input"),
    "NaN": (EMBEDDINGS, b'{"model": "tiny", "input": NaN}', 400, "input"),
    "empty": (EMBEDDINGS, embedding(input=""), 400, "input"),
    "one empty": (EMBEDDINGS, embedding(input=["a", ""]), 400, "input"),
    "no text": (EMBEDDINGS, embedding(input=[]), 400, "input"),
    "1 MB": (EMBEDDINGS, embedding(input="a " * 500_000), 400, "input"),
    "1 MB, to be cut": (EMBEDDINGS, embedding(input="a " * 500_000, truncate=True), 400, "input"),
    "10,000 texts": (EMBEDDINGS, embedding(input=["a"] * 10_000), 400, "input"),
    "too many tokens": (EMBEDDINGS, embedding(input=["word " * 500] * 800), 400, "input"),
    "longer than the model reads": (EMBEDDINGS, embedding(input="word " * 600), 400, "input"),
    "lone surrogate": (EMBEDDINGS, embedding(input="\ud800"), 400, "input"),
    "format": (EMBEDDINGS, embedding(encoding_format="hex"), 400, "encoding_format"),
    "dimensions": (EMBEDDINGS, embedding(dimensions=7), 400, "dimensions"),
    "dimensions of a wrong type": (EMBEDDINGS, embedding(dimensions=True), 400, "dimensions"),
    "dimensions past every number": (EMBEDDINGS, embedding(dimensions=10**400), 400, "dimensions"),
    "role": (EMBEDDINGS, embedding(input_type="title"), 400, "input_type"),
    "typo": (EMBEDDINGS, embedding(imput_type="query"), 400, "imput_type"),
    "no query": (SEARCH, b"{}", 400, "query"),
    "blank query": (SEARCH, b'{"query": " \\n"}', 400, "query"),
    "query longer than the model reads": (
        SEARCH,
        json.dumps({"query": "word " * 600}),
        400,
        "query",
    ),
    "1 MB query by words": (
        SEARCH,
        json.dumps({"query": "word " * 200_000, "mode": "lexical"}),
        400,
        "query",
    ),
    "mode": (SEARCH, b'{"query": "a", "mode": "best"}', 400, "mode"),
    "k": (SEARCH, b'{"query": "a", "k": 0}', 400, "k"),
    "k of a wrong type": (SEARCH, b'{"query": "a", "k": "3"}', 400, "k"),
    "filter by no column": (SEARCH, b'{"query": "a", "where": {"colour": 1}}', 400, "where"),
    "filter in SQL": (SEARCH, b'{"query": "a", "where": "year > 2020"}', 400, "where"),
    "filter by a function": (
        SEARCH,
        b'{"query": "a", "where": "length(repeat(\'a\', 2000000000)) > 1"}',
        400,
        "where",
    ),
    "filter by SQL as a column": (
        SEARCH,
        b'{"query": "a", "where": {"1 = 1 or year": 2020}}',
        400,
        "where",
    ),
    "filter by SQL as an operator": (
        SEARCH,
        b'{"query": "a", "where": {"year": {"> 1 or 1 =": 1}}}',
        400,
        "where",
    ),
    "filter by SQL as a value": (
        SEARCH,
        b'{"query": "a", "where": {"year": "1 or 1 = 1"}}',
        400,
        "where",
    ),
    "filter that nests deeply": (
        SEARCH,
        b'{"query": "a", "where": ' + b'{"not": ' * 100 + b'{"year": 1}' + b"}" * 101,
        400,
        "where",
    ),
    "1 MB filter": (
        SEARCH,
        json.dumps({"query": "a", "where": {"or": [{"year": 1}] * 80_000}}),
        400,
        "where",
    ),
    "8 MB of values in a filter": (
        SEARCH,
        json.dumps({"query": "a", "where": {"year": {"in": [1] * 2_500_000}}}),
        400,
        "where",
    ),
    "8 MB of digits in a filter": (
        SEARCH,
        b'{"query": "a", "where": {"year": ' + b"1" * 8_000_000 + b"}}",
        400,
        None,
    ),
    "filter of a wrong type": (SEARCH, b'{"query": "a", "where": [{"year": 1}]}', 400, "where"),
    "surrogate query": (SEARCH, b'{"query": "\\udfff"}', 400, "query"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_a_4xx_in_openais_shape(server, name):
    path, content, status, param = BAD[name]
    answer = post(server, path, content)
    error = answer.json()["error"]
    assert answer.status_code == status, error
    assert set(error) == {"message", "type", "param", "code"} and error["param"] == param
    assert (
        5 < len(error["message"]) <= 300
        and "secret" not in error["message"]
        and "Traceback" not in error["message"]
    )


def test_validation_of_texts_stops_at_the_first_error():
    with pytest.raises(ValidationError) as refused:
        EmbeddingRequest.model_validate_json(embedding(input=[""] * 2000))
    assert refused.value.error_count() == 1


@pytest.mark.parametrize(
    ("path", "content", "hint"),
    [
        (SEARCH, {"query": "a", "top_k": 3}, "there is no field top_k: send k"),
        (SEARCH, {"query": "a", "qery": "a"}, "there is no field qery: send query"),
        (
            SEARCH,
            {"query": "a", "dimensions": 3},
            "there is no field dimensions: there are query, mode, fusion, rerank, where, k",
        ),
        (EMBEDDINGS, {"model": "tiny", "texts": ["a"]}, "there is no field texts: send input"),
        (
            EMBEDDINGS,
            {"model": "tiny", "input": "a", "filter": "a"},
            "there is no field filter: there are model, input,",
        ),
    ],
)
def test_an_unknown_field_gets_a_suggestion(server, path, content, hint):
    error = post(server, path, json.dumps(content)).json()["error"]
    assert error["message"].startswith(hint) and error["param"] in content


@pytest.mark.parametrize("ids", [[1, 2], [[1, 2], [3]], [[]]])
def test_token_ids_of_langchain_are_refused_with_its_setting(server, ids):
    # OpenAIEmbeddings tokenizes with tiktoken unless it is told not to.
    body = {"input": ids, "model": "tiny", "encoding_format": "base64"}
    error = post(server, EMBEDDINGS, json.dumps(body)).json()["error"]
    assert error["param"] == "input" and error["message"].endswith(
        "send text (LangChain's OpenAIEmbeddings: check_embedding_ctx_length=False)"
    )


def test_requests_of_open_webui(server, encoder):
    # RAG_EMBEDDING_PREFIX_FIELD_NAME=input_type, RAG_EMBEDDING_QUERY_PREFIX=query and
    # RAG_EMBEDDING_CONTENT_PREFIX=passage
    names = [model["id"] for model in httpx.get(server.url + "/v1/models").json()["data"]]
    assert names[0] == "tiny"
    headers = {"authorization": "Bearer key", "x-openwebui-user-name": "bob", "accept": "*/*"}
    vectors = {}
    for role in ("query", "passage"):
        body = {"input": TEXTS, "model": "tiny", "input_type": role}
        answer = httpx.post(server.url + EMBEDDINGS, json=body, headers=headers).json()
        vectors[role] = [row["embedding"] for row in answer["data"]]
    np.testing.assert_allclose(vectors["query"], encoder.encode_queries(TEXTS), atol=1e-6)
    np.testing.assert_allclose(vectors["passage"], encoder.encode_passages(TEXTS), atol=1e-6)


@pytest.mark.parametrize(
    "fields",
    [
        {"encoding_format": "base64", "user": "bob"},  # openai, langchain-openai
        {"encoding_format": "base64"},  # llama-index-embeddings-openai-like
        {"encoding_format": "float"},  # haystack-ai
        {"dimensions": 32, "encoding_format": "base64"},
    ],
)
def test_requests_of_other_clients(server, encoder, fields):
    body = {"input": TEXTS, "model": "tiny", **fields}
    rows = httpx.post(server.url + EMBEDDINGS, json=body).json()["data"]
    vectors = [row["embedding"] for row in rows]
    if fields["encoding_format"] == "base64":
        vectors = [np.frombuffer(base64.b64decode(text), dtype="<f4") for text in vectors]
    np.testing.assert_allclose(vectors, encoder.encode_passages(TEXTS), atol=1e-6)


def test_texts_are_cut_when_the_request_says_so(server, encoder):
    answer = post(server, EMBEDDINGS, embedding(input="word " * 600, truncate=True)).json()
    assert answer["usage"]["prompt_tokens"] == 512
    np.testing.assert_allclose(
        answer["data"][0]["embedding"], encoder.encode_passages(["word " * 600])[0], atol=1e-6
    )


def test_bodies_that_are_too_long_are_413_by_length_and_by_what_arrives(server):
    limit = server.service.limits.max_body_bytes
    assert post(server, EMBEDDINGS, b" " * (limit + 1)).status_code == 413
    chunks = (b" " * 65536 for _ in range(limit // 65536 + 2))
    answer = post(server, SEARCH, chunks)
    assert answer.status_code == 413 and "send less" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("content_type"),
    ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"],
)
def test_other_content_types_are_refused(server, content_type):
    answer = post(server, EMBEDDINGS, embedding(), content_type)
    assert answer.status_code == 400 and "must be JSON" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/embeddings/", 404),
        ("GET", "/%ff%00", 404),
        ("GET", "/../../etc/passwd", 404),
        ("GET", EMBEDDINGS, 405),
        ("OPTIONS", EMBEDDINGS, 405),
        ("DELETE", "/v1/models", 405),
        ("TRACE", "/", 405),
        ("NONSENSE", "/healthz", 405),
        ("POST", "/healthz", 405),
        ("HEAD", "/healthz", 200),
        ("HEAD", "/", 200),
        ("HEAD", SEARCH, 405),
    ],
)
def test_other_routes_and_methods(server, method, path, status):
    answer = httpx.request(method, server.url + path)
    assert answer.status_code == status
    if status == 405:
        assert answer.headers["allow"]
    if status >= 400 and method != "HEAD":
        assert answer.json()["error"]["message"].endswith("see /openapi.json")


def test_connections_are_limited(make_service, monkeypatch):
    monkeypatch.setattr(lifecycle, "CONNECTIONS", 3)
    with running(make_service()) as server:
        port = int(server.url.rsplit(":", 1)[1])
        held = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(3)]
        wait_for(lambda: len(server.server.server_state.connections) == 3)
        assert httpx.get(server.url + "/healthz").status_code == 503
        for connection in held:
            connection.close()
        wait_for(lambda: not server.server.server_state.connections)
        assert httpx.get(server.url + "/healthz").status_code == 200


def wait_for(condition) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_server_with_a_token_answers_to_it_only(make_service):
    with running(make_service(token="sesame é")) as server:
        for path in ("/healthz", "/", "/openapi.json"):
            assert httpx.get(server.url + path).status_code == 200
        for given in (None, "Bearer wrong", "Basic sesame", "Bearer", "sesame é", "Bearer \xff"):
            headers = {} if given is None else {"authorization": given.encode("latin-1")}
            answer = httpx.post(server.url + SEARCH, json={"query": "a"}, headers=headers)
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert httpx.get(server.url + "/metrics").status_code == 401
        good = {"authorization": "Bearer sesame é".encode()}
        assert (
            httpx.post(server.url + SEARCH, json={"query": "ocean01"}, headers=good).status_code
            == 200
        )


def test_without_a_token_a_local_server_answers_to_local_names_only(make_service):
    with running(make_service(local_only=True)) as server:
        port = server.url.rsplit(":", 1)[1]
        for name, status in (
            ("localhost", 200),
            (f"127.0.0.1:{port}", 200),
            (f"[::1]:{port}", 200),
            ("evil.example", 421),
            ("", 421),
        ):
            assert httpx.get(server.url + "/healthz", headers={"host": name}).status_code == status


def test_a_full_queue_is_429_with_retry_after(make_service, slow):
    with (
        running(make_service(encoder=slow, max_tokens=200, max_searches=1)) as server,
        ThreadPoolExecutor(4) as pool,
    ):
        slow.stop()
        first = pool.submit(post, server, EMBEDDINGS, embedding(input="first"))
        assert slow.begun.wait(60)
        half = embedding(input="?" * 120)  # a token each
        waits = pool.submit(post, server, EMBEDDINGS, half)
        searches = pool.submit(post, server, SEARCH, b'{"query": "a"}')
        while (
            server.service.batcher.waiting_tokens["passage"] < 100 or not server.service.searching
        ):
            time.sleep(0.01)
        for path, body in ((EMBEDDINGS, half), (SEARCH, b'{"query": "b"}')):
            refused = post(server, path, body)
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "queue_full"
        assert 'revela_queue_tokens{role="passage"}' in httpx.get(server.url + "/metrics").text
        slow.open.set()
        assert [answer.result(120).status_code for answer in (first, waits, searches)] == [200] * 3


def test_texts_of_a_client_that_has_left_are_not_encoded(make_service, slow):
    with running(make_service(encoder=slow)) as server, ThreadPoolExecutor(2) as pool:
        slow.stop()
        first = pool.submit(post, server, EMBEDDINGS, embedding(input="first"))
        assert slow.begun.wait(60)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                server.url + EMBEDDINGS, json={"model": "tiny", "input": "abandoned"}, timeout=0.3
            )
        time.sleep(0.2)
        slow.open.set()
        assert first.result(120).status_code == 200
        assert post(server, EMBEDDINGS, embedding(input="later")).status_code == 200
        assert [text for _, texts in slow.batches for text in texts] == ["first", "later"]


class Held:
    """Work that counts how often it is begun, and goes on once ``go_on`` is set."""

    def __init__(self) -> None:
        self.begun, self.go_on = 0, threading.Event()

    def wait(self) -> None:
        self.begun += 1
        assert self.go_on.wait(120)


def assert_clients_that_leave_keep_their_threads(server, held: Held, path: str, asked) -> None:
    for _ in range(THREADS + 4):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + path, json=asked, timeout=httpx.Timeout(60, read=0.1))
    time.sleep(0.2)
    assert held.begun == THREADS
    held.go_on.set()
    assert httpx.post(server.url + path, json=asked, timeout=60).status_code == 200
    assert held.begun == THREADS + 1  # what waited was dropped


def test_texts_of_clients_that_have_left_are_counted_in_few_threads(make_service, monkeypatch):
    held = Held()

    def count(texts):
        held.wait()
        return [1] * len(texts)

    with running(make_service()) as server:
        monkeypatch.setitem(server.service.count, "passage", count)
        asked = {"model": "tiny", "input": "a"}
        assert_clients_that_leave_keep_their_threads(server, held, EMBEDDINGS, asked)


def test_searches_of_clients_that_have_left_keep_their_threads(make_service, index, monkeypatch):
    held = Held()

    def search(*_):
        held.wait()
        return []

    monkeypatch.setattr(type(index), "search", search)
    with running(make_service()) as server:
        asked = {"query": "a", "mode": "lexical"}
        assert_clients_that_leave_keep_their_threads(server, held, SEARCH, asked)


def test_shutdown_finishes_accepted_requests(make_service, slow):
    with running(make_service(encoder=slow)) as server, ThreadPoolExecutor(4) as pool:
        slow.stop()
        answers = [pool.submit(post, server, EMBEDDINGS, embedding(input="text 0"))]
        assert slow.begun.wait(60)
        answers += [
            pool.submit(post, server, EMBEDDINGS, embedding(input=f"text {i}")) for i in (1, 2)
        ]
        while server.service.batcher.waiting_tokens["passage"] == 0:
            time.sleep(0.01)
        time.sleep(0.2)
        server.server.should_exit = True
        time.sleep(0.5)
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url + "/healthz")
        slow.open.set()
        assert [answer.result(120).status_code for answer in answers] == [200] * 3
        server.thread.join(60)
        assert not server.thread.is_alive() and not server.service.batcher.alive


def test_server_errors_name_no_path(make_service, slow, monkeypatch, capfd):
    with running(make_service(encoder=slow)) as server:
        monkeypatch.setattr(
            slow,
            "_encode",
            lambda role, texts: (_ for _ in ()).throw(OSError("/home/secret/weights")),
        )
        answer = post(server, EMBEDDINGS, embedding())
        assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
        assert "secret" not in answer.text and "File" not in answer.text
        broken = RevelaError("/home/secret gives vectors that are not finite")
        monkeypatch.setattr(slow, "_encode", lambda role, texts: (_ for _ in ()).throw(broken))
        answer = post(server, SEARCH, b'{"query": "a"}')
        assert answer.status_code == 500 and "secret" not in answer.text
        folder = server.service.index.folder
        for error, status in (
            (QueryError(f"no such words: {folder}"), 400),  # a folder may be called as a word is
            (RevelaError(f"{folder} is damaged"), 500),
        ):
            monkeypatch.setattr(
                type(server.service.index),
                "search",
                lambda *_, error=error: (_ for _ in ()).throw(error),
            )
            answer = post(server, SEARCH, b'{"query": "a", "mode": "lexical"}')
            assert answer.status_code == status and (str(error) in answer.text) == (status == 400)
    assert "/home/secret/weights" in capfd.readouterr().err


def test_metrics_are_prometheus_text_and_count(make_service):
    with running(make_service()) as server:
        post(server, EMBEDDINGS, embedding(input=["a", "b", "c"]))
        post(server, EMBEDDINGS, b"{")
        httpx.get(server.url + "/secret")
        answer = httpx.get(server.url + "/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        found = {
            (sample.name, *sorted(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
        }
        assert (
            found["revela_requests_total", "200", "embeddings"]
            == found["revela_requests_total", "400", "embeddings"]
            == 1
        )
        assert found["revela_requests_total", "404", "other"] == 1 and "secret" not in answer.text
        assert (
            found["revela_batch_texts_sum", "passage"] == 3
            and found["revela_batch_texts_count", "passage"] == 1
        )
        assert (
            found["revela_request_seconds_count", "embeddings"] == 2
            and found["revela_queue_tokens", "query"] == 0
        )


def test_many_clients_at_once_get_their_own_vectors(server, encoder):
    texts = [f"ocean{i % 6} garden{i % 5} text {i}" for i in range(120)]
    client = client_of(server)
    with ThreadPoolExecutor(16) as pool:
        got = list(
            pool.map(
                lambda text: client.embeddings.create(model="tiny", input=text).data[0].embedding,
                texts,
            )
        )
    np.testing.assert_allclose(np.array(got), encoder.encode_passages(texts), atol=2e-6)


def test_an_address_in_use_is_one_sentence():
    with (
        listen("127.0.0.1", 0) as taken,
        pytest.raises(RevelaError, match="choose another --host or --port"),
    ):
        taken.listen()
        listen("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(RevelaError, match="choose another --host or --port"):
        listen("no.such.host.invalid", 80)


def test_search_reranks_by_tokens_and_fuses_as_asked(server, index, encoder):
    for asked in ({"rerank": "tokens"}, {"fusion": "rank"}, {"mode": "dense", "rerank": "tokens"}):
        found = post(server, SEARCH, json.dumps({"query": "word1 word2", "k": 5, **asked})).json()[
            "data"
        ]
        hits = index.search("word1 word2", 5, **asked)
        assert [(row["id"], row["chunk"]) for row in found] == [(hit.id, hit.chunk) for hit in hits]
        assert [row["score"] for row in found] == pytest.approx(
            [hit.score for hit in hits], abs=1e-5
        )
    refused = post(
        server, SEARCH, json.dumps({"query": "a", "mode": "lexical", "rerank": "tokens"})
    )
    assert (
        refused.status_code == 400 and "re-rank dense search" in refused.json()["error"]["message"]
    )


def test_reranking_by_tokens_encodes_its_query_once_in_the_queue_of_all(
    make_service, slow, index, monkeypatch
):
    """In one batch with a query whose tokens nobody wants."""
    asked = [{"query": f"word{i} ocean01", "k": 5} for i in range(2)]
    asked[1]["rerank"] = "tokens"
    wanted = [index.search(a["query"], 5, rerank=a.get("rerank")) for a in asked]
    monkeypatch.setattr(index, "_encoder", None)  # which only the batcher may use
    with running(make_service(encoder=slow)) as server, ThreadPoolExecutor(3) as pool:
        slow.stop()
        pool.submit(post, server, EMBEDDINGS, embedding())
        assert slow.begun.wait(60)
        answers = [pool.submit(post, server, SEARCH, json.dumps(a)) for a in asked]
        both = sum(server.service.count["query"]([a["query"] for a in asked]))
        while server.service.batcher.waiting_tokens["query"] < both:
            time.sleep(0.01)
        slow.open.set()
        for answer, hits in zip(answers, wanted, strict=True):
            found = answer.result().json()["data"]
            assert [row["id"] for row in found] == [hit.id for hit in hits]
            assert [row["score"] for row in found] == pytest.approx(
                [hit.score for hit in hits], abs=1e-5
            )
    assert [role for role, texts in slow.batches[1:]] == ["query with tokens"]


def test_reranking_by_heads_runs_one_search_at_a_time_and_others_pass(make_service, index, encoder):
    reranker = Backwards()
    asked = [
        {"query": "ocean01 word", "mode": mode, "rerank": "heads", "k": 25}
        for mode in ("hybrid", "lexical")
    ]
    wanted = [index.search(a["query"], 25, a["mode"], rerank=Backwards()) for a in asked]
    with running(make_service(reranker=reranker)) as server, ThreadPoolExecutor(1) as pool:
        reranker.open.clear()
        first = pool.submit(post, server, SEARCH, json.dumps(asked[0]))
        assert reranker.begun.wait(60) and httpx.get(server.url + "/v1/index").json()["heads"]
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                server.url + SEARCH,
                json={"query": "nobody waits for this", "rerank": "heads"},
                timeout=1,
            )
        plain = post(server, SEARCH, json.dumps({"query": "ocean01 word", "k": 25}))
        reranker.open.set()
        found = [
            answer.json()["data"]
            for answer in (first.result(60), post(server, SEARCH, json.dumps(asked[1])))
        ]
    assert [[hit["id"] for hit in hits] for hits in found] == [
        [hit.id for hit in hits] for hits in wanted
    ]
    assert {hit["id"] for hit in plain.json()["data"]} == {hit["id"] for hit in found[0]}
    assert [hit["id"] for hit in plain.json()["data"]] != [hit["id"] for hit in found[0]]
    assert reranker.read == ["ocean01 word"] * 2


def test_search_refuses_heads_without_a_language_model(server):
    refused = post(server, SEARCH, json.dumps({"query": "a", "rerank": "heads"}))
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "rerank"
    assert "start revela serve with --lm" in refused.json()["error"]["message"]


def test_search_refuses_tokens_that_the_index_does_not_keep(encoder, tmp_path):
    plain = build(tmp_path / "plain", documents(5, 1), encoder, keep_tokens=False)
    with running(Service(plain, encoder, encoder.counter, "tiny", Limits())) as server:
        refused = post(server, SEARCH, json.dumps({"query": "a", "rerank": "tokens"}))
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "rerank"
        assert "make it with revela index --keep-tokens" in refused.json()["error"]["message"]
