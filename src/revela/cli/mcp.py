"""``revela mcp``: an index, or a folder of text, as tools for agents."""

from __future__ import annotations

import logging
import signal
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from revela.cli.flags import PROMPTS, Flat, PromptFlags
from revela.cli.main import app
from revela.cli.serve import token_of
from revela.encoder.prompts import Given as GivenPrompts
from revela.errors import RevelaError
from revela.server import Access, Limits

if TYPE_CHECKING:
    from revela.index.index import Index
    from revela.server.mcp import Documents

SYNC_SECONDS = 30


@app.command
def mcp(
    index_folder: Annotated[Path, Parameter(name="index")],
    *,
    name: str | None = None,
    base_url: str = "",
    http: int | None = None,
    host: str = "127.0.0.1",
    token_env: str | None = None,
    token_file: Path | None = None,
    model: str | None = None,
    prompts: Annotated[PromptFlags, Flat] = PROMPTS,
) -> None:
    """Serve an index to agents, by the Model Context Protocol: tools that search and fetch.

    Parameters
    ----------
    index_folder:
        Folder made by revela index; or a folder of text, whose index is kept in the cache.
    name:
        What the documents are, in a few words, for agents to choose by; default: the folder's name.
    base_url:
        Address that the documents' ids are relative to, for citations.
    http:
        Port for streamable HTTP at /mcp; by default the protocol is spoken over stdin and stdout.
    host:
        Address to listen on with --http; one that is not a loopback address needs a token.
    token_env:
        Environment variable with the token that HTTP clients must send (Authorization: Bearer
        TOKEN).
    token_file:
        File with that token.
    model:
        As for search.
    """
    token = token_of(token_env, token_file)
    if token and http is None:
        raise RevelaError("a token is for --http: give a port, or leave the token out")
    from revela.server.mcp import mcp_server

    server = mcp_server(_documents(index_folder, name, base_url, model, prompts.given))
    if http is None:
        _show_once()
        for number in (signal.SIGINT, signal.SIGTERM):  # the thread that reads stdin sees no signal
            signal.signal(number, signal.SIG_DFL)
        server.run("stdio")
    else:
        _serve(server, host, http, token)


def _show_once() -> None:
    """Keep this package's log from the root's handler, where the SDK would show it again."""
    logging.getLogger("revela").propagate = False


def _documents(
    path: Path, name: str | None, base_url: str, model: str | None, prompts: GivenPrompts
) -> Documents:
    from revela.index.filters import OWN_COLUMNS
    from revela.index.index import Index
    from revela.index.state import is_index
    from revela.server.mcp import Documents

    name = name or path.resolve().name
    if is_index(path) or not path.exists():
        index = Index.open(path, model, prompts=prompts)
        columns = {**OWN_COLUMNS, **index.info.columns}
        return Documents(name, lambda: index, columns, base_url=base_url)
    folder = path.resolve() if path.is_dir() else path.resolve().parent
    opening = _opening(path, model, prompts)
    return Documents(name, opening.result, OWN_COLUMNS, folder, base_url)


def _opening(path: Path, model: str | None, prompts: GivenPrompts) -> Future[Index]:
    """The index of text, made in a thread, as clients do not wait long for a server; from then on
    it follows the text.
    """
    from revela.index.folder_index import kept_in_step, open_any

    opening: Future[Index] = Future()

    def run() -> None:
        try:
            index = open_any(path, model, prompts=prompts)
            opening.set_result(index)
        except Exception as error:
            opening.set_exception(error)
            return
        with kept_in_step(index, SYNC_SECONDS):
            threading.Event().wait()

    threading.Thread(target=run, name="index", daemon=True).start()
    return opening


def _serve(server: Any, host: str, port: int, token: str | None) -> None:
    from revela.server.lifecycle import listen, server_of, url_of
    from revela.server.mcp import http_app
    from revela.server.middleware import is_loopback

    listening = listen(host, port, "--http")
    address = listening.getsockname()[0]
    if token is None and not is_loopback(address):
        raise RevelaError(
            f"anyone who reaches {host} could read the index: give --token-env or --token-file"
        )
    limits = Limits()
    running = server_of(http_app(server, Access(token, token is None), limits), limits)
    listening.listen()
    _show_once()
    url = url_of(host, listening)
    print(f"serving {server.name} at {url}mcp; stop with Ctrl-C", flush=True)
    running.run(sockets=[listening])
