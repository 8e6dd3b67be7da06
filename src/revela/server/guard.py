"""Who may ask: a bearer token where there is one, and only this machine's names where there is
none.
"""

from __future__ import annotations

import hmac
import ipaddress

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from revela.server.problems import Refused

OPEN = ("/", "/healthz", "/openapi.json")


class Guard:
    """Middleware: refuses strangers before their body is read, and marks answers as what they are.

    Args:
        app: what is guarded.
        token: if given, everything but the page, health and the OpenAPI document needs
            ``Authorization: Bearer TOKEN``.
        local_only: requests must name this machine by a loopback name, so that no web page can
            reach an open server by pointing a name of its own at 127.0.0.1 (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, token: str | None, local_only: bool) -> None:
        self.app, self.token, self.local_only = app, token, local_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def mark(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-content-type-options"] = "nosniff"
            await send(message)

        refused = self._refusal(Headers(scope=scope), scope["path"])
        app = refused.response() if refused else self.app
        await app(scope, receive, mark)

    def _refusal(self, headers: Headers, path: str) -> Refused | None:
        if self.local_only and not is_loopback(_host_of(headers.get("host", ""))):
            return Refused(
                421,
                "this server answers to localhost only: start it with --token-env or --token-file to reach it by other names",
            )
        if self.token is None or path in OPEN:
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(
            given.strip().encode("latin-1"), self.token.encode()
        )  # headers are bytes to clients
        if scheme.lower() == "bearer" and right:
            return None
        sentence = "the token is missing or wrong: send it as Authorization: Bearer TOKEN"
        return Refused(
            401, sentence, code="invalid_api_key", headers={"www-authenticate": "Bearer"}
        )


def is_loopback(host: str) -> bool:
    """Whether this name or address is this machine's own and no other's."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host_of(header: str) -> str:
    """The host of a Host header, without its port and brackets."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]
