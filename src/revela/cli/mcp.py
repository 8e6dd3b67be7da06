"""``revela mcp``: an index, or a folder of text, as tools for agents."""

from __future__ import annotations

import logging
import re
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from revela.cli.flags import PROMPTS, Flat, PromptFlags, Switch
from revela.cli.printing import print_json
from revela.cli.serve import token_of
from revela.encoders.prompts import GivenPrompts
from revela.errors import RevelaError
from revela.searching.server import Access, Limits, Site

if TYPE_CHECKING:
    from revela.searching.index import Index
    from revela.searching.server.mcp import Tools
    from revela.searching.word_search import Words


def mcp(
    index_folder: Annotated[Path, Parameter(name="index")],
    *,
    name: str | None = None,
    base_url: str = "",
    http: int | None = None,
    host: str = "127.0.0.1",
    token_env: str | None = None,
    model: str | None = None,
    prompts: Annotated[PromptFlags, Flat] = PROMPTS,
    show_config: Switch = False,
) -> None:
    """Give a folder, a file or an index to agents, by the Model Context Protocol: search and fetch.

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
    model:
        As for search.
    show_config:
        Print the entry for a client's configuration that starts this server with these flags, and
        exit.
    """
    if show_config:
        if http is not None:
            raise RevelaError("--show-config is for a server over stdin: leave out --http")
        given = dict(name=name, base_url=base_url, **vars(prompts))
        return _print_config(index_folder, model, given)
    token = token_of(token_env)
    if token and http is None:
        raise RevelaError(
            "--token-env has no effect without --http: give both, or leave --token-env out"
        )
    from revela.searching.server.mcp import mcp_server
    from revela.text.readers.common import display_path

    site = Site(name or display_path(Path(index_folder.resolve().name)), base_url)
    opener = IndexOpener(index_folder, model, prompts.given)
    # Without a token, only this machine reaches the server.
    server = mcp_server(_tools(index_folder, site, opener, with_files=token is None))
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


def _print_config(path: Path, model: str | None, given: Mapping[str, str | None]) -> None:
    """Print the entry with which a client starts this server, from any folder."""
    if not path.exists():
        raise RevelaError(f"{path} does not exist: give the path of an index, or of text")
    if model and Path(model).exists():
        model = str(Path(model).resolve())
    script = Path(sys.executable).with_name("revela")
    command = [str(script)] if script.is_file() else [sys.executable, "-m", "revela"]
    flags = {"model": model, **given}.items()
    arguments = [f"--{flag.replace('_', '-')}={value}" for flag, value in flags if value]
    path = path.resolve()
    entry = {"command": command[0], "args": [*command[1:], "mcp", str(path), *arguments]}
    name = re.sub(r"\W+", "-", path.stem.lower()).strip("-") or "documents"
    print_json({"mcpServers": {name: entry}}, indent=2)


def _tools(path: Path, site: Site, opener: IndexOpener, with_files: bool) -> Tools:
    from revela.searching.filters import OWN_COLUMNS
    from revela.searching.server.mcp import Tools
    from revela.searching.state import State, is_index

    columns = OWN_COLUMNS
    if is_index(path) or not path.exists():
        info = State(path).info  # refuses a folder without an index; it is opened at the first call
        columns = {**columns, **info.columns}
    else:
        opener.begin()
    return Tools(site, opener.index, columns, with_files)


class IndexOpener:
    """Opens an index in a thread, because clients do not wait long for a server. The index of a
    folder is made or updated, and then synced periodically; meanwhile the text is searched by its
    words. After a failure the next call tries again.
    """

    def __init__(self, path: Path, model: str | None, prompts: GivenPrompts) -> None:
        self._asked = path, model, prompts
        self._change = threading.Condition()
        self._runs = False
        self._found: Index | Words | Exception | None = None

    def index(self) -> Index | Words:
        """The index, or the words of the text once they are counted; RevelaError if neither could
        be had.
        """
        self.begin()
        with self._change:
            self._change.wait_for(lambda: self._found is not None)
            assert self._found is not None
            if isinstance(self._found, Exception):
                raise self._found
            return self._found

    def begin(self) -> None:
        """Open the index unless that is done, or going on."""
        with self._change:
            if not self._runs:
                self._runs, self._found = True, None
                threading.Thread(target=self._run, name="index", daemon=True).start()

    def _run(self) -> None:
        from revela.searching.folder_index import open_any
        from revela.searching.server.lifecycle import sync_periodically
        from revela.searching.state import is_index
        from revela.searching.sync import ALL

        path, model, prompts = self._asked
        try:
            index = open_any(path, model, prompts=prompts, on_partial_index=self._note)
        except Exception as error:
            self._note(error)
            return
        self._note(index)
        if not is_index(path):
            with sync_periodically(index, refused=ALL):
                threading.Event().wait()

    def _note(self, found: Index | Words | Exception) -> None:
        with self._change:
            self._runs, self._found = not isinstance(found, Exception), found
            self._change.notify_all()


def _serve(server: Any, host: str, port: int, token: str | None) -> None:
    from revela.searching.server.lifecycle import listen, server_of, url_of
    from revela.searching.server.mcp import http_app
    from revela.searching.server.middleware import is_loopback

    listening = listen(host, port, "--http")
    address = listening.getsockname()[0]
    if token is None and not is_loopback(address):
        raise RevelaError(f"anyone who reaches {host} could read the index: give --token-env")
    limits = Limits()
    running = server_of(http_app(server, Access(token, token is None), limits), limits)
    _show_once()
    url = url_of(host, listening)
    print(f"serving {server.name} at {url}mcp; stop with Ctrl-C", flush=True)
    running.run(sockets=[listening])
