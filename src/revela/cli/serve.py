"""The verb that answers over HTTP: serve."""

from __future__ import annotations

import os
from dataclasses import astuple
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from revela.cli.main import Flat, app
from revela.errors import RevelaError
from revela.settings import Limits, Precision

LIMITS = Limits()


@app.command
def serve(
    index_folder: Annotated[Path, Parameter(name="index")],
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    token_env: str | None = None,
    token_file: Path | None = None,
    name: str | None = None,
    model: str | None = None,
    lm: str | None = None,
    precision: Precision = "auto",
    limits: Annotated[Limits, Flat] = LIMITS,
) -> None:
    """Serve an index over HTTP: embeddings in OpenAI's shape, search, and a page to try it on.

    Parameters
    ----------
    index_folder:
        Made by revela index.
    host:
        Address to listen on. Without a token, a server on this machine's own address answers to
        localhost only.
    port:
        Port to listen on; 0: any that is free.
    token_env:
        Environment variable that holds the token which clients must send (Authorization: Bearer
        TOKEN).
    token_file:
        File that holds it.
    name:
        What clients call the model; by default its folder's name, or its hub id.
    model:
        The retriever, if it has moved since the index was made.
    lm:
        Language model for searches that ask for "rerank": "heads": a hub id, a local folder or
        embedded:smollm2-135m. Without it they are refused; each takes the machine for seconds.
    precision:
        Arithmetic; auto is bf16 where the hardware has it.
    """
    token = token_of(token_env, token_file)
    if min(astuple(limits)) <= 0:
        raise RevelaError("a limit of revela serve is 0 or less: give numbers above 0")
    try:
        from revela.server.app import Service
        from revela.server.guard import is_loopback
        from revela.server.lifecycle import listen, server_of
    except ImportError as error:
        raise RevelaError(f"serving needs {error.name}: run pip install 'revela[serve]'") from error
    listening = listen(host, port)

    from revela.index.store import Index
    from revela.retriever.encode import RetrieverEncoder
    from revela.retriever.tokens import TokenCounter
    from revela.weights import trained_dimensions

    index = Index.open(index_folder, model, precision=precision)
    folder, encoder = index.model_folder, index.encoder
    assert isinstance(encoder, RetrieverEncoder)
    reranker = None
    if lm is not None:
        from revela.index.listwise import load_query_heads

        reranker = load_query_heads(lm, index.sample)
    local = is_loopback(host)
    service = Service(
        index,
        encoder,
        TokenCounter(encoder.model),
        name or name_of(folder),
        limits,
        dimensions=trained_dimensions(folder),
        token=token,
        local_only=local and token is None,
        reranker=reranker,
    )
    server = server_of(service, limits)
    # from here on clients are kept waiting for some moments, and no longer refused
    listening.listen()
    shown = f"[{host}]" if ":" in host else host
    print(
        f"serving {index_folder} at http://{shown}:{listening.getsockname()[1]}/ as {service.name}; stop with Ctrl-C",
        flush=True,
    )
    if token is None and not local:
        print(
            "anybody who reaches this address may ask: give --token-env or --token-file to prevent that",
            flush=True,
        )
    server.run(sockets=[listening])


def token_of(variable: str | None, file: Path | None) -> str | None:
    """The token that clients must send, from wherever it is kept; None if none is asked for.

    Raises:
        RevelaError: it is not there, or is empty.
    """
    if variable is not None and file is not None:
        raise RevelaError("--token-env and --token-file are both given: give one")
    if variable is not None:
        if not os.environ.get(variable, "").strip():
            raise RevelaError(
                f"the environment variable {variable} is empty or not set: put the token into it"
            )
        return os.environ[variable].strip()
    if file is not None:
        try:
            token = file.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise RevelaError(
                f"{file} cannot be read as a token ({type(error).__name__}): give a text file as --token-file"
            ) from error
        if not token:
            raise RevelaError(f"{file} is empty: put the token into it")
        return token
    return None


def name_of(folder: Path) -> str:
    """What a model is called: its hub id, or the name of its folder."""
    for part in reversed(folder.resolve().parts):
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/", 1)
    return folder.resolve().name
