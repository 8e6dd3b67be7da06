"""``revela mcp`` as a process, asked by the protocol's own client over stdio and HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import httpx2
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from served import build

from conftest import make_rows, serving
from revela.cli.mcp import IndexOpener, _tools, mcp
from revela.encoders.load import load_encoder
from revela.encoders.model_files import fingerprint
from revela.encoders.prompts import OWN
from revela.errors import RevelaError
from revela.searching.index import Index
from revela.searching.server import Site
from revela.searching.server.token_budget import count_tokens
from revela.types import Document

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3] / "src")}
LONG = " ".join(row["text"] for row in make_rows(80, sentences=6))
GUIDE = "# Guide\nThe castle is old.\n\n## Garden\nThe garden opens at nine.\n\nIt closes at ten."


@pytest.fixture(scope="module")
def served_index(static_folder, tmp_path_factory):
    found = [
        Document("guide.md", GUIDE, metadata={"year": 2020}),
        Document("a b.txt", "An engine and a violin.", "Engines", metadata={"year": 2021}),
        Document("long.txt", LONG, metadata={"year": 2022}),
    ]
    folder = tmp_path_factory.mktemp("agents") / "index"
    made_by = dict(model=str(static_folder), fingerprint=fingerprint(static_folder))
    model = load_encoder(static_folder, "auto")
    build(folder, found, model, ("year",), keep_tokens=False, **made_by)
    return folder


@asynccontextmanager
async def by_stdio(source, *flags):
    arguments = ["-m", "revela", "mcp", str(source), *flags]
    server = StdioServerParameters(command=sys.executable, args=arguments, env=ENVIRONMENT)
    async with Client(server, mode="auto") as client:
        yield client


@contextmanager
def waiting(index):
    """A server in a process that reads what the test writes to it."""
    command = [sys.executable, "-m", "revela", "mcp", str(index)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=ENVIRONMENT) as process:
        yield process


BASE = ("--base-url", "https://wiki.example/docs/")


@asynccontextmanager
async def by_http(url, mode):
    """A client that has the token."""
    headers = {"authorization": "Bearer sesame"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=60) as http,
        Client(streamable_http_client(url, http_client=http), mode=mode) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def http(served_index):
    """The address of a server with a token."""
    flags, env = (*BASE, "--token-env", "TOKEN", "--http", "0"), ENVIRONMENT | {"TOKEN": "sesame"}
    with serving("mcp", served_index, *flags, env=env) as (*_, url):
        yield url


async def ask(client):
    tools = (await client.list_tools()).tools
    assert [tool.name for tool in tools] == ["search", "fetch"]
    assert all(tool.annotations.read_only_hint for tool in tools)
    assert "year (int64)" in tools[0].description
    found = await client.call_tool("search", {"query": "when does the garden open", "k": 2})
    results = found.structured_content["results"]
    assert len(results) == 2 and json.loads(found.content[0].text)["results"] == results
    first = next(result for result in results if result["id"] == "guide.md")
    assert first["url"] == "https://wiki.example/docs/guide.md" and "path" not in first
    assert first["metadata"] == {"year": 2020} and "garden opens" in first["text"]
    assert first["title"] == "Guide" and first["line"] == 5
    cut = await client.call_tool("search", {"query": "garden", "min_score": 1.1})
    assert cut.structured_content == {"results": []}
    filtered = await client.call_tool("search", {"query": "garden", "filter": {"year": 2021}})
    (only,) = filtered.structured_content["results"]
    assert (only["id"], only["title"]) == ("a b.txt", "Engines")
    assert only["url"].endswith("/a%20b.txt")
    assert set(only) >= {"id", "title", "url", "text", "score", "chunk", "metadata"}
    guide = (await client.call_tool("fetch", {"id": "guide.md"})).structured_content
    assert guide["text"] == GUIDE and not {"next_chunk", "note"} & set(guide)
    assert set(guide) >= {"id", "title", "text", "url", "metadata"}
    return await whole(client, "long.txt", 4000), await whole(client, "long.txt", 200)


async def whole(client, document, max_tokens):
    """A document that is read to its end, in parts of at most so many tokens."""
    text, following = "", {"chunk": 0}
    while following:
        asked = {"id": document, "max_tokens": max_tokens, **following}
        found = await client.call_tool("fetch", asked)
        assert count_tokens(found.content[0].text) <= max_tokens
        part = found.structured_content
        text += part["text"]
        following = {name[5:]: part[name] for name in ("next_chunk", "next_offset") if name in part}
        where = ", ".join(f"{name}={value}" for name, value in following.items())
        assert part.get("note", "").endswith(f"fetch it with {where}." if where else "")
    return text


@pytest.mark.parametrize(
    ("transport", "mode"), [("stdio", "auto"), ("http", "auto"), ("http", "legacy")]
)
def test_agents_search_and_read(served_index, http, transport, mode):
    async def run():
        stdio = transport == "stdio"
        connected = by_stdio(served_index, *BASE) if stdio else by_http(http, mode)
        async with connected as client:
            return await ask(client)

    assert asyncio.run(run()) == (LONG, LONG)


def test_an_index_is_opened_at_the_first_call_and_again_if_that_fails(served_index, monkeypatch):
    opened, open_index = [], Index.open

    def failing_once(*given, **more):
        opened.append(given)
        if len(opened) == 1:
            raise RevelaError("the model cannot be loaded")
        return open_index(*given, **more)

    monkeypatch.setattr(Index, "open", failing_once)
    opener = IndexOpener(served_index, None, OWN)
    tools = _tools(served_index, Site(), opener, with_files=True)
    assert not opened and tools.columns["year"] == "int64"
    with pytest.raises(RevelaError, match="the model cannot be loaded"):
        tools.index()
    assert tools.index() is tools.index() and len(opened) == 2


BAD = {
    "empty": ("search", {"query": " "}, "the query is empty"),
    "long": ("search", {"query": "a" * 10_001}, "give at most 10,000"),
    "no query": ("search", {}, "query: field required"),
    "k": ("search", {"query": "a", "k": 1000}, "k: input should be less than or equal to 100"),
    "column": ("search", {"query": "a", "filter": {"colour": 1}}, "unknown column colour"),
    "SQL": ("search", {"query": "a", "filter": "year > 1"}, "filter: input should be"),
    "id": ("fetch", {"id": "none'); --"}, "is not in the index"),
    "chunk": ("fetch", {"id": "guide.md", "chunk": 99}, "has 1 passage, from 0"),
    "offset": ("fetch", {"id": "guide.md", "offset": 9999}, "passage 0 of guide.md has"),
    "budget": ("search", {"query": "a", "max_tokens": 10}, "max_tokens: input should be greater"),
}


def test_errors_are_one_sentence_of_the_tool(http):
    async def run():
        async with by_http(http, "auto") as client:
            return [await client.call_tool(tool, asked) for tool, asked, _ in BAD.values()]

    for answer, (_, _, message) in zip(asyncio.run(run()), BAD.values(), strict=True):
        text = answer.content[0].text
        assert answer.is_error and message in text and "\n" not in text
        assert "/" not in text and "Error executing" not in text


CALL = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}


def asked(url, **headers):
    accepted = {"accept": "application/json, text/event-stream"}
    return httpx.post(url, json=CALL, headers={**accepted, **headers}).status_code


def test_http_is_for_those_with_the_token(http):
    assert asked(http) == asked(http, authorization="Bearer other") == 401
    assert asked(http, authorization="Bearer sesame", host="wiki.example") == 200


def test_without_a_token_other_hosts_and_the_pages_of_others_are_refused(served_index):
    with serving("mcp", served_index, "--http", "0", env=ENVIRONMENT) as (*_, url):
        assert asked(url) == asked(url, origin="http://localhost:3000") == 200
        assert asked(url, host="evil.example") == 421
        for origin in ("http://evil.example", "http://localhost.evil.example:80", "null"):
            assert asked(url, origin=origin) == 403
        # Port 80, and a proxy, leave the port out.
        for host in ("localhost", "LOCALHOST", "127.0.0.1", "127.0.0.2:8080", "[::1]", "[::1]:80"):
            assert asked(url, host=host) == 200
            assert asked(url, host=host, origin=f"http://{host}") == 200
        assert asked(url, host="localhost", origin="https://localhost") == 200


HALVES = r"violin \ud83d", r"\ude00 violin \uD83D\uDE00", r"violin \\ud83d", r"violin \ud83d\ud83d"


def test_half_a_surrogate_pair_gets_an_answer(served_index):
    about = {"protocolVersion": "2025-03-26", "capabilities": {}}
    about["clientInfo"] = {"name": "a client", "version": "1"}
    lines = [json.dumps({**CALL, "id": "first", "method": "initialize", "params": about})]
    lines.append('{"jsonrpc": "2.0", "method": "notifications/initialized"}')
    call = json.dumps({**CALL, "id": "ID", "method": "tools/call", "params": "PARAMS"})
    for number, query in enumerate(HALVES):
        params = f'{{"name": "search", "arguments": {{"query": "{query}"}}}}'
        lines.append(call.replace('"ID"', str(number)).replace('"PARAMS"', params))
    with waiting(served_index) as process:
        process.stdin.write("\n".join(lines) + "\n")
        process.stdin.flush()
        killer = threading.Timer(60, process.kill)  # rather than wait for ever
        killer.start()
        answers = [json.loads(process.stdout.readline()) for _ in range(5)]
        killer.cancel()
        process.stdin.close()
    found = {answer["id"]: answer["result"] for answer in answers}
    for number in range(len(HALVES)):
        assert found[number]["structuredContent"]["results"][0]["id"] == "a b.txt"


def test_stdout_is_the_protocols_and_the_end_of_stdin_stops_the_server(served_index):
    with waiting(served_index) as process:
        said, _ = process.communicate(f"nonsense\n{json.dumps(CALL)}\n", timeout=120)
    assert process.returncode == 0
    assert all(json.loads(line)["jsonrpc"] == "2.0" for line in said.splitlines())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_server_though_stdin_is_open(served_index, number):
    with waiting(served_index) as process:
        process.stdin.write(json.dumps(CALL) + "\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["jsonrpc"] == "2.0"
        process.send_signal(number)
        assert process.wait(60) == -number


REFUSED = [
    (dict(host="0.0.0.0", http=0), "anyone who reaches 0.0.0.0 could read the index"),
    (dict(token_env="TOKEN"), "--token-env has no effect without --http"),
    (dict(http=70_000), "--http must be from 0"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_what_cannot_be_served_is_refused(served_index, monkeypatch, arguments, message):
    monkeypatch.setenv("TOKEN", "sesame")
    with pytest.raises(RevelaError, match=message):
        mcp(served_index, **arguments)


def test_the_entry_for_a_client_has_absolute_paths(tmp_path, monkeypatch, capsys):
    for name in ("My Notes", "model"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    mcp(Path("My Notes"), show_config=True, model="model", name='the "notes"\\')
    entry = json.loads(capsys.readouterr().out)["mcpServers"]["my-notes"]
    assert Path(entry["command"]).is_absolute()
    arguments = ["mcp", str(tmp_path / "My Notes"), f"--model={tmp_path / 'model'}"]
    assert entry["args"][-4:] == [*arguments, '--name=the "notes"\\']
    with pytest.raises(RevelaError, match="does not exist"):
        mcp(Path("none"), show_config=True)
    with pytest.raises(RevelaError, match="leave out --http"):
        mcp(Path("My Notes"), show_config=True, http=8000)
