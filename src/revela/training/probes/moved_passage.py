"""Moved passage: rank a document while a query's answer is moved through it (Coelho et al., ACL
2024).

Each answer is taken out of its document, the rest is cut so that both together fill the model's
window, and the answer is put back at ten places, in ninths of the tokens. In each of ten rankings,
all documents have their answer at the same place. Scores are the reciprocal rank (among the first
100, as in the paper) and the cosine.

Documents are articles: neighbouring passages with the same title in a folder in BEIR layout,
joined. Answers are the judged passages. All of them are taken out of an article, so that it has
only the moved one.

Shapes: A moved answers, O other documents, Q queries, P places, D width.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from revela.encoders.base import TextEncoder
from revela.errors import RevelaError
from revela.evaluation.collection import load_collection
from revela.text.load import read_corpus
from revela.training.probes.places import (
    PLACES,
    SPARE,
    Profile,
    Scores,
    TokenWindow,
    between_words,
    profile,
)
from revela.types import Vectors

DEPTH = 100  # the reciprocal rank is 0 beyond
MOVED_TENTHS = [10 * place / (PLACES - 1) for place in range(PLACES)]


@dataclass(frozen=True)
class Answer:
    """A passage of a document (an index), and the queries that it answers."""

    document: int
    text: str
    queries: tuple[str, ...]


@dataclass(frozen=True)
class Answered:
    """Documents, and their passages that answer queries."""

    name: str
    documents: list[str]
    answers: list[Answer]


@dataclass(frozen=True)
class Moved:
    """An answer, and its document with the answer at each of the ten places."""

    answer: Answer
    texts: list[str]


def load_answers(folder: Path) -> Answered:
    """Read the articles of a folder in BEIR layout, and the judged passages of articles that have
    several passages.
    """
    collection = load_collection(folder)
    queries = defaultdict[str, list[str]](list)
    for query_id, query in zip(collection.query_ids, collection.queries, strict=True):
        for passage, score in collection.qrels[query_id].items():
            if score > 0:
                queries[passage].append(query)
    files = (folder / "corpus.jsonl", folder / "corpus.jsonl.gz")
    corpus = next(path for path in files if path.is_file())
    passages, _ = read_corpus([corpus], distinct=False, min_words=1)
    articles, answers = list[str](), list[Answer]()
    for title, group in groupby(passages, key=lambda passage: passage.title):
        members = list(group)
        if title and len(members) > 1:
            judged = [p for p in members if p.id in queries]
            answers += [Answer(len(articles), p.text, tuple(queries[p.id])) for p in judged]
        articles.append(" ".join(p.text for p in members))
    if not answers:
        raise RevelaError(
            f"{folder} has no answer that could be moved, as its judged passages share no title "
            "with a neighbour: give each document as passages of one title, in order"
        )
    return Answered(collection.name, articles, answers)


def move_all(answered: Answered, window: TokenWindow, count: int, seed: int) -> list[Moved]:
    """At most ``count`` answers, each put at ten places of its document. An answer qualifies if it
    fills at most half of the window, and the rest of its document is at least as long as it.

    Raises:
        RevelaError: fewer than two answers qualify.
    """
    size = window.size - SPARE
    lengths = map(len, window.spans([answer.text for answer in answered.answers]))
    measured = zip(answered.answers, lengths, strict=True)
    short = [(answer, length) for answer, length in measured if length <= size // 2]
    drawn = random.Random(seed).sample(short, min(count, len(short)))
    rests = _rests(answered, [answer for answer, _ in drawn])
    moved = []
    for answer, length in drawn:
        rest = rests[answer.document]
        spans = window.spans([rest])[0][: size - length]
        if len(spans) >= max(length, PLACES):
            texts = inserted(rest[: spans[-1][1]], answer.text, places(spans))
            moved.append(Moved(answer, texts))
    if len(moved) < 2:
        raise RevelaError(
            f"{answered.name}: {len(moved)} of {len(answered.answers):,} answers fit beside as "
            f"much of their document into {window.size} tokens, and two are needed: raise "
            "--max-tokens, or give longer documents"
        )
    return moved


def _rests(answered: Answered, answers: Sequence[Answer]) -> dict[int, str]:
    """Index -> text of the answers' documents, without the answers."""
    rests: dict[int, str] = {}
    for answer in answers:
        text = rests.get(answer.document, answered.documents[answer.document])
        parts = [part.strip() for part in text.split(answer.text, 1)]
        rests[answer.document] = " ".join(parts).strip()
    return rests


def places(spans: Sequence[tuple[int, int]]) -> list[int]:
    """Ten character offsets from the start of a text to its end, in ninths of its tokens."""
    starts = [*(start for start, _ in spans), spans[-1][1]]
    return [starts[round(place * len(spans) / (PLACES - 1))] for place in range(PLACES)]


def inserted(rest: str, passage: str, offsets: Sequence[int]) -> list[str]:
    """The rest with the passage inserted at each offset, between spaces."""
    return [
        " ".join(part for part in (rest[:at].strip(), passage.strip(), rest[at:].strip()) if part)
        for at in offsets
    ]


def untouched(answered: Answered, moved: Sequence[Moved], window: TokenWindow) -> list[str]:
    """The documents without a moved answer, cut to the window."""
    owners = {m.answer.document for m in moved}
    texts = [text for index, text in enumerate(answered.documents) if index not in owners]
    size = window.size - SPARE
    return [
        between_words(text, spans[size - 1][1]) if len(spans) > size else text
        for text, spans in zip(texts, window.spans(texts), strict=True)
    ]


def moved_passage(
    moved: Sequence[Moved], others: Sequence[str], encoder: TextEncoder
) -> dict[str, Profile]:
    """Profiles of the reciprocal rank and the cosine of each query's document, by the place of its
    answer. The encoder must give unit vectors.
    """
    texts = [m.texts[place] for place in range(PLACES) for m in moved]
    passages_PAD = encoder.encode_passages(texts, progress=True).reshape(PLACES, len(moved), -1)
    others_OD = passages_PAD[0, :0]
    if others:
        others_OD = encoder.encode_passages(others, progress=True)
    queries = [query for m in moved for query in m.answer.queries]
    queries_QD = encoder.encode_queries(queries, progress=True)
    own_Q = np.repeat(np.arange(len(moved)), [len(m.answer.queries) for m in moved])
    cosines_QP, ranks_QP = scores_by_place(queries_QD, passages_PAD, others_OD, own_Q)
    reciprocal_QP = np.where(ranks_QP <= DEPTH, 1.0 / ranks_QP, 0.0)
    owners = [moved[own].answer.document for own in own_Q.tolist()]
    return {
        f"moved passage, MRR@{DEPTH}": profile(reciprocal_QP, MOVED_TENTHS, owners),
        "moved passage, cosine": profile(cosines_QP, MOVED_TENTHS, owners),
    }


def scores_by_place(
    queries_QD: Vectors, passages_PAD: Vectors, others_OD: Vectors, own_Q: NDArray[np.int64]
) -> tuple[Scores, NDArray[np.int64]]:
    """The cosine (Q, P) of each query and its document, and the document's rank (Q, P), from 1.

    It is ranked among the documents with their answers at the same place, and the others.
    """
    cosines, ranks = [], []
    others_QO = queries_QD @ others_OD.T
    for passages_AD in passages_PAD:
        scores_QA = queries_QD @ passages_AD.T
        own = scores_QA[np.arange(len(own_Q)), own_Q]
        cosines.append(own.astype(np.float64))
        above = (scores_QA > own[:, None]).sum(axis=1) + (others_QO > own[:, None]).sum(axis=1)
        ranks.append(1 + above)
    return np.column_stack(cosines), np.column_stack(ranks)
