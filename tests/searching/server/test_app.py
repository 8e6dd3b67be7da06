"""The service on a real server: OpenAI's client, search, bad input, tokens, full queues, slow
clients, shutdown.
"""

from __future__ import annotations

import base64
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime

import httpx
import numpy as np
import openai
import pytest
from served import build, documents, encoder, index, make_service, running, server, slow

from conftest import wait_for
from revela.errors import QueryError, RevelaError
from revela.searching.server import Access, Site, lifecycle
from revela.searching.server.lifecycle import listen
from revela.types import Document

TEXTS = ["ocean1 ocean2", "engine3", "a longer text on the garden and the planet", "ocean1 ocean2"]
EMBEDDINGS, SEARCH, RERANK = "/v1/embeddings", "/v1/search", "/v1/rerank"


def client_of(server, key="unused") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def vectors_of(rows):
    """As numbers, whether they came as a list or as base64."""
    found = [row["embedding"] if isinstance(row, dict) else row.embedding for row in rows]
    if isinstance(found[0], str):
        found = [np.frombuffer(base64.b64decode(text), dtype="<f4") for text in found]
    return np.array(found, np.float32)


@pytest.mark.parametrize("encoding_format", ["float", "base64", openai.NOT_GIVEN])
def test_openais_client_gets_the_encoders_own_vectors(server, encoder, encoding_format):
    client = client_of(server)
    answer = client.embeddings.create(
        model="tiny", input=TEXTS, encoding_format=encoding_format, user="bob", dimensions=32
    )
    assert [row.index for row in answer.data] == [0, 1, 2, 3] and answer.model == "tiny"
    np.testing.assert_allclose(vectors_of(answer.data), encoder.encode_passages(TEXTS), atol=1e-6)
    tokenizer = encoder.model.tokenizer
    read = sum(len(tokenizer("passage: " + text).input_ids) for text in TEXTS)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == read


def test_queries_get_the_query_prompt(server, encoder):
    """By the model's name, or by the field that Open WebUI is set to send."""
    for model, more, encode in (
        ("tiny:query", {}, encoder.encode_queries),
        ("tiny:passage", {"input_type": "query"}, encoder.encode_queries),
        ("tiny", {"input_type": "passage"}, encoder.encode_passages),
    ):
        answer = post(server, EMBEDDINGS, embedding(model=model, input=TEXTS[0], **more))
        (vector,) = vectors_of(answer.json()["data"])
        np.testing.assert_allclose(vector, encode(TEXTS[:1])[0], atol=1e-6)
    assert not np.allclose(vector, encoder.encode_queries(TEXTS[:1])[0], atol=1e-3)


def test_models_are_listed_and_retrieved(server):
    client = client_of(server)
    assert [model.id for model in client.models.list()] == ["tiny", "tiny:query", "tiny:passage"]
    assert client.models.retrieve("tiny:query").owned_by == "revela"
    with pytest.raises(openai.NotFoundError, match="ask for one of tiny"):
        client.models.retrieve("other")


def assert_hits(rows, hits):
    """What the server gives is what the index finds."""
    for name in ("id", "chunk", "title", "text"):
        assert [row[name] for row in rows] == [getattr(hit, name) for hit in hits], name
    assert [row["rank"] for row in rows] == list(range(1, len(hits) + 1))
    assert [row["score"] for row in rows] == pytest.approx([hit.score for hit in hits], abs=1e-5)
    for row, hit in zip(rows, hits, strict=True):
        assert row["confidence"] == pytest.approx(hit.confidence, abs=1e-4)
        why = hit.explanation and asdict(hit.explanation)
        assert row["explanation"] == (why and pytest.approx(why, abs=1e-5))


ASKED = [
    *({"mode": "hybrid"}, {"mode": "dense"}, {"mode": "lexical"}, {"fusion": "rank"}),
    *({"mode": how, "rerank": "late-interaction"} for how in ("hybrid", "dense")),
    *({"explain": True, "rerank": "late-interaction"}, {"explain": True, "min_score": 0.45}),
]


@pytest.mark.parametrize("asked", ASKED)
def test_search_is_the_indexs_own(server, index, encoder, asked):
    answer = post(server, SEARCH, query(query="ocean01 ocean02", k=3, **asked)).json()
    assert answer["mode"] == asked.get("mode", "hybrid") and answer["model"] == "tiny"
    hits = index.search("ocean01 ocean02", 3, **asked)
    assert_hits(answer["data"], hits)
    assert answer["answer"] == hits.answer


def test_search_takes_filters(server):
    asked = query(query="ocean01 ocean02", k=50, mode="dense")
    found = post(server, SEARCH, {**asked, "where": {"year": {"gte": 2030}, "lang": "en"}}).json()
    years = sorted(hit["metadata"]["year"] for hit in found["data"])
    assert years == list(range(2030, 2040))
    about = httpx.get(server.url + "/v1/index").json()
    assert datetime.fromisoformat(about.pop("updated")) <= datetime.now(UTC)
    own = ("id", "title", "date", "type", "language", "lang")
    columns = dict.fromkeys(own, "string") | {"year": "int64"}
    known = dict(name="", model="tiny", documents=40, passages=40, tokens=True, rerank="none")
    assert about == {"object": "index", "columns": columns, **known}


def test_search_is_an_address_too(server):
    asked = {"query": "ocean01 ocean02", "k": 50, "mode": "dense", "title": "OCEAN"}
    where = {"year": {"gte": 2030}, "lang": "en"}
    found = post(server, SEARCH, {**asked, "where": where}).json()
    params = asked | {"where": json.dumps(where)}
    same = httpx.get(server.url + SEARCH, params=params).json()
    assert found["data"] == same["data"] and same["query"] == asked["query"]
    assert same["data"] and all("ocean" in hit["title"].lower() for hit in same["data"])
    for wrong, said in (
        ({"k": "many"}, "k: input should be a valid integer"),
        ({"where": "year > 1"}, "where is a JSON object, not SQL"),
        ({"year": 1}, "year: extra inputs are not permitted"),
        ({"since": "May"}, "a date must be a year, a month or a day"),
    ):
        answer = httpx.get(server.url + SEARCH, params=asked | wrong)
        assert answer.status_code == 400 and said in answer.json()["error"]["message"]


def test_results_say_where_their_words_stand(make_service, encoder, tmp_path):
    (tmp_path / "docs").mkdir()
    text = "# One\r\n\r\nocean01 [here](x).\r\n\r\nA *garden01*, ocean02."
    (tmp_path / "docs" / "a b.md").write_bytes(text.encode())
    rows = [Document("a b.md", text), Document("copy", "ocean01"), Document("rows:2", " ocean01\n")]
    service = make_service(local_only=True)
    service.index = build(tmp_path / "index", rows, encoder)
    service.index.state.compare([], [], [])
    service.index.state.begin({"sources": [str(tmp_path / "docs")]})
    service.site = Site("notes", "https://a.example/x/")
    asked = query(query="garden01?", k=3, mode="lexical", marked=True)
    with running(service) as server:
        (hit,) = post(server, SEARCH, asked).json()["data"]
        plain = "ocean01 here.\nA garden01, ocean02."
        assert hit["snippet"] == hit["passage"] == {"text": plain, "marks": [[16, 24]]}
        assert (hit["heading"], hit["title"], hit["line"], hit["page"]) == ("One", "", 5, None)
        assert hit["path"] == str(tmp_path / "docs" / "a b.md")
        assert hit["url"] == "https://a.example/x/a%20b.md"
        found = post(server, SEARCH, query(query="ocean01", mode="lexical")).json()["data"]
        first, second = found[:2]
        assert [first["same_as"], second["same_as"]] == [None, 1] and first["passage"] is None
        assert first["path"] is None and {first["id"], second["id"]} == {"copy", "rows:2"}
        assert httpx.get(server.url + "/v1/index").json()["name"] == "notes"
        service.access = Access()  # a stranger does not learn where files lie
        (hit,) = post(server, SEARCH, asked).json()["data"]
        assert hit["path"] is None and hit["url"]
        assert post(server, SEARCH, asked).json()["note"] is None
        service.index.notice = "3 new or changed documents are not searched yet."
        assert post(server, SEARCH, asked).json()["note"] == service.index.notice


def test_vectors_are_cut_where_the_model_was_trained_for_it(make_service, encoder):
    with running(make_service(dimensions=[8, 16])) as server:
        create = client_of(server).embeddings.create
        short = vectors_of(create(model="tiny", input=TEXTS, dimensions=8).data)
        cut = encoder.encode_passages(TEXTS)[:, :8]
        want = cut / np.linalg.norm(cut, axis=1, keepdims=True)
        np.testing.assert_allclose(short, want, atol=1e-6)
        with pytest.raises(openai.BadRequestError, match="one of 8, 16, 32"):
            create(model="tiny", input=TEXTS, dimensions=12)


def post(server, path, content, content_type="application/json", **headers):
    """Content: bytes and strings as they are, all else as JSON."""
    if isinstance(content, dict):
        content = json.dumps(content)
    headers = {"content-type": content_type, **headers}
    return httpx.post(server.url + path, content=content, headers=headers, timeout=120)


def embedding(**fields):
    return {"model": "tiny", "input": "a", **fields}


def query(**fields):
    return {"query": "a", **fields}


BAD_EMBEDDINGS = {  # the body, and the field that is at fault
    "nothing": (b"", None),
    "not JSON": (b"{", None),
    "not UTF-8": (b'{"model": "tiny", "input": "\xff"}', None),
    "a list": (b"[]", None),
    "deep": (b'{"model": "tiny", "input": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
    "no model": (b'{"input": "a"}', "model"),
    "a number": (embedding(input=1), "input"),
    "NaN": (b'{"model": "tiny", "input": NaN}', "input"),
    "empty": (embedding(input=""), "input"),
    "one empty": (embedding(input=["a", ""]), "input"),
    "no text": (embedding(input=[]), "input"),
    "1 MB": (embedding(input="a " * 500_000), "input"),
    "1 MB, to be cut": (embedding(input="a " * 500_000, truncate=True), "input"),
    "10,000 texts": (embedding(input=["a"] * 10_000), "input"),
    "too many tokens": (embedding(input=["word " * 500] * 800), "input"),
    "longer than the model reads": (embedding(input="word " * 600), "input"),
    "lone surrogate": (embedding(input="\ud800"), "input"),
    "format": (embedding(encoding_format="hex"), "encoding_format"),
    "dimensions": (embedding(dimensions=7), "dimensions"),
    "dimensions of a wrong type": (embedding(dimensions=True), "dimensions"),
    "dimensions past every number": (embedding(dimensions=10**400), "dimensions"),
    "role": (embedding(input_type="title"), "input_type"),
    "typo": (embedding(imput_type="query"), "imput_type"),
}
BAD_SEARCHES = {
    "deep": (b'{"query": "a", "x": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001, None),
    "no query": (b"{}", "query"),
    "blank query": (b'{"query": " \\n"}', "query"),
    "surrogate query": (b'{"query": "\\udfff"}', "query"),
    "mode": (query(mode="best"), "mode"),
    "rerank": (query(rerank="heads"), "rerank"),
    "k": (query(k=0), "k"),
    "k of a wrong type": (query(k="3"), "k"),
    "filter by no column": (query(where={"colour": 1}), "where"),
    "filter in SQL": (query(where="year > 2020"), "where"),
    "filter by SQL as a column": (query(where={"1 = 1 or year": 2020}), "where"),
    "filter that nests deeply": (
        b'{"query": "a", "where": ' + b'{"not": ' * 100 + b'{"year": 1}' + b"}" * 101, "where",
    ),
    "1 MB filter": (query(where={"or": [{"year": 1}] * 80_000}), "where"),
    "8 MB of values in a filter": (query(where={"year": {"in": [1] * 2_500_000}}), "where"),
    "8 MB of digits in a filter": (
        b'{"query": "a", "where": {"year": ' + b"1" * 8_000_000 + b"}}", None,
    ),
    "filter of a wrong type": (query(where=[{"year": 1}]), "where"),
}  # fmt: skip
BAD_RERANKS = {
    "no query of texts": ({"documents": ["a"]}, "query"),
    "blank query of texts": ({"query": " ", "documents": ["a"]}, "query"),
    "no texts": (query(documents=[]), "documents"),
    "texts as objects": (query(documents=[{"text": "a"}]), "documents"),
    "no results": (query(documents=["a"], top_n=0), "top_n"),
    "truncate": (query(documents=["a"], truncate=True), "truncate"),
}
BAD = {EMBEDDINGS: BAD_EMBEDDINGS, SEARCH: BAD_SEARCHES, RERANK: BAD_RERANKS}


def test_a_filter_in_an_address_may_nest_as_deeply_as_a_body(server):
    answer = httpx.get(f"{server.url}{SEARCH}", params={"query": "a", "where": "[" * 20_000})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "where"


@pytest.mark.parametrize(
    ("path", "content", "param"),
    [pytest.param(p, *bad, id=name) for p, some in BAD.items() for name, bad in some.items()],
)
def test_bad_input_is_a_400_in_openais_shape(server, path, content, param):
    answer = post(server, path, content)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert set(error) == {"message", "type", "param", "code"} and error["param"] == param
    assert 5 < len(error["message"]) <= 300
    assert "secret" not in error["message"] and "Traceback" not in error["message"]


@pytest.mark.parametrize(
    ("path", "body"), [(EMBEDDINGS, embedding()), (RERANK, query(documents=["a"]))]
)
def test_a_model_that_is_not_here_is_404(server, path, body):
    answer = post(server, path, {**body, "model": "gpt"})
    assert answer.status_code == 404 and answer.json()["error"]["param"] == "model"


@pytest.mark.parametrize("name", ["top_k", "dimensions", "x" * 200])
def test_an_unknown_field_is_named(server, name):
    error = post(server, SEARCH, query(**{name: 3})).json()["error"]
    assert error["message"] == f"{name}: extra inputs are not permitted"
    assert error["param"] == name[:100]


@pytest.mark.parametrize("ids", [[1, 2], [[1, 2], [3]], [[]]])
def test_token_ids_of_langchain_are_refused_with_its_setting(server, ids):
    """OpenAIEmbeddings tokenizes with tiktoken unless a setting says not to."""
    error = post(server, EMBEDDINGS, embedding(input=ids)).json()["error"]
    hint = "send text (LangChain's OpenAIEmbeddings: check_embedding_ctx_length=False)"
    assert error["param"] == "input" and error["message"].endswith(hint)


def test_texts_are_cut_when_the_request_says_so(server, encoder):
    answer = post(server, EMBEDDINGS, embedding(input="word " * 600, truncate=True)).json()
    assert answer["usage"]["prompt_tokens"] == 512
    expected = encoder.encode_passages(["word " * 600])
    np.testing.assert_allclose(vectors_of(answer["data"]), expected, atol=1e-6)


def test_bodies_that_are_too_long_are_413_by_length_and_by_what_arrives(server):
    limit = server.service.limits.max_body_bytes
    assert post(server, EMBEDDINGS, b" " * (limit + 1)).status_code == 413
    chunks = (b" " * 65536 for _ in range(limit // 65536 + 2))
    answer = post(server, SEARCH, chunks)
    assert answer.status_code == 413 and "send less" in answer.json()["error"]["message"]


@pytest.mark.parametrize("content_type", ["", "text/plain", "multipart/form-data; boundary=x"])
def test_other_content_types_are_refused(server, content_type):
    answer = post(server, EMBEDDINGS, embedding(), content_type)
    assert answer.status_code == 400 and "must be JSON" in answer.json()["error"]["message"]


OTHER_ROUTES = [
    *(("GET", "/nothing", 404), ("GET", "/v1/embeddings/", 404), ("GET", "/%ff%00", 404)),
    *(("GET", "/../../etc/passwd", 404), ("GET", EMBEDDINGS, 405), ("TRACE", "/", 405)),
    *(("DELETE", "/v1/models", 405), ("NONSENSE", "/healthz", 405), ("HEAD", SEARCH, 405)),
    *(("HEAD", "/healthz", 200), ("HEAD", "/", 200)),
]


@pytest.mark.parametrize(("method", "path", "status"), OTHER_ROUTES)
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


def test_a_server_with_a_token_answers_to_it_only(make_service):
    with running(make_service(token="sesame é")) as server:
        for path in ("/healthz", "/", "/openapi.json"):
            assert httpx.get(server.url + path).status_code == 200
        for given in (None, "Bearer wrong", "Basic sesame", "Bearer", "sesame é", "Bearer \xff"):
            headers = {} if given is None else {"authorization": given.encode("latin-1")}
            answer = post(server, SEARCH, query(), **headers)
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert httpx.get(server.url + "/metrics").status_code == 401
        good = {"authorization": "Bearer sesame é".encode()}
        assert post(server, SEARCH, query(query="ocean01"), **good).status_code == 200


def test_without_a_token_a_local_server_answers_to_local_names_only(make_service):
    with running(make_service(local_only=True)) as server:
        port = server.url.rsplit(":", 1)[1]
        names = dict.fromkeys(("localhost", f"127.0.0.1:{port}", f"[::1]:{port}"), 200)
        for name, status in (names | {"evil.example": 421, "": 421}).items():
            assert httpx.get(server.url + "/healthz", headers={"host": name}).status_code == status


def test_a_full_queue_is_429_with_retry_after(make_service, slow):
    service = make_service(encoder=slow, max_tokens=200, max_searches=1)
    with running(service) as server, ThreadPoolExecutor(4) as pool:
        slow.stop()
        first = pool.submit(post, server, EMBEDDINGS, embedding(input="first"))
        assert slow.begun.wait(60)
        half = embedding(input="?" * 120)  # a token each
        waits = pool.submit(post, server, EMBEDDINGS, half)
        searches = pool.submit(post, server, SEARCH, query())
        waiting = service.encoding.batcher.waiting_tokens
        wait_for(lambda: waiting["passage"] >= 100 and service.slots.locked())
        for path, body in ((EMBEDDINGS, half), (SEARCH, query(query="b"))):
            refused = post(server, path, body)
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "queue_full"
        slow.open.set()
        assert [answer.result(120).status_code for answer in (first, waits, searches)] == [200] * 3


def test_shutdown_finishes_accepted_requests(make_service, slow):
    with running(make_service(encoder=slow)) as server, ThreadPoolExecutor(4) as pool:
        slow.stop()
        texts = [embedding(input=f"{i}") for i in range(3)]
        answers = [pool.submit(post, server, EMBEDDINGS, texts[0])]
        assert slow.begun.wait(60)
        encoding = server.service.encoding
        one, waiting = sum(slow.count_tokens(["1"], "passage")), encoding.batcher
        answers += [pool.submit(post, server, EMBEDDINGS, text) for text in texts[1:]]
        wait_for(lambda: waiting.waiting_tokens["passage"] == 2 * one)
        server.server.should_exit = True
        wait_for(lambda: refuses(server))
        slow.open.set()
        assert [answer.result(120).status_code for answer in answers] == [200] * 3
        server.thread.join(60)
        assert not server.thread.is_alive()


def refuses(server):
    """Whether no new connection is taken."""
    try:
        httpx.get(server.url + "/healthz")
    except (httpx.ConnectError, httpx.ReadError):  # the second: it had waited to be taken
        return True
    return False


def test_server_errors_name_no_path(make_service, slow, monkeypatch, capfd):
    def failing(error):
        def fail(*_, **__):
            raise error

        return fail

    with running(make_service(encoder=slow)) as server:
        for error, path in (
            (OSError("/home/secret/weights"), EMBEDDINGS),
            (RevelaError("/home/secret gives vectors that are not finite"), SEARCH),
        ):
            monkeypatch.setattr(slow, "_encode", failing(error))
            answer = post(server, path, embedding() if path == EMBEDDINGS else query())
            assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
            assert "secret" not in answer.text and "File" not in answer.text
        folder = server.service.index.folder
        for error, status in (
            (QueryError(f"no such words: {folder}"), 400),  # a folder may be called as a word is
            (RevelaError(f"{folder} is damaged"), 500),
        ):
            monkeypatch.setattr(type(server.service.index), "search", failing(error))
            answer = post(server, SEARCH, query(mode="lexical"))
            assert answer.status_code == status and (str(error) in answer.text) == (status == 400)
    assert "/home/secret/weights" in capfd.readouterr().err


def test_an_address_in_use_is_one_sentence():
    with (
        listen("127.0.0.1", 0) as taken,
        pytest.raises(RevelaError, match="choose another --host or --port"),
    ):
        listen("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(RevelaError, match="choose another --host or --port"):
        listen("no.such.host.invalid", 80)


def test_a_server_has_prepared_tokens_before_it_answers(make_service, slow, encoder):
    """Of a graph they are compiled when they are first asked for, which other searches wait for."""
    service = make_service(encoder=slow)
    assert [role for role, _ in slow.batches] == ["query with tokens"]
    assert service.width == encoder.encode_queries(["a"]).shape[1]
    service.encoding.batcher.close()


def test_windows_shares_no_port_in_use(monkeypatch):
    stands_for_it = socket.SO_KEEPALIVE  # of another name here
    monkeypatch.setattr(socket, "SO_EXCLUSIVEADDRUSE", stands_for_it, raising=False)
    with listen("127.0.0.1", 0) as listening:
        assert listening.getsockopt(socket.SOL_SOCKET, stands_for_it)
        assert not listening.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)


def test_reranking_by_tokens_encodes_once_in_the_one_queue(make_service, slow, index, monkeypatch):
    """In one batch with a query whose tokens nobody wants."""
    asked = [{"query": f"word{i} ocean01", "k": 5} for i in range(2)]
    asked[1]["rerank"] = "late-interaction"
    wanted = [index.search(a["query"], 5, rerank=a.get("rerank")) for a in asked]
    monkeypatch.setattr(index, "_encoder", None)  # which only the batcher may use
    with running(make_service(encoder=slow)) as server, ThreadPoolExecutor(3) as pool:
        slow.stop()
        pool.submit(post, server, EMBEDDINGS, embedding())
        assert slow.begun.wait(60)
        answers = [pool.submit(post, server, SEARCH, a) for a in asked]
        both = sum(slow.count_tokens([a["query"] for a in asked], "query"))
        wait_for(lambda: server.service.encoding.batcher.waiting_tokens["query"] >= both)
        slow.open.set()
        for answer, hits in zip(answers, wanted, strict=True):
            assert_hits(answer.result().json()["data"], hits)
    assert [role for role, texts in slow.batches[1:]] == ["query with tokens"]


def test_an_index_without_tokens_says_how_to_make_one_with_them(make_service, encoder, tmp_path):
    service = make_service()
    service.index = build(tmp_path / "plain", documents(5, 1), encoder, keep_tokens=False)
    with running(service) as server:
        error = post(server, SEARCH, query(rerank="late-interaction")).json()["error"]
    assert "make it with revela index --keep-tokens" in error["message"]
    assert error["param"] == "rerank"
