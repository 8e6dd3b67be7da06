"""Results of a search as programs get them, over HTTP and by ``revela search --json``, and as the
command line prints them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from revela.searching.index_search import distinct
from revela.searching.snippets import heading_of
from revela.text.readers.common import display_path
from revela.types import Answer, Explanation, Hits

if TYPE_CHECKING:
    from revela.searching.index import Index
    from revela.searching.word_search import Words

WHOLE = 10**6  # characters: all of a passage


@dataclass(frozen=True)
class Marked:
    """Plain text, and the begin and end of each place in it that is marked, in code points."""

    text: str
    marks: list[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Result:
    """A document with its best chunk."""

    __pydantic_config__ = {"use_attribute_docstrings": True}  # noqa: RUF012  (read by pydantic)

    object: Literal["search.result"] = "search.result"
    rank: int
    id: str
    score: float
    title: str
    heading: str
    "The title and the headings that the text begins with, or the id."
    text: str
    snippet: Marked
    "The part of the text with the rarest words of the query."
    passage: Marked | None = None
    "The whole text as it is shown."
    chunk: int
    url: str | None = None
    "The document's address, if the server knows it."
    path: str | None = None
    "The document's file, on a server that answers its own machine only."
    line: int | None = None
    "The line of the first mark in a file of text."
    page: int | None = None
    "Its page in a PDF."
    same_as: int | None = None
    "The rank of a result with the same text."
    date: str | None = None
    "In ISO 8601: that of the mail or the front matter, or else of the file's last change."
    type: str | None = None
    "The ending of its file: pdf."
    language: str | None = None
    "Its code: en."
    metadata: Mapping[str, Any]
    confidence: float | None = None
    """The probability that a first result that stands out as far is right, if the text answers half
    of all questions; measured without labels."""
    explanation: Explanation | None = None


@dataclass(frozen=True, kw_only=True)
class SearchResults:
    """Results of a search, best first."""

    __pydantic_config__ = {"use_attribute_docstrings": True}  # noqa: RUF012  (read by pydantic)

    object: Literal["list"] = "list"
    query: str
    model: str
    mode: str
    milliseconds: float
    answer: Answer | None = None
    """Whether the first result answers the query: sure, perhaps, unlikely (there is probably no
    answer in these documents), or elsewhere (they are about other things). Null: not known."""
    data: list[Result]
    note: str | None = None
    """Set while the vectors of a folder are being made: the search was by words, and how many are
    done. Also set if no passage contains the phrase in quotes."""


def results_of(
    index: Words | Index, query: str, hits: Hits, *, whole: bool = False, with_files: bool = True
) -> list[Result]:
    """Hits of an index as results, in their order, for ``ranked``.

    Args:
        whole: also give each whole passage as it is shown.
        with_files: name their files.
    """
    snippets = index.snippets(query, hits)
    passages = index.snippets(query, hits, WHOLE) if whole else [None] * len(hits)
    results = list[Result]()
    for hit, shown, passage in zip(hits, snippets, passages, strict=True):
        file = index.file(hit.id) if with_files else None
        results.append(
            Result(
                rank=len(results) + 1,
                id=hit.id,
                score=hit.score,
                title=hit.title,
                heading=heading_of(hit),
                text=hit.text,
                snippet=Marked(shown.text, shown.marks),
                passage=passage and Marked(passage.text, passage.marks),
                chunk=hit.chunk,
                path=display_path(file) if file else None,
                line=shown.line,
                page=shown.page,
                date=hit.date,
                type=hit.type,
                language=hit.language,
                metadata=hit.metadata,
                confidence=hit.confidence,
                explanation=hit.explanation,
            )
        )
    return results


def ranked(*several: Sequence[Result]) -> list[Result]:
    """Results of one index or of several, best first, with their ranks; ``same_as`` is the rank of
    an earlier result with the same text.
    """
    best = sorted(chain(*several), key=lambda result: -result.score)
    groups = distinct(best, len(best))
    same = {copy: first + 1 for first, copies in groups.items() for copy in copies}
    return [replace(result, rank=i + 1, same_as=same.get(i)) for i, result in enumerate(best)]
