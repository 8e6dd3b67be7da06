"""Access control, and a limit of the body."""

from __future__ import annotations

import hmac
import ipaddress

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from revela.searching.server import Access
from revela.searching.server.errors import APIError

PUBLIC_PATHS = ("/", "/healthz", "/openapi.json")


class Guard:
    """Refuse clients without access before their body is read; add ``nosniff`` to every answer.

    Args:
        app: the guarded application.
        access: with a token, every path but the page, ``/healthz`` and ``/openapi.json`` requires
            ``Authorization: Bearer TOKEN``. With ``local_only`` the Host header must be a loopback
            name, which keeps web pages from reaching the server by DNS rebinding.
        checks_origin: with ``local_only``, refuse web pages of other hosts.
    """

    def __init__(self, app: ASGIApp, access: Access, checks_origin: bool = False) -> None:
        self.app, self.token, self.local_only = app, access.token, access.local_only
        self.checks_origin = checks_origin and access.local_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def send_nosniff(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-content-type-options"] = "nosniff"
            await send(message)

        error = self._check(Headers(scope=scope), scope["path"])
        app = error.response() if error else self.app
        await app(scope, receive, send_nosniff)

    def _check(self, headers: Headers, path: str) -> APIError | None:
        if self.local_only and not is_loopback(_host_of(headers.get("host", ""))):
            message = (
                "this server answers requests for localhost only: start it with --token-env to "
                "reach it by other names"
            )
            return APIError(421, message)
        origin = headers.get("origin") if self.checks_origin else None
        if origin and not is_loopback(_host_of(origin.partition("://")[2])):
            return APIError(403, "this server answers web pages of localhost only")
        if self.token is None or path in PUBLIC_PATHS:
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # Starlette decodes headers as latin-1.
        equal = hmac.compare_digest(given.strip().encode("latin-1"), self.token.encode())
        if scheme.lower() == "bearer" and equal:
            return None
        message = "the token is missing or wrong: send it as Authorization: Bearer TOKEN"
        challenge = {"www-authenticate": "Bearer"}
        return APIError(401, message, code="invalid_api_key", headers=challenge)


def is_loopback(host: str) -> bool:
    """Whether a host name or address is ``localhost`` or a loopback address."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host_of(header: str) -> str:
    """The host of a Host header, without port and brackets."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]


class BodyLimit:
    """Refuse a body that is longer than ``limit`` bytes (413)."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app, self.limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = 0

        async def receive_within() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.limit:
                # Many clients only read the answer after they have sent all.
                while message.get("more_body") and size <= 2 * self.limit:
                    message = await receive()
                    size += len(message.get("body", b""))
                text = f"the body is longer than {self.limit:,} bytes: send less at a time"
                raise APIError(413, text, headers={"connection": "close"})
            return message

        await self.app(scope, receive_within, send)
