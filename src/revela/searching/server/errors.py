"""Errors in OpenAI's format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from revela.errors import QueryError

ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
FASTAPI_ERRORS = {
    404: "there is nothing at this address: see /openapi.json",
    405: "this address does not take that method: see /openapi.json",
}


class APIError(HTTPException):
    """An error answer in OpenAI's format.

    Args:
        status: 4xx or 503.
        message: what is wrong, and what to send instead, in one sentence without paths of this
            machine.
        param: the field that is wrong.
        code: an error code for programs.
        headers: extra headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param, self.code = param, code

    def response(self) -> JSONResponse:
        """``{"error": {"message", "type", "param", "code"}}``."""
        kind = ERROR_TYPES.get(self.status_code, "invalid_request_error")
        error = {"message": self.detail, "type": kind, "param": self.param, "code": self.code}
        for name, text in error.items():  # a name in a request may hold half of a surrogate pair
            error[name] = text and text.encode("utf-8", "backslashreplace").decode()
        return JSONResponse({"error": error}, self.status_code, self.headers)


async def _http_error(_: Request, error: HTTPException) -> JSONResponse:
    """Answer to our own errors, and to FastAPI's for unknown paths and methods."""
    if not isinstance(error, APIError):
        message = FASTAPI_ERRORS.get(error.status_code, error.detail)
        error = APIError(error.status_code, message, headers=error.headers)
    return error.response()


async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
    """Answer with the first error of a body that does not fit its model."""
    first = error.errors()[0]
    in_address = first["loc"][0] == "query"
    if not in_address and "json" not in request.headers.get("content-type", ""):
        message = "the body must be JSON: send it with content-type application/json"
        return APIError(400, message).response()
    in_json = first["type"] == "json_invalid"  # its place is an offset
    place = [] if in_json else [str(part) for part in first["loc"][1:]]
    message = f"{'.'.join(place) or 'the body'}: {first['msg'].lower()}"
    return APIError(400, message[:300], place[0][:100] if place else None).response()


async def _refused(_: Request, error: QueryError) -> JSONResponse:
    """Answer to a wrong search. Any other error of an index is the server's."""
    return APIError(400, str(error), error.param or None).response()


async def _failed(_: Request, __: Exception) -> JSONResponse:
    """Answer to an error of the server. Starlette raises it again, so that uvicorn logs it."""
    message = "internal server error: see the server's log, or try again"
    return APIError(500, message).response()


ERROR_HANDLERS: dict[int | type[Exception], Callable[[Request, Any], Any]] = {
    HTTPException: _http_error,
    RequestValidationError: _invalid,
    QueryError: _refused,
    Exception: _failed,
}


def no_such_model(names: Sequence[str]) -> APIError:
    """The 404 for an unknown model."""
    message = f"this server has no such model: ask for one of {', '.join(names)}"
    return APIError(404, message, "model", "model_not_found")


def queue_full(what: str, seconds: int) -> APIError:
    """The 429 for a full queue."""
    message = f"too many {what} are waiting: try again in {seconds} s"
    return APIError(429, message, code="queue_full", headers={"retry-after": str(seconds)})


def check_count(count: int, of: str, most: int, param: str) -> None:
    """Raise APIError (400) for too many texts or tokens."""
    if count > most:
        message = f"{count:,} {of} in a request: send at most {most:,} at a time"
        raise APIError(400, message, param)
