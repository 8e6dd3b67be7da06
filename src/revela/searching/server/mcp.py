"""An index as the tools ``search`` and ``fetch`` of the Model Context Protocol, for agents.

Names and forms are those of OpenAI's connectors, with scores, passages and more on top.
"""

from __future__ import annotations

import io
import logging
import re
import sys
import threading
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Any
from unicodedata import east_asian_width
from urllib.parse import quote

import anyio
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError, UnexpectedToolError
from mcp.server.stdio import stdio_server
from mcp.types import CallToolResult, TextContent, ToolAnnotations
from pydantic import BaseModel, Field, ValidationError
from starlette.types import ASGIApp

from revela import __version__
from revela.errors import QueryError, RevelaError
from revela.ranking.steps import check_query
from revela.searching.filters import where_sql
from revela.searching.index import Index
from revela.searching.index_search import distinct
from revela.searching.server import Access, Limits, Site
from revela.searching.server.token_budget import as_json, count_tokens, fitting, shared_out
from revela.searching.snippets import SPARE, Snippet, heading_of
from revela.searching.word_search import Words
from revela.terminal import counted
from revela.text.readers.common import display_path
from revela.types import ANSWERS, Hit

log = logging.getLogger(__name__)
MAX_TOKENS, LEAST_TOKENS = 4000, 200  # of an answer, by default and at least
NOTE_TOKENS = 60  # kept free for the note
QUOTE = 120  # characters of a snippet; a passage of more than twice as many has one
TEXT_TOKENS = 40  # a result is left out where less of its text would fit
METADATA_CHARACTERS = 200  # of a value
COPIES = 5  # named
READS = ToolAnnotations(read_only_hint=True, open_world_hint=False)
FILTER = '{"id": {"prefix": "notes/"}, "date": {"gte": "2024-05"}, "type": {"in": ["pdf", "md"]}}'
NOT_FOUND = (
    "If no passage answers the question, say that it was not found in these documents, rather than "
    "answer from other knowledge: search always returns the nearest passages, even when none of "
    "them is relevant."
)


# An escaped backslash, a pair, or half a pair.
_HALF = re.compile(r"(\\\\|\\u[Dd][89ABab]..\\u[Dd][C-Fc-f]..)|\\u[Dd][89A-Fa-f][0-9A-Fa-f]{2}")

MaxTokens = Annotated[
    int, Field(ge=LEAST_TOKENS, le=100_000, description="Maximum size of the answer.")
]


class AnswerModel(BaseModel, use_attribute_docstrings=True):
    """What a tool returns."""


class SearchResult(AnswerModel):
    """A document with its best passage."""

    id: str
    title: str
    "With the headings above the passage, if they are known."
    url: str
    path: str | None = None
    "The document's file, if it is known."
    page: int | None = None
    "The page of a PDF that the snippet is on."
    line: int | None = None
    "The line of a text file that the snippet is on."
    date: str | None = None
    "Of the document, in ISO 8601."
    score: float
    confidence: float | None = None
    "Estimated probability that the result is right, by how far its score stands out; 0 to 1."
    snippet: str | None = None
    "What to quote: the part with the rarest words of the query."
    text: str
    "The best passage."
    cut: bool | None = None
    "Whether text is only a part of the passage, like snippet; fetch returns all of it."
    chunk: int
    "The number of that passage in the document, from 0."
    metadata: dict[str, Any] | None = None
    copies: list[str] | None = None
    "Ids of other documents with the same passage."


class SearchResults(AnswerModel):
    """Results, best first."""

    answer: str | None = None
    """Whether the first result answers the query: sure, perhaps, probably no answer (in these
    documents, or as they are about other things), or confidence unknown."""
    results: list[SearchResult]
    note: str | None = None
    "What was cut, and how to get it."


class FetchedDocument(AnswerModel):
    """A document, or a part of it."""

    id: str
    title: str
    text: str
    url: str
    path: str | None = None
    metadata: dict[str, Any] | None = None
    next_chunk: int | None = None
    "The chunk to fetch next, if there is more text."
    next_offset: int | None = None
    "The offset to fetch it with."
    note: str | None = None
    "How much was returned, and how to fetch the rest."


@dataclass(frozen=True)
class Tools:
    """The tools of agents, and the documents that these are for.

    Args:
        site: the name of the documents, for agents, and the base of their addresses; "": those of
            their files.
        index: gives the index, or the words of one that is being made; called by the tools, as it
            may take long.
        columns: for filters, and their Arrow types.
        with_files: name the documents' files: not to other machines.
    """

    site: Site
    index: Callable[[], Index | Words]
    columns: Mapping[str, str]
    with_files: bool = True
    _lock: threading.Lock = field(default_factory=threading.Lock)  # one search at a time

    def place(self, index: Index | Words, name: str) -> tuple[str, str | None]:
        """url and path of a document by its id; clients cite only what has a url."""
        path = index.file(name) if self.with_files else None
        url = self.site.url(name) or (path.as_uri() if path else f"revela:{quote(name)}")
        return url, display_path(path) if path else None

    def result(
        self, index: Index | Words, hit: Hit, shown: Snippet, copies: Sequence[str]
    ) -> SearchResult:
        """A hit for agents, with the ids of documents whose passage is equal."""
        url, path = self.place(index, hit.id)
        return SearchResult(
            id=hit.id,
            title=heading_of(hit),
            url=url,
            path=path,
            page=shown.page,
            line=shown.line,
            date=hit.date,
            score=round(hit.score, 3),
            confidence=None if hit.confidence is None else round(hit.confidence, 2),
            snippet=shown.text if len(hit.text) > 2 * QUOTE else None,
            text=hit.text,
            chunk=hit.chunk,
            metadata=_metadata(hit),
            copies=list(copies[:COPIES]) or None,
        )

    def search(
        self,
        query: Annotated[str, Field(description="A question, or keywords.")],
        k: Annotated[int, Field(ge=1, le=100, description="Maximum number of documents.")] = 10,
        filter: Annotated[
            dict[str, Any] | None, Field(description=f"Filter by columns, such as {FILTER}.")
        ] = None,
        min_score: Annotated[
            float | None, Field(description="Leave out documents with a lower score.")
        ] = None,
        max_tokens: MaxTokens = MAX_TOKENS,
    ) -> Annotated[CallToolResult, SearchResults]:
        with _tool_errors():
            check_query(query)
            where_sql(filter or {}, self.columns)
            with self._lock:
                index = self.index()
                hits = index.search(query, SPARE * k, where=filter, min_score=min_score)
        found = distinct(hits, k)
        best = [hits[number] for number in found]
        snippets = index.snippets(query, best, QUOTE)

        def part_of(number: int, characters: int) -> str:
            return index.snippets(query, [best[number]], characters)[0].text

        results = [
            self.result(index, hit, shown, [hits[copy].id for copy in copies])
            for hit, shown, copies in zip(best, snippets, found.values(), strict=True)
        ]
        answer = ANSWERS[hits.answer] if hits and not index.notice else None
        notice = f"{index.notice} {hits.notice}".strip()
        return _answer(within(results, max_tokens, part_of, notice, answer))

    def fetch(
        self,
        id: Annotated[str, Field(description="The id of a search result.")],
        chunk: Annotated[int, Field(ge=0, description="The first passage to read.")] = 0,
        offset: Annotated[int, Field(ge=0, description="The first character of it to read.")] = 0,
        max_tokens: MaxTokens = MAX_TOKENS,
    ) -> Annotated[CallToolResult, FetchedDocument]:
        with _tool_errors():
            index = self.index()
            chunks = index.chunks(id)
        if not chunks[chunk:]:
            passages = counted(len(chunks), "passage")
            has = f"has {passages}, from 0" if chunks else "is not in the index"
            raise ToolError(f"the document {id[:200]} {has}: use ids and chunks from search")
        texts = [passage.text for passage in chunks]
        if offset > (length := len(texts[chunk])):
            raise ToolError(
                f"passage {chunk} of {id[:200]} has {length:,} characters: lower offset"
            )
        url, path = self.place(index, id)
        document = FetchedDocument(
            id=id,
            title=chunks[0].title or id,
            text="",
            url=url,
            path=path,
            metadata=_metadata(chunks[0]),
        )
        left = max(TEXT_TOKENS, max_tokens - NOTE_TOKENS - _tokens_of(document))
        texts[chunk] = texts[chunk][offset:]
        return _answer(document.model_copy(update=_read(texts, chunk, offset, left)))


def _metadata(hit: Hit) -> dict[str, Any] | None:
    """A hit's metadata, its texts cut; None if it has none."""
    short = {
        name: value[:METADATA_CHARACTERS] if isinstance(value, str) else value
        for name, value in hit.metadata.items()
    }
    return short or None


async def _stdin_lines() -> AsyncIterator[str]:
    """Lines of JSON with U+FFFD for each half of a surrogate pair: the SDK cannot parse a line with
    one, and would not answer it.
    """
    async for line in anyio.wrap_file(io.TextIOWrapper(sys.stdin.buffer, "utf-8", "replace")):
        yield _HALF.sub(lambda found: found[1] or "\\ufffd", line)


class _Server(MCPServer[Any]):
    """A server whose errors are one sentence."""

    async def run_stdio_async(self) -> None:
        lines: Any = _stdin_lines()
        async with stdio_server(lines) as (read, write):
            server = self._lowlevel_server
            await server.run(read, write, server.create_initialization_options())

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
        raise ToolError("the index cannot be read: see the server's log") from error


def _answer(answer: BaseModel) -> CallToolResult:
    """An answer, without empty fields, as JSON text and as structured content."""
    given = answer.model_dump(mode="json", exclude_none=True)
    text = TextContent(type="text", text=as_json(given))
    return CallToolResult(content=[text], structured_content=given)


def _tokens_of(answer: BaseModel) -> int:
    return count_tokens(as_json(answer.model_dump(mode="json", exclude_none=True)))


def within(
    results: Sequence[SearchResult],
    max_tokens: int,
    part_of: Callable[[int, int], str],
    notice: str = "",
    answer: str | None = None,
) -> SearchResults:
    """As many of the results as fit into ``max_tokens``, best first.

    If not all fit, snippets are left out, and the longest texts are cut: ``part_of`` gives the part
    of a result (its number) with a number of characters (``snippets.snippet``). A note after
    ``notice`` says so.
    """
    whole = SearchResults(answer=answer, results=list(results), note=notice or None)
    if _tokens_of(whole) <= max_tokens:
        return whole
    bare = [result.model_copy(update=dict(text="", cut=True, snippet=None)) for result in results]
    least = [min(TEXT_TOKENS, count_tokens(result.text)) for result in results]

    def left(shown: int) -> int:
        given = SearchResults(answer=answer, results=bare[:shown], note=notice)
        return max_tokens - NOTE_TOKENS - _tokens_of(given)

    numbers = range(len(results), 1, -1)
    shown = next((n for n in numbers if left(n) >= sum(least[:n])), 1)
    kept = shared_out([result.text for result in results[:shown]], max(left(shown), TEXT_TOKENS))
    cut = list[SearchResult]()
    for number, (result, length) in enumerate(zip(results, kept, strict=False)):
        text = result.text
        is_cut = length < len(text)
        if is_cut:
            tokens = count_tokens(as_json(text[:length])[1:-1])
            wide = sum(east_asian_width(letter) in "WF" for letter in text[:length])
            text = part_of(number, length + wide)
            text = text[: fitting(text, tokens)]
        given = {"text": text, "cut": is_cut or None, "snippet": None}
        cut.append(result.model_copy(update=given))
    notes = []
    if number := sum(bool(result.cut) for result in cut):
        notes.append(
            f"{counted(number, 'text is', 'texts are')} cut: fetch returns the rest by id and chunk"
        )
    if rest := len(results) - shown:
        left_out = counted(rest, "result is", "results are")
        notes.append(f"{left_out} left out: raise max_tokens to see them")
    said = f"To fit {max_tokens:,} tokens, {', and '.join(notes) or 'snippets are left out'}."
    return SearchResults(answer=answer, results=cut, note=f"{notice} {said}".strip())


def _read(texts: Sequence[str], first: int, offset: int, tokens: int) -> dict[str, Any]:
    """The fields of a fetched document: its passages from ``first`` on, as many whole ones as fit,
    or the beginning of one that does not fit.
    """
    fits = fitting("".join(texts[first:]), tokens)
    ends = list(accumulate(len(text) for text in texts[first:]))
    whole = bisect_right(ends, fits)
    if whole == len(ends):
        return {"text": "".join(texts[first:])}
    following = {"next_chunk": first + whole}
    length = ends[whole - 1] if whole else fits
    if not whole:
        following["next_offset"] = offset + length
    where = ", ".join(f"{name[5:]}={value}" for name, value in following.items())
    note = (
        f"The document has {len(texts)} passages, from 0. For the next ones, fetch it with {where}."
    )
    return {"text": "".join(texts[first:])[:length], "note": note, **following}


def mcp_server(tools: Tools) -> MCPServer[Any]:
    """The server of an index, for any transport."""
    name = tools.site.name
    instructions = f"search finds documents of {name}; fetch reads one by its id"
    server = _Server(name, version=__version__, instructions=instructions, log_level="WARNING")
    columns = ", ".join(f"{column} ({kind})" for column, kind in tools.columns.items())
    search = (
        f"Search {name} by meaning and by words. Returns documents, best first, each with its best "
        f"passage. {NOT_FOUND} A filter may use the columns {columns}."
    )
    server.add_tool(tools.search, description=search, annotations=READS)
    fetch = (
        f"Read a document of {name} by its id, a long one in parts, starting at a passage (chunk)."
    )
    server.add_tool(tools.fetch, description=fetch, annotations=READS)
    return server


def http_app(server: MCPServer[Any], access: Access, limits: Limits) -> ASGIApp:
    """The server as an ASGI application, by streamable HTTP at /mcp."""
    from revela.searching.server.middleware import Guard

    app = server.streamable_http_app(
        stateless_http=True,
        json_response=True,
        max_request_body_size=limits.max_body_bytes,
        host="",  # Guard checks Host and Origin, the SDK would want a port in both
    )
    return Guard(app, access, checks_origin=True)
