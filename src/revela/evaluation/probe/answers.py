"""Answer passages inside longer documents, for moving them about: from a folder that says where
they are, or from passages of articles.

A folder in BEIR layout says so in answers.jsonl: a line is {"query-id", "corpus-id", "text"}, the
text being the part of the document that answers the query. Collections of passages (SQuAD and its
like) need no such file: passages of one title, joined, are an article, and the judged passage is
the answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from revela.corpus.read import read_corpus
from revela.corpus.readers.opened import opened_text
from revela.errors import RevelaError
from revela.evaluation.beir import Collection, load_collection
from revela.types import Document

FILE = "answers.jsonl"


@dataclass(frozen=True)
class Answer:
    """A passage of a document (its index), which is there word for word, and the queries that it
    answers.
    """

    document: int
    text: str
    queries: tuple[str, ...]


@dataclass(frozen=True)
class Answered:
    """Documents, and which of their passages answer which queries."""

    name: str
    documents: list[str]
    answers: list[Answer]


def load_answers(folder: Path, join_titles: bool) -> Answered:
    """Read a folder in BEIR layout with its answers.

    Args:
        folder: with answers.jsonl, unless ``join_titles``.
        join_titles: its documents are passages; those of one title, neighbours, make an article,
            and the judged ones are the answers.

    Raises:
        RevelaError: there are no answers, or they are not where they should be.
    """
    collection = load_collection(folder)
    if join_titles:
        corpus = next(
            path for path in (folder / "corpus.jsonl", folder / "corpus.jsonl.gz") if path.is_file()
        )
        passages, _ = read_corpus([corpus], distinct=False, min_words=1)
        found = answers_in_articles(collection, passages)
    elif (folder / FILE).is_file():
        found = answers_in_documents(collection, folder / FILE)
    else:
        raise RevelaError(
            f'{folder} has no {FILE}: write one, a line being {{"query-id": ..., "corpus-id": ..., "text": ...}}, '
            "or give --join-titles if its documents are passages of articles"
        )
    if not found.answers:
        where = (
            "its judged passages share no title with a neighbour"
            if join_titles
            else f"{FILE} names no judged query"
        )
        raise RevelaError(f"{folder} has no answer that could be moved: {where}")
    return found


def answers_in_articles(collection: Collection, passages: Iterable[Document]) -> Answered:
    """Passages, as they are judged, inside the articles that neighbours of one title make; a
    passage alone is no article.
    """
    queries: dict[str, list[str]] = {}
    for query_id, query in zip(collection.query_ids, collection.queries, strict=True):
        for passage, score in collection.qrels[query_id].items():
            if score > 0:
                queries.setdefault(passage, []).append(query)
    articles, answers = list[str](), list[Answer]()
    for title, group in groupby(passages, key=lambda passage: passage.title):
        members = list(group)
        if title and len(members) > 1:
            answers += [
                Answer(len(articles), p.text, tuple(queries[p.id]))
                for p in members
                if p.id in queries
            ]
        articles.append(" ".join(p.text for p in members))
    return Answered(collection.name, articles, answers)


def answers_in_documents(collection: Collection, path: Path) -> Answered:
    """Passages that a file names; what it says of queries without a judgement is left out.

    Raises:
        RevelaError: a line cannot be read, or names a passage that its document does not have.
    """
    texts, places = (
        dict(zip(collection.query_ids, collection.queries, strict=True)),
        {d: i for i, d in enumerate(collection.document_ids)},
    )
    queries: dict[tuple[int, str], list[str]] = {}
    with opened_text(path) as handle:
        for number, line in enumerate(handle, 1):
            try:
                row = json.loads(line)
                query, document, passage = (
                    str(row["query-id"]),
                    places[str(row["corpus-id"])],
                    str(row["text"]),
                )
            except (ValueError, KeyError, TypeError) as error:
                raise RevelaError(
                    f"{path}:{number} is no answer in a document of corpus.jsonl ({type(error).__name__}: {error})"
                ) from None
            if not passage.strip() or passage not in collection.documents[document]:
                raise RevelaError(
                    f"{path}:{number}: the answer does not stand word for word in document {row['corpus-id']}"
                )
            if query in texts:
                queries.setdefault((document, passage), []).append(texts[query])
    answers = [
        Answer(document, passage, tuple(asked)) for (document, passage), asked in queries.items()
    ]
    return Answered(collection.name, collection.documents, answers)
