"""HTTP server of one index: embeddings in OpenAI's format, search, and a web page.

Only this package imports FastAPI and uvicorn, and not at its own import.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote


@dataclass(frozen=True)
class Access:
    """Access control: requests must send the token, if there is one. With ``local_only``, their
    Host must be a loopback name.
    """

    token: str | None = None
    local_only: bool = False


@dataclass(frozen=True)
class Site:
    """The name of the documents, and the base of their URLs; "": they have none."""

    name: str = ""
    base_url: str = ""

    def url(self, document: str) -> str | None:
        """The address of a document by its id."""
        return f"{self.base_url.rstrip('/')}/{quote(document)}" if self.base_url else None


@dataclass(frozen=True)
class Limits:
    """Limits of ``revela serve``. A request over a limit is refused."""

    max_body_bytes: int = 8 * 2**20
    "Maximum size of a request body, in bytes (413 above it)."
    max_texts: int = 2048
    "Maximum number of texts per embeddings request (400)."
    max_characters: int = 200_000
    "Maximum length of a text, in characters (400), even with truncate."
    max_tokens: int = 300_000
    """Maximum number of tokens per request (400), and of tokens that wait for the model, separately
    for queries and passages (429)."""
    batch_tokens: int = 1024
    """Tokens per model batch, from as many requests as fit. A search waits for at most one batch of
    passages."""
    max_searches: int = 128
    "Maximum number of searches running or waiting (429)."
    shutdown_seconds: int = 60
    "Time for accepted requests to finish after the first signal to stop."
