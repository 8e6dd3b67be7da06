"""An index as the tools ``search`` and ``fetch`` of the Model Context Protocol, for agents.

Names and forms are those of OpenAI's connectors, with scores, passages and more on top.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path, PurePath
from typing import Annotated, Any
from urllib.parse import quote

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError, UnexpectedToolError
from mcp.types import ToolAnnotations
from pydantic import BaseModel, Field, ValidationError
from starlette.types import ASGIApp

from revela import __version__
from revela.errors import QueryError, RevelaError
from revela.index.filters import EXAMPLE, where_sql
from revela.index.index import Index
from revela.index.search import check_query
from revela.server import Access, Limits
from revela.types import ANSWERS, Hit

log = logging.getLogger(__name__)
FETCHED_CHARACTERS = 40_000  # of text per call: some ten thousand tokens
READS = ToolAnnotations(read_only_hint=True, open_world_hint=False)


class SearchResult(BaseModel):
    """A document with its best passage."""

    id: str
    title: str
    url: str
    path: str | None = Field(description="The document's file, if it is known.")
    score: float
    confidence: float | None = Field(
        description="How often a first result that stands out as far is right, 0 to 1, if known."
    )
    text: str = Field(description="The best passage.")
    chunk: int = Field(description="The number of that passage in the document, from 0.")
    metadata: dict[str, Any]


class SearchResults(BaseModel):
    """Results, best first."""

    answer: str | None = Field(
        description="Whether the first result answers the query: sure, perhaps, or probably no "
        "answer in these documents; null if that is not known."
    )
    results: list[SearchResult]


class FetchedDocument(BaseModel):
    """A document, or a part of it."""

    id: str
    title: str
    text: str
    url: str
    path: str | None
    metadata: dict[str, Any]
    next_chunk: int | None = Field(description="Where to go on, if the text does.")


@dataclass(frozen=True)
class Documents:
    """What agents search.

    Args:
        name: of the documents, for agents.
        index: gives the index; called by the tools, as it may take long.
        columns: for filters, and their Arrow types.
        folder: root of the files, if ids are paths.
        base_url: base of the documents' addresses; "": those of their files.
    """

    name: str
    index: Callable[[], Index]
    columns: Mapping[str, str]
    folder: Path | None = None
    base_url: str = ""

    def place(self, name: str) -> tuple[str, str | None]:
        """url and path of a document by its id; clients cite only what has a url."""
        path = self._file(name)
        if self.base_url:
            url = f"{self.base_url.rstrip('/')}/{quote(name)}"
        else:
            url = path.as_uri() if path else f"revela:{quote(name)}"
        return url, str(path) if path else None

    def _file(self, name: str) -> Path | None:
        """The file below the folder that an id names; one from a file of rows may be any text."""
        relative = PurePath(name)
        if self.folder is None or relative.is_absolute() or ".." in relative.parts:
            return None
        with suppress(OSError):  # too long for a name
            if (file := self.folder / relative).is_file():
                return file
        return None

    def result(self, hit: Hit) -> SearchResult:
        """A hit for agents."""
        url, path = self.place(hit.id)
        return SearchResult(
            id=hit.id,
            title=hit.title or hit.id,
            url=url,
            path=path,
            score=hit.score,
            confidence=hit.confidence,
            text=hit.text,
            chunk=hit.chunk,
            metadata=dict(hit.metadata),
        )


class _Server(MCPServer[Any]):
    """A server whose errors are one sentence."""

    async def call_tool(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super().call_tool(*args, **kwargs)
        except UnexpectedToolError:
            raise
        except ToolError as error:
            raise ToolError(_sentence(error.__cause__ or error)) from error


def _sentence(error: BaseException) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}"[:300]


@contextmanager
def _tool_errors() -> Iterator[None]:
    """Show errors of queries to the client, and log others, which may name paths."""
    try:
        yield
    except QueryError as error:
        raise ToolError(str(error)) from error
    except RevelaError as error:
        log.error(str(error))
        raise ToolError("the index cannot be read: the server's log says why") from error


class Tools:
    """The tools' functions."""

    def __init__(self, documents: Documents) -> None:
        self.documents = documents
        self._lock = threading.Lock()  # one search at a time; agents are few

    def search(
        self,
        query: Annotated[str, Field(description="A question, or words.")],
        k: Annotated[int, Field(ge=1, le=100, description="Maximum number of documents.")] = 10,
        filter: Annotated[
            dict[str, Any] | None, Field(description=f"By columns, such as {EXAMPLE}.")
        ] = None,
        min_score: Annotated[
            float | None, Field(description="Leave out documents of a lower score.")
        ] = None,
    ) -> SearchResults:
        with _tool_errors():
            check_query(query)
            where_sql(filter or {}, self.documents.columns)
            with self._lock:
                hits = self.documents.index().search(query, k, where=filter, min_score=min_score)
        return SearchResults(
            answer=ANSWERS[hits.answer] if hits.answer else None,
            results=[self.documents.result(hit) for hit in hits],
        )

    def fetch(
        self,
        id: Annotated[str, Field(description="The id of a search result.")],
        chunk: Annotated[int, Field(ge=0, description="The first passage to read.")] = 0,
    ) -> FetchedDocument:
        with _tool_errors():
            chunks = self.documents.index().chunks(id)
        if not (rest := chunks[chunk:]):
            has = f"has {len(chunks)} passages, from 0" if chunks else "is not in the index"
            raise ToolError(f"the document {id[:200]} {has}: take ids and chunks of search")
        url, path = self.documents.place(id)
        ends = list(accumulate(len(passage.text) for passage in rest))
        read = max(1, bisect_right(ends, FETCHED_CHARACTERS))
        text = "".join(passage.text for passage in rest[:read])
        return FetchedDocument(
            id=id,
            title=chunks[0].title or id,
            text=text,
            url=url,
            path=path,
            metadata=dict(chunks[0].metadata),
            next_chunk=chunk + read if read < len(rest) else None,
        )


def mcp_server(documents: Documents) -> MCPServer[Any]:
    """The server of an index, for any transport."""
    name, tools = documents.name, Tools(documents)
    instructions = f"search finds documents of {name}; fetch reads one by its id"
    server = _Server(name, version=__version__, instructions=instructions, log_level="WARNING")
    columns = ", ".join(f"{column} ({kind})" for column, kind in documents.columns.items())
    search = (
        f"Search {name} by meaning and by words. Gives documents, best first, each with its best "
        f"passage. A filter may name the columns {columns}."
    )
    server.add_tool(tools.search, description=search, annotations=READS)
    fetch = f"Read a document of {name}; a long one in parts, from the passage chunk on."
    server.add_tool(tools.fetch, description=fetch, annotations=READS)
    return server


def http_app(server: MCPServer[Any], access: Access, limits: Limits) -> ASGIApp:
    """The server as an ASGI application, by streamable HTTP at /mcp."""
    from revela.server.middleware import Guard

    app = server.streamable_http_app(
        stateless_http=True,
        json_response=True,
        max_request_body_size=limits.max_body_bytes,
        # Of a loopback host the SDK checks Host and Origin; else a token keeps web pages away.
        host="127.0.0.1" if access.local_only else "",
    )
    return Guard(app, access)
