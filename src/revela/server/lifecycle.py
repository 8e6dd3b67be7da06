"""The app on uvicorn: slow clients are disconnected; accepted requests finish before it stops."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from revela.errors import RevelaError
from revela.server import Limits
from revela.server.app import Service

CONNECTIONS = 512  # open at once; from there on 503. A process may often open 1024 files.


class TimeoutProtocol(H11Protocol):
    """uvicorn's HTTP protocol, with time-outs for slow clients.

    uvicorn's own time-out covers a connection that sends nothing between two requests. This
    protocol also disconnects, after ``timeout_keep_alive`` seconds, a client that does not finish
    its headers, and one that does not read its answer. (``JSONRequest`` times the body.)
    """

    timer: asyncio.TimerHandle | None = None
    unread = 0  # bytes of the answer when the timer was started

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._answering() and not self.transport.get_write_buffer_size():
            self._stop_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.unread = self._unread()
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        self._stop_timer()
        self.timer = self.loop.call_later(self.timeout_keep_alive, self._disconnect_unless_reading)

    def _stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def _disconnect_unless_reading(self) -> None:
        before, self.unread = self.unread, self._unread()
        if 0 < self.unread < before:
            self._start_timer()
        elif self.unread or not self._answering():
            self.transport.abort()

    def _unread(self) -> int:
        """Bytes that the client has not received yet: those here, and those that the kernel holds,
        up to 4 MB, which a slow line alone takes longer than the time-out to carry.
        """
        unread = self.transport.get_write_buffer_size()
        with contextlib.suppress(ImportError, AttributeError, OSError, ValueError):  # no such count
            import fcntl
            import termios

            descriptor = self.transport.get_extra_info("socket").fileno()
            unread += struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)))[0]
        return unread

    def _answering(self) -> bool:
        """Whether a request runs: the next pipelined one may, while the last answer is unread."""
        return self.cycle is not None and not self.cycle.response_complete


def server_of(service: Service, limits: Limits, **settings: Any) -> uvicorn.Server:
    """A uvicorn server for this service, not yet started.

    Args:
        service: the application.
        limits: time-outs for clients and for shutdown.
        settings: further settings of uvicorn.
    """
    config = uvicorn.Config(
        service.app(),
        http=TimeoutProtocol,
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=limits.client_seconds,  # type: ignore[arg-type]  # passed to call_later
        timeout_graceful_shutdown=limits.shutdown_seconds,
        limit_concurrency=CONNECTIONS,
        **settings,
    )
    return uvicorn.Server(config)


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to this address; port 0 means any free port.

    Raises:
        RevelaError: the port is out of range, or the address is taken or unknown.
    """
    if not 0 <= port < 2**16:
        raise RevelaError(f"--port {port} is no port: give one from 0 (any free port) to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except (OSError, UnicodeError) as error:
        message = f"cannot listen on {host}:{port} ({error}): choose another --host or --port"
        raise RevelaError(message) from error
    return listening
