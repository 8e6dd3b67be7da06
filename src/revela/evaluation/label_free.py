"""The label-free check: score a retriever on retrieval tasks made from held-out documents.

- ``sibling``: the first half of a chunk should find the other chunks of its document;
- ``title``: a title should find the chunks of its document;
- ``question``: a question that a language model wrote about a chunk should find the chunk;
- ``docstring``: a docstring should find its function, from which it has been removed.

The retriever is scored alone and fused with BM25; BM25 is scored for comparison.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, groupby, islice

import numpy as np
from numpy.typing import NDArray

from revela.encoders.base import TextEncoder
from revela.evaluation.collection import Asked, Collection
from revela.evaluation.evaluate import by_id, without_themselves
from revela.evaluation.metrics import per_query
from revela.evaluation.significance import MEASURE
from revela.ranking.bm25 import BM25
from revela.ranking.exact import rankings_of, top_k
from revela.ranking.fusion import FusionRule, Scores
from revela.ranking.queries import with_docstrings
from revela.ranking.sentence_test import SentenceTest
from revela.ranking.steps import MemoryStore, SearchOptions
from revela.text.chunk import chunk
from revela.text.words import count_words, joined, words
from revela.types import Chunk, Document

DEPTH = 110  # enough for nDCG@10 and recall@100 without the query's own passage
MIN_QUERY_WORDS = 3
MIN_CHUNKS = 4  # each document may give this many passages, even if they exceed its share
MIN_QUERIES = 5  # per task
SENTENCES = 100  # queries that calibrate the fusion

PerQuery = NDArray[np.float64]
"nDCG@10 of each query of a task, (Q,)."
Ask = Callable[[Sequence[str]], Sequence[str]]
"""Writes a question about each passage; "" for none."""


class HeldOutCheck:
    """Scores an encoder on tasks by nDCG@10, alone and fused with BM25 by score (by rank if it
    compares by dot products); and BM25.

    Checkpoints are selected by both scores: an index is searched by the fusion, but in the fusion
    BM25 may hide what the vectors learn.
    """

    def __init__(self, tasks: Sequence[Collection], language: str = "auto") -> None:
        self.tasks = list(tasks)
        by_passages = groupby(self.tasks, key=lambda task: task.documents)
        self._pools = [_Pool(list(pool), language) for _, pool in by_passages]

    def __call__(self, encoder: TextEncoder) -> dict[str, float]:
        """nDCG@10 of each task, alone and with BM25 (named by ``with_bm25``)."""
        alone, fused = self.queries(encoder, "").values()
        pairs = ({task: alone[task], with_bm25(task): fused[task]} for task in alone)
        return _means({name: scores_Q for pair in pairs for name, scores_Q in pair.items()})

    def queries(self, encoder: TextEncoder, name: str) -> dict[str, dict[str, PerQuery]]:
        """System -> task -> nDCG@10 of each query. Systems are the encoder ``name`` and its
        fusion with BM25. Passages are encoded once.
        """
        alone, fused = dict[str, PerQuery](), dict[str, PerQuery]()
        for pool in self._pools:
            vectors_ND = encoder.encode_passages(pool.passages, True)
            by_rank = encoder.by_dot  # dot products have no fixed scale
            rule = FusionRule() if by_rank else pool.test(encoder, vectors_ND).rule
            options = SearchOptions(fusion="rank" if by_rank else "score")
            store = MemoryStore(pool.bm25, vectors_ND, rule)
            for task, lexical in pool.tasks:
                queries_QD = encoder.encode_queries(task.queries)
                dense = rankings_of(*top_k(queries_QD, vectors_ND, DEPTH))
                alone[task.name] = _score(task, dense)
                found = store.rankings(task.queries, queries_QD, dense, lexical, options)
                fused[task.name] = _score(task, found)
        return {name: alone, with_bm25(name): fused}

    def bm25(self) -> dict[str, float]:
        """nDCG@10 of BM25 by task."""
        return _means(self.queries_of_bm25())

    def queries_of_bm25(self) -> dict[str, PerQuery]:
        """BM25's nDCG@10 of each query, by task."""
        return {task.name: _score(task, run) for pool in self._pools for task, run in pool.tasks}

    def describe(self) -> str:
        """The tasks and their sizes, for the log."""
        return "; ".join(
            f"{task.name}: {len(task.queries)} queries over {len(task.documents)} passages"
            for task in self.tasks
        )


class _Pool:
    """Tasks with the same passages, and BM25's rankings."""

    def __init__(self, tasks: Sequence[Collection], language: str) -> None:
        self.passages, documents = tasks[0].documents, tasks[0].sources
        self.bm25 = BM25(self.passages, language)
        language = self.bm25.terms.language
        self.test = SentenceTest(self.passages, language, SENTENCES, documents=documents)
        self.tasks = [(task, self.bm25.rankings(task.queries, DEPTH)) for task in tasks]


def _means(scores: Mapping[str, PerQuery]) -> dict[str, float]:
    return {name: float(scores_Q.mean()) for name, scores_Q in scores.items()}


def _score(task: Collection, rankings: Sequence[Scores]) -> PerQuery:
    run = without_themselves(task, by_id(task, rankings))
    return np.array([scores[MEASURE] for scores in per_query(task.qrels, run).values()])


def with_bm25(name: str) -> str:
    """The name of a system, or of a task's score, that is fused with BM25."""
    return f"{name} + BM25"


def tasks(
    documents: Sequence[Document],
    max_words: int,
    queries: int,
    passages: int,
    seed: int,
    questions: int = 0,
    ask: Ask | None = None,
) -> list[Collection]:
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
    # The maximum chunks per document; the rest of a long document is left out.
    share = max(MIN_CHUNKS, passages // max(1, len(documents)))
    cut = (chunk(document, number, max_words)[:share] for number, document in enumerate(documents))
    chunks = list(islice(chain.from_iterable(cut), passages))
    texts = {str(i): piece.text for i, piece in enumerate(chunks)}
    ids_of = defaultdict[int, list[str]](list)
    for name, piece in zip(texts, chunks, strict=True):
        ids_of[piece.document].append(name)
    asked = {
        "sibling": list(_siblings(texts, ids_of, rng)),
        "title": list(_titles(documents, ids_of)),
    }
    if questions and ask:
        asked["question"] = list(_questions(texts, questions, ask))
    owners = [str(piece.document) for piece in chunks]
    asked = {name: some for name, some in asked.items() if len(some) >= MIN_QUERIES}
    made = [Collection.of(name, texts, some, owners) for name, some in asked.items()]
    if code := [document for document in documents if document.kind == "code"]:
        docstrings = docstring_task(code, passages)
        made += [docstrings] if len(docstrings.queries) >= MIN_QUERIES else []
    return [task.sampled(queries, rng) for task in made]


def _siblings(
    texts: Mapping[str, str], ids_of: Mapping[int, list[str]], rng: random.Random
) -> Iterator[Asked]:
    for ids in ids_of.values():
        own = rng.choice(ids)
        chunk_words = words(texts[own])
        if len(ids) > 1 and len(chunk_words) >= 2 * MIN_QUERY_WORDS:
            # A query with the id of its own passage does not find it (``without_themselves``).
            half = joined(chunk_words[: len(chunk_words) // 2])
            yield own, half, [name for name in ids if name != own]


def _titles(documents: Sequence[Document], ids_of: Mapping[int, list[str]]) -> Iterator[Asked]:
    for number, ids in ids_of.items():
        if count_words(title := documents[number].title) >= MIN_QUERY_WORDS:
            yield f"q{number}", title, ids


def _questions(texts: Mapping[str, str], questions: int, ask: Ask) -> Iterator[Asked]:
    # The order does not depend on the seed and the number, so that each is written only once.
    order = list(texts)
    random.Random(0).shuffle(order)
    drawn = order[:questions]
    for name, query in zip(drawn, ask([texts[name] for name in drawn]), strict=True):
        if query:
            yield f"q{name}", query, [name]


def docstring_task(documents: Sequence[Document], limit: int) -> Collection:
    """The first paragraph of a docstring finds its function; at most ``limit`` functions."""
    functions: dict[str, Chunk] = {}
    for row in chain.from_iterable(with_docstrings(d, i) for i, d in enumerate(documents)):
        if len(functions) == limit:
            break
        functions.setdefault(row.query.lower(), row)
    rows = {str(i): row for i, row in enumerate(functions.values())}
    texts = {name: row.text for name, row in rows.items()}
    return Collection.of("docstring", texts, ((f"q{i}", r.query, [i]) for i, r in rows.items()))
