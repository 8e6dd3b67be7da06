"""Files of passages -> articles: neighbouring rows of one title are one document again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from revela.corpus.readers import opened as files
from revela.corpus.report import Report
from revela.errors import RevelaError
from revela.types import Document


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
