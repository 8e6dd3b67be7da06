"""A corpus -> documents on disk: read, joined, freed of duplicates, and reported on.

What cannot be read is named and counted, never passed over in silence; past a settable share it
stops the run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from revela.corpus.arrow_list import ArrowList, arrow_list
from revela.corpus.duplicates import near_duplicates
from revela.corpus.readers import KNOWN, read_sources
from revela.corpus.readers import opened as files
from revela.corpus.readers.rows import Fields
from revela.corpus.report import Report
from revela.errors import RevelaError
from revela.settings import Recipe
from revela.types import Document

MIN_WORDS = 5  # fewer are no sentence


def read_corpus(
    sources: Sequence[Path | str],
    *,
    text_field: str = "text",
    title_field: str = "title",
    max_bad_share: float = 0.01,
    distinct: bool = True,
    near: float = 0.0,
    join_titles: bool = False,
    min_words: int = MIN_WORDS,
    metadata: Sequence[str] = (),
) -> tuple[ArrowList[Document], Report]:
    """Read every document of every source into a file of their own.

    Args:
        sources: folders, files of any kind in ``sources.READERS`` (``.gz`` of each), and datasets
            of the hub as hub:owner/name.
        text_field: field or column of the text, in rows; required in every row.
        title_field: field or column of the title; optional.
        max_bad_share: share of unreadable rows and files past which reading stops. 0 stops at the
            first.
        distinct: drop documents whose text was seen before (training). An index keeps them.
        near: drop documents that share this much of their wording with an earlier one (see
            ``near_duplicates``); 0 keeps them.
        join_titles: join neighbouring rows of one title into one document.
        min_words: documents with fewer words (title included) are skipped.
        metadata: other fields or columns to keep with each document.

    Returns:
        The documents, in order of source, file name and row, and the report.

    Raises:
        RevelaError: ``near`` is no share, a source is missing or changes while it is read, too much
            is bad, or nothing is left.
    """
    if not 0 <= near <= 1:
        raise RevelaError(
            f"--near-duplicates {near} is no share: give a number from 0 (keep them) to 1"
        )
    report = Report()
    read = read_sources(sources, Fields(text_field, title_field, tuple(metadata)), report)
    if join_titles:
        read = joined_by_title(read, report)
    documents = arrow_list(Document, _wanted(read, distinct, min_words, report))
    total = len(documents) + sum(report.skipped.values())
    if report.bad > max_bad_share * total or (report.bad and not documents):
        bad = "; ".join(
            f"{r}: {', '.join(w)}" for r, w in report.examples.items() if r in report.bad_reasons
        )
        raise RevelaError(
            f"{report.bad:,} of {total:,} entries cannot be read ({bad}): mend them, or allow more with --max-bad-share"
        )
    if not documents:
        why = "; ".join(report.lines()[1:]) or f"no file with a known ending ({KNOWN})"
        raise RevelaError(f"no document found in {', '.join(map(str, sources))}: {why}")
    if near:
        documents = _without_near_duplicates(documents, near, report)
    report.documents = len(documents)
    return documents, report


def read_for(recipe: Recipe, sources: Sequence[Path | str]) -> tuple[ArrowList[Document], Report]:
    """``read_corpus`` as a recipe says."""
    return read_corpus(
        sources,
        text_field=recipe.corpus.text_field,
        title_field=recipe.corpus.title_field,
        max_bad_share=recipe.corpus.max_bad_share,
        near=recipe.corpus.near_duplicates,
        join_titles=recipe.corpus.join_titles,
    )


def _wanted(
    documents: Iterator[Document], distinct: bool, min_words: int, report: Report
) -> Iterator[Document]:
    seen = set[bytes]()
    for document in documents:
        words = len(document.full_text.split())
        if words < min_words:
            report.skip("shorter than a sentence", document.id)
            continue
        if distinct:
            digest = hashlib.blake2b(document.full_text.encode(), digest_size=16).digest()
            if digest in seen:
                report.skip("duplicate text", document.id)
                continue
            seen.add(digest)
        report.words += words
        yield document


def _without_near_duplicates(
    documents: ArrowList[Document], near: float, report: Report
) -> ArrowList[Document]:
    dropped = near_duplicates(documents, near)
    for row, like in dropped.items():
        document = documents[row]
        report.words -= len(document.full_text.split())
        report.skip("near-duplicate text", f"{document.id} like {documents[like].id}")
    return (
        documents.chosen(row for row in range(len(documents)) if row not in dropped)
        if dropped
        else documents
    )


def joined_by_title(documents: Iterable[Document], report: Report) -> Iterator[Document]:
    """Join neighbours that share a title; those without one stay alone.

    Passages are joined by a space, as files of 100-word passages are cut within sentences. The
    first passage's id is the article's.

    Raises:
        RevelaError: one title goes on and on, so that it cannot be that of an article.
    """
    for title, group in groupby(documents, key=lambda document: document.title):
        if not title:
            yield from group
            continue
        passages, length = [], 0
        for passage in group:
            passages.append(passage)
            length += len(passage.text)
            if length > files.MAX_BYTES:
                raise RevelaError(
                    f'over {files.MAX_BYTES >> 20} MB of neighbouring passages share the title "{title}" (from {passages[0].id} on): '
                    "name the field that holds each article's title with --title-field, or leave --join-titles away"
                )
        report.passages += len(passages)
        report.articles += 1
        first = passages[0]
        yield (
            Document(
                first.id, " ".join(p.text for p in passages), title, first.kind, first.metadata
            )
            if len(passages) > 1
            else first
        )
