"""``revela serve``: an index over HTTP."""

from __future__ import annotations

import os
from contextlib import ExitStack, nullcontext
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from revela.cli.flags import PROMPTS, Flat, PromptFlags
from revela.errors import RevelaError
from revela.searching.server import Access, Limits, Site
from revela.types import Precision

if TYPE_CHECKING:
    from revela.searching.index import Index

LIMITS = Limits()


def serve(
    index_folder: Annotated[Path, Parameter(name="index")],
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    token_env: str | None = None,
    name: str | None = None,
    model: str | None = None,
    prompts: Annotated[PromptFlags, Flat] = PROMPTS,
    weight: float | None = None,
    precision: Precision = "auto",
    base_url: str = "",
    sync: float | None = None,
    limits: Annotated[Limits, Flat] = LIMITS,
) -> None:
    """Serve a folder, a file or an index over HTTP: a search page, search, embeddings, re-ranking.

    Parameters
    ----------
    index_folder:
        Folder made by revela index; or a folder of files, or a file.
    host:
        Address to listen on. On a loopback address without a token, only requests for localhost
        are answered.
    port:
        Port to listen on; 0 takes any free port.
    token_env:
        Environment variable with the token that clients must send (Authorization: Bearer TOKEN).
    name:
        Name of the model for clients; default: minilm-l6 if it is embedded, its hub id, or the name
        of its folder.
    model:
        As for search.
    weight:
        Share of the vectors in hybrid search, as for search.
    precision:
        Numeric precision. auto: that of the index.
    base_url:
        Address that the documents' ids are relative to: results link there.
    sync:
        Seconds between updates of the index from its sources; by default 30 for a folder or a file,
        and no updates for an index.
    """
    token = token_of(token_env)
    if min(astuple(limits)) <= 0:
        raise RevelaError("a limit of revela serve is not positive: give numbers above 0")
    if sync is not None and not sync > 0:
        raise RevelaError(f"--sync must be a positive number of seconds (got {sync:g})")
    if base_url and "://" not in base_url:
        raise RevelaError(
            f"--base-url must be an address such as https://example.org/docs (got {base_url})"
        )
    from revela.searching.server import lifecycle
    from revela.searching.server.middleware import is_loopback

    listening = lifecycle.listen(host, port)

    from revela.encoders.model_files import name_of, trained_dimensions
    from revela.searching.folder_index import open_any
    from revela.searching.server.app import SearchService, Service
    from revela.searching.state import is_index
    from revela.searching.sync import ALL, HALF
    from revela.searching.word_search import Words
    from revela.text.readers.common import display_path

    local = is_loopback(listening.getsockname()[0])
    access = Access(token, local_only=local and token is None)
    site = Site(display_path(Path(index_folder.resolve().name)), base_url)
    url = lifecycle.url_of(host, listening)
    if token is None and not local:
        print("anyone who reaches this address can use it: give --token-env", flush=True)

    def service(found: Words | Index) -> SearchService:
        if isinstance(found, Words):
            return SearchService(found, name or site.name, limits, access, site)
        folder = found.model_folder
        given = limits, access, site, trained_dimensions(folder)
        return Service(found, name or name_of(folder), found.encoder, *given)

    with ExitStack() as meanwhile:

        def answer_meanwhile(found: Words | Index) -> None:
            app = service(found).app()
            meanwhile.enter_context(lifecycle.in_background(app, limits, listening))
            print(f"serving {index_folder} at {url}. {found.notice}", flush=True)

        index = open_any(
            index_folder,
            model,
            progress=True,
            prompts=prompts.given,
            on_partial_index=answer_meanwhile,
            precision=precision,
            weight=weight,
        )
        whole = service(index)
        server = lifecycle.server_of(whole.app(), limits)
    refused = HALF
    if not is_index(index_folder):
        sync, refused = sync or lifecycle.SYNC_SECONDS, ALL
    with lifecycle.sync_periodically(index, sync, refused) if sync else nullcontext():
        print(f"serving {index_folder} at {url} as {whole.name}; stop with Ctrl-C", flush=True)
        server.run(sockets=[listening])


def token_of(variable: str | None) -> str | None:
    """The token that clients must send, from an environment variable; None without one."""
    if variable is None:
        return None
    if not (token := os.environ.get(variable, "").strip()):
        raise RevelaError(
            f"the environment variable {variable} is empty or not set: set it to the token"
        )
    return token
