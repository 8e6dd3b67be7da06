"""The label-free check: score a retriever on retrieval tasks made from held-out documents.

- ``sibling``: the first half of a chunk should find the other chunks of its document;
- ``title``: a title should find the chunks of its document;
- ``question``: a question that a language model wrote about a chunk should find the chunk;
- ``docstring``: a docstring should find its function, from which it has been removed.

The retriever is scored alone and fused with BM25, and BM25 beside it.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from revela.evaluation.metrics import per_query
from revela.ranking.bm25 import BM25
from revela.ranking.exact import top_k
from revela.ranking.sentence_test import SentenceTest
from revela.ranking.steps import MemoryStore
from revela.text.chunk import chunk
from revela.text.code import documented_functions
from revela.text.words import count_words, joined, words
from revela.types import Document, Encoder, Vectors

DEPTH = 110  # enough for nDCG@10 and recall@100 without the excluded chunk
MIN_QUERY_WORDS = 3
MIN_CHUNKS = 4  # each document may give this many passages, even if it exceeds its share
MIN_QUERIES = 5  # per task
SENTENCES = 100  # queries to find the fusion's weight

Scores = NDArray[np.float64]


@dataclass(frozen=True)
class Answer:
    """A query, or the reason why it was rejected."""

    query: str = ""
    rejected: str = ""


Ask = Callable[[Sequence[str]], Sequence[Answer]]
"""Writes a question about each passage, or gives the reason why there is none."""


@dataclass(frozen=True)
class Task:
    """Queries and passages.

    Attributes:
        relevant: indices of each query's relevant passages.
        excluded: indices of passages that are left out of each query's ranking.
        documents: the document of each passage; if empty, each passage is one.
    """

    name: str
    passages: list[str]
    queries: list[str] = field(default_factory=list)
    relevant: list[frozenset[int]] = field(default_factory=list)
    excluded: list[frozenset[int]] = field(default_factory=list)
    documents: Sequence[int] = ()

    def add(self, query: str, relevant: Iterable[int], excluded: Iterable[int] = ()) -> None:
        self.queries.append(query)
        self.relevant.append(frozenset(relevant))
        self.excluded.append(frozenset(excluded))

    def sampled(self, count: int, rng: random.Random) -> Task:
        """The task with at most ``count`` random queries."""
        keep = range(len(self.queries))
        chosen = sorted(rng.sample(keep, count)) if len(keep) > count else keep
        sampled = Task(self.name, self.passages, documents=self.documents)
        for i in chosen:
            sampled.add(self.queries[i], self.relevant[i], self.excluded[i])
        return sampled


class HeldOutCheck:
    """Scores an encoder on tasks by nDCG@10, alone and fused with BM25 by score; and BM25.

    Both scores of an encoder select a state: an index is searched by the fusion, in which BM25 may
    already find what the vectors learn.
    """

    def __init__(self, tasks: Sequence[Task], language: str = "auto") -> None:
        self.tasks = list(tasks)
        self._pools = [
            _Pool(list(pool), language)
            for _, pool in groupby(self.tasks, key=lambda task: id(task.passages))
        ]

    def __call__(self, encoder: Encoder) -> dict[str, float]:
        """nDCG@10 of each task, alone and with BM25 (named by ``with_bm25``)."""
        return _means(self.queries(encoder))

    def queries(self, encoder: Encoder) -> dict[str, Scores]:
        """nDCG@10 of each query, (Q,), by task, alone and with BM25."""
        return {name: scores_Q for pool in self._pools for name, scores_Q in pool.scores(encoder)}

    def bm25(self) -> dict[str, float]:
        """nDCG@10 of BM25 by task."""
        return _means(self.queries_of_bm25())

    def queries_of_bm25(self) -> dict[str, Scores]:
        """BM25's nDCG@10 of each query, (Q,), by task."""
        return {task.name: _score(task, run) for pool in self._pools for task, run in pool.tasks}

    def describe(self) -> str:
        """The tasks and their sizes, for the log."""
        return "; ".join(
            f"{task.name}: {len(task.queries)} queries over {len(task.passages)} passages"
            for task in self.tasks
        )


class _Pool:
    """Tasks with the same passages, and BM25's rankings."""

    def __init__(self, tasks: Sequence[Task], language: str) -> None:
        self.passages = tasks[0].passages
        self.bm25 = BM25(self.passages, language)
        language, documents = self.bm25.terms.language, tasks[0].documents
        self.test = SentenceTest(self.passages, language, SENTENCES, documents=documents)
        self.tasks = [(task, _lexical(task, self.bm25)) for task in tasks]

    def scores(self, encoder: Encoder) -> Iterator[tuple[str, Scores]]:
        """nDCG@10 of each query by task, alone and with BM25; passages are encoded once."""
        passages = encoder.encode_passages(self.passages, True)
        rule = self.test(encoder, passages).rule
        store = MemoryStore(self.bm25, passages, rule)
        for task, lexical in self.tasks:
            queries = encoder.encode_queries(task.queries)
            dense = _rankings(task, *top_k(queries, passages, DEPTH))
            yield task.name, _score(task, dense)
            fused = store.rankings(task.queries, queries, dense, lexical)
            yield with_bm25(task.name), _score(task, fused)


def _means(scores: Mapping[str, Scores]) -> dict[str, float]:
    return {name: float(scores_Q.mean()) for name, scores_Q in scores.items()}


def tasks(
    documents: Sequence[Document],
    max_words: int,
    queries: int,
    passages: int,
    seed: int,
    questions: int = 0,
    ask: Ask | None = None,
) -> list[Task]:
    """All tasks on these documents that have at least ``MIN_QUERIES`` queries.

    Args:
        documents: held-out documents.
        max_words: maximum words per chunk.
        queries: maximum number of queries per task.
        passages: maximum number of passages per task.
        seed: seed of the sampled queries.
        questions: number of questions for ``ask`` to write.
        ask: writes questions about passages.
    """
    rng = random.Random(seed)
    texts, chunks_of = _chunks(documents, max_words, passages)
    made = [_sibling(texts, chunks_of, rng), _title(documents, texts, chunks_of)]
    if questions and ask:
        made.append(_question(texts, questions, ask))
    owners = [document for document, chunks in chunks_of.items() for _ in chunks]
    made = [replace(task, documents=owners) for task in made]
    made.append(docstring_task(documents, passages))
    return [task.sampled(queries, rng) for task in made if len(task.queries) >= MIN_QUERIES]


def _chunks(
    documents: Sequence[Document], max_words: int, limit: int
) -> tuple[list[str], dict[int, list[int]]]:
    """At most ``limit`` chunks, and document -> their indices; long documents are cut short."""
    share = max(MIN_CHUNKS, limit // max(1, len(documents)))
    texts: list[str] = []
    chunks_of = defaultdict[int, list[int]](list)
    for index, document in enumerate(documents):
        for piece in chunk(document, index, max_words)[:share]:
            if len(texts) < limit:
                chunks_of[index].append(len(texts))
                texts.append(piece.text)
    return texts, chunks_of


def _sibling(texts: list[str], chunks_of: dict[int, list[int]], rng: random.Random) -> Task:
    task = Task("sibling", texts)
    for chunks in chunks_of.values():
        i = rng.choice(chunks)
        chunk_words = words(texts[i])
        if len(chunks) > 1 and len(chunk_words) >= 2 * MIN_QUERY_WORDS:
            half = joined(chunk_words[: len(chunk_words) // 2])
            task.add(half, {*chunks} - {i}, {i})
    return task


def _title(
    documents: Sequence[Document], texts: list[str], chunks_of: dict[int, list[int]]
) -> Task:
    task = Task("title", texts)
    for document, chunks in chunks_of.items():
        if count_words(documents[document].title) >= MIN_QUERY_WORDS:
            task.add(documents[document].title, chunks)
    return task


def _question(texts: list[str], questions: int, ask: Ask) -> Task:
    task = Task("question", texts)
    # The same order for all seeds and numbers of questions, so that each is written only once.
    order = list(range(len(texts)))
    random.Random(0).shuffle(order)
    drawn = order[:questions]
    for i, answer in zip(drawn, ask([texts[i] for i in drawn]), strict=True):
        if answer.query:
            task.add(answer.query, {i})
    return task


def docstring_task(documents: Sequence[Document], limit: int) -> Task:
    """First sentence of a docstring -> its function without it; at most ``limit`` functions."""
    task = Task("docstring", [])
    seen = set()
    for document in documents:
        if document.kind != "code" or len(task.passages) >= limit:
            continue
        for query, function in documented_functions(document.text):
            if query.lower() not in seen and len(task.passages) < limit:
                seen.add(query.lower())
                task.passages.append(function)
                task.add(query, {len(task.passages) - 1})
    return task


def with_bm25(task: str) -> str:
    """The name of a task's score when fused with BM25."""
    return f"{task} + BM25"


def by_system(name: str, scores: Mapping[str, Scores]) -> dict[str, dict[str, Scores]]:
    """System -> task -> scores, from ``HeldOutCheck.queries``. Systems are the encoder ``name`` and
    its fusion with BM25.
    """
    systems: dict[str, dict[str, Scores]] = {}
    for task, scores_Q in scores.items():
        alone = task.removesuffix(with_bm25(""))
        systems.setdefault(name if alone == task else with_bm25(name), {})[alone] = scores_Q
    return systems


def _lexical(task: Task, bm25: BM25) -> list[dict[int, float]]:
    """BM25's ranking per query, of passages that share a word with the query."""
    rankings = _rankings(task, *bm25.top_k(task.queries, DEPTH))
    return [{d: score for d, score in ranking.items() if score > 0} for ranking in rankings]


def _rankings(task: Task, indices: NDArray[np.int64], values: Vectors) -> list[dict[int, float]]:
    """{passage: score} per query, best first, without excluded passages."""
    return [
        {int(d): float(s) for d, s in zip(row, scores, strict=True) if d not in excluded}
        for row, scores, excluded in zip(indices, values, task.excluded, strict=True)
    ]


def _score(task: Task, rankings: Sequence[dict[int, float]]) -> Scores:
    """nDCG@10 of each query, (Q,)."""
    qrels = {str(q): {str(d): 1 for d in relevant} for q, relevant in enumerate(task.relevant)}
    run = {str(q): {str(d): s for d, s in ranking.items()} for q, ranking in enumerate(rankings)}
    return np.array([scores["ndcg@10"] for scores in per_query(qrels, run).values()])
