"""Run the app on uvicorn, so that accepted requests finish before it stops, and meanwhile sync the
index with its sources.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

import uvicorn
from starlette.types import ASGIApp

from revela.errors import RevelaError, first_line
from revela.searching.index import Index
from revela.searching.server import Limits
from revela.searching.sync import HALF, recorded_sources, rescan, sync

log = logging.getLogger(__name__)
SYNC_SECONDS = 30.0  # between updates of the index of a folder that is served
CONNECTIONS = 512  # 503 above it; processes are often limited to 1024 open files


def server_of(app: ASGIApp, limits: Limits) -> uvicorn.Server:
    """A uvicorn server for this application."""
    config = uvicorn.Config(
        app,
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=limits.shutdown_seconds,
        limit_concurrency=CONNECTIONS,
    )
    return uvicorn.Server(config)


@contextmanager
def in_background(app: ASGIApp, limits: Limits, listening: socket.socket) -> Iterator[None]:
    """Serve an application on a socket in a thread while open. The socket stays open."""
    server = server_of(app, limits)
    sockets = [listening.dup()]
    thread = Thread(target=server.run, args=(sockets,), name="first answers", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


def url_of(host: str, listening: socket.socket) -> str:
    """The address of a socket, with the host as given."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listening.getsockname()[1]}/"


def listen(host: str, port: int, flag: str = "--port") -> socket.socket:
    """A socket that listens on this address, so that clients wait from here on, and nobody else can
    take it; port 0 is any free port. ``flag`` is named in errors.
    """
    if not 0 <= port < 2**16:
        raise RevelaError(f"{flag} must be from 0 (any free port) to 65535 (got {port})")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        # Of a port whose last connections are closing; on Windows it would share one in use.
        reuse = getattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_REUSEADDR)
        listening.setsockopt(socket.SOL_SOCKET, reuse, 1)
        listening.bind(address)
        listening.listen()
    except (OSError, UnicodeError) as error:
        message = f"cannot listen on {host}:{port} ({error}): choose another --host or {flag}"
        raise RevelaError(message) from error
    return listening


@contextmanager
def sync_periodically(
    index: Index, seconds: float = SYNC_SECONDS, refused: float = HALF
) -> Iterator[None]:
    """Sync an index with its sources every ``seconds`` seconds, in a thread, while open.

    Errors are logged. ``refused`` is as for ``sync``.

    Raises:
        RevelaError: the index does not know its sources.
    """
    recorded_sources(index.state)
    stop = Event()

    def check(_: float) -> None:
        if stop.is_set():
            raise RevelaError(f"{index.folder} is not fully synced: sync it again to continue")

    def run() -> None:
        while not stop.wait(seconds):
            try:
                with index.changes() as changes:
                    changed = sync(changes, rescan(changes), refused, tell=check)
                if changed.any:
                    log.info(f"{changed.describe()}; {index.folder} is up to date")
            except Exception as error:  # serving goes on
                log.warning(f"cannot sync {index.folder}: {first_line(error)}")

    thread = Thread(target=run, name="sync", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
