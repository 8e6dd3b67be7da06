"""The label-free check: score a retriever, alone and fused with BM25, and BM25 on retrieval tasks
made from held-out documents.

Documents are held out of training by a hash of their text (``split_held_out``). The tasks:
- ``sibling``: the first half of a chunk should find the other chunks of its document;
- ``title``: a title should find the chunks of its document;
- ``question``: a question that a language model wrote about a chunk should find that chunk (only if
  a writer is given);
- ``docstring``: a docstring should find its function, from which it has been removed;
- ``sentence`` (only of ``tasks_among``): words of a sentence should find the chunk from which it
  has been removed; half of those that the chunk still has are left out.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from revela.corpus.chunk import chunk
from revela.corpus.code import documented_functions
from revela.corpus.words import count_words, joined, words
from revela.corpus.written_queries import Answer
from revela.evaluation.beir import fuse
from revela.evaluation.metrics import per_query
from revela.index.bm25 import BM25
from revela.index.calibration import SentenceTest, taken_out
from revela.index.exact import top_k
from revela.index.language import Terms
from revela.settings import Recipe
from revela.types import Document, Encoder, Vectors, hash64

TINY = 1e-9
DEPTH = 110  # enough for nDCG@10 and recall@100 after the excluded chunk is dropped
MIN_QUERY_WORDS = 3
MIN_SHARE = 4  # chunks per document among the passages
MIN_QUERIES = 5  # per task
SENTENCES = 100  # queries that the fusion's weight is measured by

Scores = NDArray[np.float64]
Ask = Callable[[Sequence[str]], Sequence[Answer]]
"""Writes a question about each passage, or says why there is none."""


@dataclass(frozen=True)
class Task:
    """Queries and passages; ``relevant[i]`` and ``excluded[i]`` are passage indices for query i."""

    name: str
    queries: list[str]
    passages: list[str]
    relevant: list[frozenset[int]]
    excluded: list[frozenset[int]]

    def add(self, query: str, relevant: frozenset[int], excluded: frozenset[int]) -> None:
        """Add a query."""
        self.queries.append(query)
        self.relevant.append(relevant)
        self.excluded.append(excluded)


class HeldOutCheck:
    """nDCG@10 of each task: of an encoder, alone and fused with BM25 by score, and of BM25.

    A state is selected by both scores of an encoder: an index is searched by both, and BM25 may
    already find what the vectors learn.

    Args:
        tasks: of ``tasks``.
        language: of the words, as ``BM25`` takes it.
    """

    def __init__(self, tasks: Sequence[Task], language: str = "auto") -> None:
        self.tasks = list(tasks)
        sides: dict[int, tuple[BM25, SentenceTest]] = {}
        for task in self.tasks:  # sibling, title and question share their passages
            if id(task.passages) not in sides:
                bm25 = BM25(task.passages, language)
                test = SentenceTest(task.passages, bm25.terms.language, SENTENCES)
                sides[id(task.passages)] = bm25, test
        self._lexical = [_lexical(task, sides[id(task.passages)][0]) for task in self.tasks]
        self._tests = [sides[id(task.passages)][1] for task in self.tasks]

    def __call__(self, encoder: Encoder) -> dict[str, float]:
        """nDCG@10 by task, alone (its name) and with BM25 (``with_bm25`` of its name)."""
        return {name: float(scores_Q.mean()) for name, scores_Q in self.queries(encoder).items()}

    def queries(self, encoder: Encoder) -> dict[str, Scores]:
        """The same of each query, (Q,)."""
        scores: dict[str, Scores] = {}
        known: SentenceTest | None = None
        for task, lexical, test in zip(self.tasks, self._lexical, self._tests, strict=True):
            if test is not known:
                known, passages = test, encoder.encode_passages(task.passages, True)
                odds = test(encoder, passages).odds
            queries = encoder.encode_queries(task.queries)
            dense = _rankings(task, *top_k(queries, passages, DEPTH))
            scores[task.name] = _score(task, dense)
            fused = [
                fuse(query, passages, list(near), shares, odds)
                for query, near, shares in zip(queries, dense, lexical, strict=True)
            ]
            scores[with_bm25(task.name)] = _score(task, fused)
        return scores

    def bm25(self) -> dict[str, float]:
        """nDCG@10 of BM25 by task."""
        return {name: float(scores_Q.mean()) for name, scores_Q in self.queries_of_bm25().items()}

    def queries_of_bm25(self) -> dict[str, Scores]:
        """The same of each query, (Q,)."""
        pairs = zip(self.tasks, self._lexical, strict=True)
        return {task.name: _score(task, lexical) for task, lexical in pairs}

    def describe(self) -> str:
        """The tasks and their sizes."""
        sizes = [(t.name, len(t.queries), len(t.passages)) for t in self.tasks]
        return "; ".join(f"{name}: {q} queries over {p} passages" for name, q, p in sizes)


def check_by(held: Sequence[Document], recipe: Recipe, ask: Ask | None = None) -> HeldOutCheck:
    """The check on these documents; ``ask`` writes its questions."""
    return HeldOutCheck(
        tasks(
            held,
            recipe.corpus.chunk_words,
            recipe.training.check_queries,
            recipe.training.check_passages,
            recipe.training.seed,
            recipe.training.check_questions,
            ask,
        ),
        recipe.corpus.language,
    )


def tasks(
    documents: Sequence[Document],
    max_words: int,
    queries: int,
    passages: int,
    seed: int,
    questions: int = 0,
    ask: Ask | None = None,
) -> list[Task]:
    """The tasks that can be made from these documents.

    Args:
        documents: the held-out documents.
        max_words: per chunk.
        queries: at most per task; a task with fewer than ``MIN_QUERIES`` is dropped.
        passages: at most per task.
        seed: of the samples.
        questions: number of passages to write a question about.
        ask: writes them; None: there is no question task.
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


def tasks_among(
    held: Sequence[Document],
    rest: Sequence[Document],
    max_words: int,
    queries: int,
    passages: int,
    terms: Terms,
) -> list[Task]:
    """Tasks about held-out documents, whose passages lie among those of the rest: ``sentence`` of
    prose, ``docstring`` of code.

    Args:
        held, rest: documents.
        max_words: per chunk.
        queries: at most per task.
        passages: at most per task.
        terms: of the language.
    """
    documents = [*held, *rest]
    texts, owned = _chunks(documents, max_words, passages)
    own = [i for i, d in enumerate(held) if d.kind == "prose" for i in owned.get(i, ())]
    sentence = Task("sentence", [], texts, [], [])
    for place, query, left in list(taken_out([texts[i] for i in own], queries)):
        texts[own[place]] = left
        if query := half_of_shared(query, left, terms):
            sentence.add(query, frozenset({own[place]}), frozenset())
    docstring, asked = docstring_task(documents, passages), docstring_task(held, passages)
    docstring = replace(
        docstring, queries=asked.queries, relevant=asked.relevant, excluded=asked.excluded
    )
    rng = random.Random(0)
    return [
        _sampled(task, queries, rng)
        for task in (sentence, docstring)
        if len(task.queries) >= MIN_QUERIES
    ]


def half_of_shared(query: str, passage: str, terms: Terms) -> str:
    """The words of a query but for one half, drawn by the passage, of those that the passage has
    too; "" if none is left.

    Who asks has read other texts than the one that answers, and uses words that it does not have.
    """
    known, rng = set(terms(passage)), random.Random(hash64(passage))
    kept = [word for word in words(query) if known.isdisjoint(terms(word)) or rng.random() < 0.5]
    return "".join(kept).strip() if any(map(terms, kept)) else ""


def _chunks(
    documents: Sequence[Document], max_words: int, limit: int
) -> tuple[list[str], dict[int, list[int]]]:
    """At most ``limit`` chunks, and those of each document; long documents are cut short so that
    more documents have a share in the limit.
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
        some = words(texts[i])
        if len(members) > 1 and len(some) >= 2 * MIN_QUERY_WORDS:
            half = joined(some[: len(some) // 2])
            task.add(half, frozenset(members) - {i}, frozenset({i}))
    return task


def _title(documents: Sequence[Document], texts: list[str], owned: dict[int, list[int]]) -> Task:
    task = Task("title", [], texts, [], [])
    for owner, members in owned.items():
        if count_words(documents[owner].title) >= MIN_QUERY_WORDS:
            task.add(documents[owner].title, frozenset(members), frozenset())
    return task


def _question(texts: list[str], questions: int, ask: Ask) -> Task:
    task = Task("question", [], texts, [], [])
    # One order for all seeds, of which more questions take more: each is written only once.
    order = list(range(len(texts)))
    random.Random(0).shuffle(order)
    chosen = order[:questions]
    for i, answer in zip(chosen, ask([texts[i] for i in chosen]), strict=True):
        if answer.query:
            task.add(answer.query, frozenset({i}), frozenset())
    return task


def docstring_task(documents: Sequence[Document], limit: int) -> Task:
    """First sentence of a docstring -> its function without the docstring (Python only), for at
    most ``limit`` functions.
    """
    task = Task("docstring", [], [], [], [])
    seen = set()
    for document in documents:
        if document.kind != "code" or len(task.passages) >= limit:
            continue
        for query, function in documented_functions(document.text):
            if query.lower() not in seen and len(task.passages) < limit:
                seen.add(query.lower())
                task.passages.append(function)
                task.add(query, frozenset({len(task.passages) - 1}), frozenset())
    return task


def _sampled(task: Task, queries: int, rng: random.Random) -> Task:
    if len(task.queries) <= queries:
        return task
    keep = sorted(rng.sample(range(len(task.queries)), queries))
    return replace(
        task,
        queries=[task.queries[i] for i in keep],
        relevant=[task.relevant[i] for i in keep],
        excluded=[task.excluded[i] for i in keep],
    )


def with_bm25(task: str) -> str:
    """The name of a task's score by the fusion with BM25."""
    return f"{task} + BM25"


def _lexical(task: Task, bm25: BM25) -> list[dict[int, float]]:
    """BM25's ranking per query of the passages that hold a word of it, with scores as shares of the
    best possible score.
    """
    indices, scores = bm25.top_k(task.queries, DEPTH)
    best_Q1 = np.maximum(bm25.best(task.queries), TINY)[:, None]  # 0 for a query without a word
    rankings = _rankings(task, indices, (scores / best_Q1).astype(np.float32))
    return [{d: share for d, share in ranking.items() if share > 0} for ranking in rankings]


def _rankings(task: Task, indices: NDArray[np.int64], values: Vectors) -> list[dict[int, float]]:
    """Passages and scores per query, best first, without excluded passages."""
    return [
        {int(d): float(s) for d, s in zip(row, scores, strict=True) if d not in excluded}
        for row, scores, excluded in zip(indices, values, task.excluded, strict=True)
    ]


def _score(task: Task, rankings: Sequence[dict[int, float]]) -> Scores:
    """nDCG@10 of each query, (Q,)."""
    qrels = {str(q): {str(d): 1 for d in relevant} for q, relevant in enumerate(task.relevant)}
    run = {str(q): {str(d): s for d, s in found.items()} for q, found in enumerate(rankings)}
    return np.array([found["ndcg@10"] for found in per_query(qrels, run).values()])
