"""Every refusal in OpenAI's error shape, one sentence each: no path of this machine and no
traceback leaves it.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
SENTENCES = {
    404: "there is nothing at this address: see /openapi.json",
    405: "this address does not take that method: see /openapi.json",
}
CLIENT_LEFT = 499


class Refused(Exception):
    """A request that is not answered. The message is one sentence: what is wrong, and what to send
    instead.

    Args:
        status: 4xx.
        message: may quote names that the client may know, and nothing else.
        param: the field that is wrong.
        code: for programs.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = (
            status,
            message,
            param,
            code,
            headers,
        )

    def response(self) -> JSONResponse:
        """``{"error": {"message", "type", "param", "code"}}``."""
        kind = KINDS.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return JSONResponse({"error": error}, self.status, dict(self.headers or {}))


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return error.response()


async def _http(_: Request, error: Exception) -> Response:
    """What starlette itself refuses: unknown routes and methods."""
    assert isinstance(error, HTTPException)
    return Refused(
        error.status_code, SENTENCES.get(error.status_code, error.detail), headers=error.headers
    ).response()


async def _failed(_: Request, __: Exception) -> Response:
    """Our own fault; starlette raises it once more, so that the log has it."""
    return Refused(
        500, "something went wrong here, the server's log says what: try again"
    ).response()


async def _left(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT)  # nobody reads it; the metrics count it


HANDLERS = {Refused: _refused, HTTPException: _http, ClientDisconnect: _left, Exception: _failed}
