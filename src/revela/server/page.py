"""The page: one file that asks for nothing from elsewhere, which its Content-Security-Policy also
forbids.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response


def page_response() -> Callable[[Request], Awaitable[Response]]:
    """The endpoint that answers with page.html; only its own style and script may run."""
    html = files("revela.server").joinpath("page.html").read_text(encoding="utf-8")
    policy = [
        "default-src 'none'",
        f"style-src {_hashes(html, 'style')}",
        f"script-src {_hashes(html, 'script')}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    headers = {
        "content-security-policy": "; ".join(policy),
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }

    async def page(_: Request) -> Response:
        return Response(html, media_type="text/html", headers=headers)

    return page


def _hashes(html: str, tag: str) -> str:
    blocks = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.S)
    return " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()}'"
        for block in blocks
    )
