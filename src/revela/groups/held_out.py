"""Held-out documents -> label-free retrieval tasks: does the retriever find what belongs together?

Documents are held out of training by a hash of their text. Each task asks what a user without
judgements can still check:
- ``sibling``: the first half of a chunk should find the other chunks of its document;
- ``title``: a title should find the chunks of its document;
- ``question``: a question that a language model wrote about a chunk should find that chunk (only
  where one is given to write);
- ``docstring``: a function's docstring should find the function, whose docstring has been cut out.
"""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from revela.corpus.arrow_list import ArrowList
from revela.corpus.chunk import chunk
from revela.corpus.code import documented_functions
from revela.corpus.queries import Answer
from revela.types import Document

MIN_QUERY_WORDS = 3
MIN_SHARE = 4  # chunks of a document among the passages
MIN_QUERIES = 5  # of a task

Ask = Callable[[Sequence[str]], Sequence[Answer]]
"""Passages -> a question about each, or why there is none."""


@dataclass(frozen=True)
class Task:
    """Queries against passages. ``relevant[i]`` and ``excluded[i]`` hold passage indices for query
    i.
    """

    name: str
    queries: list[str]
    passages: list[str]
    relevant: list[frozenset[int]]
    excluded: list[frozenset[int]]


def split_held_out(
    documents: ArrowList[Document], share: float, at_most: int
) -> tuple[ArrowList[Document], list[Document]]:
    """Training documents and held-out documents.

    Chosen by a hash of title and text, so that the choice does not depend on order, run or seed.

    Args:
        documents: all documents.
        share: share to hold out, 0 to 0.5.
        at_most: never hold out more documents than this.
    """
    digests = [hashlib.blake2b(d.full_text.encode(), digest_size=8).digest() for d in documents]
    ranked = sorted(range(len(digests)), key=digests.__getitem__)
    held = sorted(ranked[: min(at_most, int(share * len(digests)))])
    rest = sorted(ranked[len(held) :])
    return documents.chosen(rest), list(documents.chosen(held))


def tasks(
    documents: Sequence[Document],
    max_words: int,
    queries: int,
    passages: int,
    seed: int,
    questions: int = 0,
    ask: Ask | None = None,
) -> list[Task]:
    """The tasks that these documents can ask, at most ``queries`` queries each over at most
    ``passages`` passages.

    Args:
        documents: held-out ones.
        max_words: of a chunk.
        queries: most queries a task; a task of fewer than ``MIN_QUERIES`` is left out.
        passages: most passages a task.
        seed: of what is drawn at random.
        questions: have a question written about so many passages.
        ask: writes them; None: nobody does.
    """
    rng = random.Random(seed)
    texts, owned = _chunks(documents, max_words, passages)
    built = [
        _sibling(texts, owned, rng),
        _title(documents, texts, owned),
        docstring_task(documents, passages),
    ]
    if questions and ask:
        built.insert(2, _question(texts, questions, ask))
    return [_sampled(task, queries, rng) for task in built if len(task.queries) >= MIN_QUERIES]


def _chunks(
    documents: Sequence[Document], max_words: int, limit: int
) -> tuple[list[str], dict[int, list[int]]]:
    """Chunks, and which of them each document owns; long documents are cut short so that many have
    a share in the limit.
    """
    share = max(MIN_SHARE, limit // max(1, len(documents)))
    texts: list[str] = []
    owned = defaultdict[int, list[int]](list)
    for index, document in enumerate(documents):
        for piece in chunk(document, index, max_words)[:share]:
            if len(texts) < limit:
                owned[index].append(len(texts))
                texts.append(piece.text)
    return texts, owned


def _sibling(texts: list[str], owned: dict[int, list[int]], rng: random.Random) -> Task:
    task = Task("sibling", [], texts, [], [])
    for members in owned.values():
        i = rng.choice(members)
        words = texts[i].split()
        if len(members) > 1 and len(words) >= 2 * MIN_QUERY_WORDS:
            task.queries.append(" ".join(words[: len(words) // 2]))
            task.relevant.append(frozenset(members) - {i})
            task.excluded.append(frozenset({i}))
    return task


def _title(documents: Sequence[Document], texts: list[str], owned: dict[int, list[int]]) -> Task:
    task = Task("title", [], texts, [], [])
    for owner, members in owned.items():
        if len(documents[owner].title.split()) >= MIN_QUERY_WORDS:
            task.queries.append(documents[owner].title)
            task.relevant.append(frozenset(members))
            task.excluded.append(frozenset())
    return task


def _question(texts: list[str], questions: int, ask: Ask) -> Task:
    task = Task("question", [], texts, [], [])
    order = list(range(len(texts)))
    random.Random(0).shuffle(
        order
    )  # whatever the run's seed, and more begin with the same ones: each is written once
    chosen = order[:questions]
    for i, answer in zip(chosen, ask([texts[i] for i in chosen]), strict=True):
        if answer.query:
            task.queries.append(answer.query)
            task.relevant.append(frozenset({i}))
            task.excluded.append(frozenset())
    return task


def docstring_task(documents: Sequence[Document], limit: int) -> Task:
    """First sentence of each docstring -> its function without the docstring (Python only)."""
    task = Task("docstring", [], [], [], [])
    seen = set()
    for document in documents:
        if document.kind != "code" or len(task.passages) >= limit:
            continue
        for query, function in documented_functions(document.text):
            if query.lower() not in seen and len(task.passages) < limit:
                seen.add(query.lower())
                task.queries.append(query)
                task.passages.append(function)
                task.relevant.append(frozenset({len(task.passages) - 1}))
                task.excluded.append(frozenset())
    return task


def _sampled(task: Task, queries: int, rng: random.Random) -> Task:
    if len(task.queries) <= queries:
        return task
    keep = sorted(rng.sample(range(len(task.queries)), queries))
    return Task(
        task.name,
        [task.queries[i] for i in keep],
        task.passages,
        [task.relevant[i] for i in keep],
        [task.excluded[i] for i in keep],
    )
