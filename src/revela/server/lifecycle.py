"""Running the app on uvicorn: clients that dawdle are left, and what was taken is finished before
the server stops.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from revela.errors import RevelaError
from revela.server.app import Service
from revela.settings import Limits


class Impatient(H11Protocol):
    """uvicorn's protocol, which only waits for a client between two requests as long as it sends
    nothing at all.

    This one also leaves a client whose headers do not end, and one that has stopped to read its
    answer, after ``timeout_keep_alive`` seconds. (A body that does not end is requests.py's
    matter.)
    """

    patience: asyncio.TimerHandle | None = None
    unread = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # else the next request of a pipeline has taken its place
            self.unread = self.transport.get_write_buffer_size()
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._stop_waiting()
        self.patience = self.loop.call_later(self.timeout_keep_alive, self._leave_unless_it_reads)

    def _stop_waiting(self) -> None:
        if self.patience is not None:
            self.patience.cancel()
            self.patience = None

    def _leave_unless_it_reads(self) -> None:
        before, self.unread = self.unread, self.transport.get_write_buffer_size()
        if 0 < self.unread < before:
            self._wait()
        else:
            self.transport.abort()


def server_of(service: Service, limits: Limits, **settings: Any) -> uvicorn.Server:
    """A uvicorn server of this service, not yet started.

    Args:
        service: what answers.
        limits: how long it waits for clients, and for what is under way when it stops.
        settings: more of uvicorn's.
    """
    config = uvicorn.Config(
        service.app(),
        http=Impatient,
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=limits.client_seconds,  # type: ignore[arg-type]  # handed to call_later, which takes fractions
        timeout_graceful_shutdown=limits.shutdown_seconds,
        **settings,
    )
    return uvicorn.Server(config)


def listen(host: str, port: int) -> socket.socket:
    """A socket of this address; port 0 is any free one.

    Raises:
        RevelaError: it cannot be had.
    """
    if not 0 <= port < 2**16:
        raise RevelaError(
            f"--port {port} is no port: give one between 0 (any that is free) and 65535"
        )
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except (OSError, UnicodeError) as error:
        raise RevelaError(
            f"{host}:{port} cannot be listened on ({error}): choose another --host or --port"
        ) from error
    return listening
