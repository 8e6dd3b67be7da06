"""Moved passage: rank a document while a query's answer is moved through it (Coelho et al., ACL
2024).

Each answer is taken out of its document, the rest is cut so that both together fill the model's
window, and the answer is put back at ten places, in ninths of the tokens. In each of ten rankings,
all documents have their answer at the same place, and in one more they are as they were. Scores are
the reciprocal rank (among the first 100, as in the paper) and the cosine. The other documents of
the folder are ranked too; with a whole collection there, this is the paper's ranking.

Documents and answers are those of a folder in BEIR layout, in one of two forms:
- with passages.jsonl, which has a passage (text) for queries (_id): the corpus is documents, the
  relevant one has the passage in it, and the first place where it is found, in any case, is the
  answer (MS MARCO; research/msmarco_documents.py makes the folder);
- without: the corpus is passages; neighbours with the same title, joined, are a document (an
  article), and the judged passages are the answers.

All drawn answers are taken out of a document, so that it has only the moved one.

Shapes: A moved answers, O other documents, Q queries, P places, D width.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from revela.encoders.base import TextEncoder
from revela.errors import RevelaError
from revela.evaluation.collection import load_collection
from revela.text.judgements import read_rows
from revela.text.load import read_corpus
from revela.training.probes.places import (
    BATCH,
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
BLOCK = 2**16  # other documents that are scored at a time
PASSAGES = "passages.jsonl"
MOVED_TENTHS = [10 * place / (PLACES - 1) for place in range(PLACES)]


@dataclass(frozen=True)
class Answer:
    """A passage of a document (an index), the queries that it answers, and the number of characters
    before it.
    """

    document: int
    text: str
    queries: tuple[str, ...]
    begin: int = 0


@dataclass(frozen=True)
class AnswerSet:
    """Documents, and their passages that answer queries."""

    name: str
    documents: list[str]
    answers: list[Answer]


@dataclass(frozen=True)
class MovedAnswer:
    """An answer, and its document with the answer at each of the ten places, and as it was."""

    answer: Answer
    texts: list[str]
    unmoved: str


def load_answers(folder: Path) -> AnswerSet:
    """Read the documents of a folder in BEIR layout and their answers, in one of the two forms."""
    collection = load_collection(folder)
    queries = defaultdict[tuple[int, int, str], list[str]](list)
    has_passages = any((folder / f"{PASSAGES}{end}").is_file() for end in ("", ".gz"))
    if has_passages:
        documents = collection.documents
        row_of = {name: row for row, name in enumerate(collection.document_ids)}
        rows = read_rows(folder, PASSAGES)
        text_of = {name: row["text"].strip() for name, row in rows.items()}
    else:
        documents, row_of, text_of = _articles(folder)
    for query_id, query in zip(collection.query_ids, collection.queries, strict=True):
        for name, grade in collection.qrels[query_id].items():
            if grade > 0 and (text := text_of.get(query_id if has_passages else name)):
                found = re.search(re.escape(text), documents[row_of[name]], re.IGNORECASE)
                if found:
                    queries[row_of[name], found.start(), found[0]].append(query)
    if not queries:
        raise RevelaError(
            f"{folder} has no answer to move: give each document as neighbouring passages of one "
            f"title, or give texts in {PASSAGES} that are in the documents of their queries"
        )
    answers = [Answer(row, s, (*asked,), at) for (row, at, s), asked in sorted(queries.items())]
    return AnswerSet(collection.name, documents, answers)


def _articles(folder: Path) -> tuple[list[str], dict[str, int], dict[str, str]]:
    """Neighbouring passages with the same title, joined; and of each passage that has a neighbour,
    by its id, the article and the text.
    """
    files = (folder / "corpus.jsonl", folder / "corpus.jsonl.gz")
    corpus = next(path for path in files if path.is_file())
    passages, _ = read_corpus([corpus], distinct=False, min_words=1)
    articles, article_of, text_of = list[str](), dict[str, int](), dict[str, str]()
    for title, group in groupby(passages, key=lambda passage: passage.title):
        texts = {passage.id: passage.text for passage in group}
        if title and len(texts) > 1:
            article_of |= dict.fromkeys(texts, len(articles))
            text_of |= texts
        articles.append(" ".join(texts.values()))
    return articles, article_of, text_of


def move_all(answered: AnswerSet, window: TokenWindow, count: int, seed: int) -> list[MovedAnswer]:
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
            texts = insert_at(rest[: spans[-1][1]], answer.text, places(spans))
            (unmoved,) = _cut([answered.documents[answer.document]], window)
            moved.append(MovedAnswer(answer, texts, unmoved))
    if len(moved) < 2:
        raise RevelaError(
            f"{answered.name}: {len(moved)} of {len(answered.answers):,} answers fit into "
            f"{window.size} tokens with as much of their document, and two are needed: raise "
            "--max-tokens, or give longer documents"
        )
    return moved


def _rests(answered: AnswerSet, answers: Sequence[Answer]) -> dict[int, str]:
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


def insert_at(rest: str, passage: str, offsets: Sequence[int]) -> list[str]:
    """The rest with the passage inserted at each offset, between spaces."""
    return [
        " ".join(part for part in (rest[:at].strip(), passage.strip(), rest[at:].strip()) if part)
        for at in offsets
    ]


def cut_others(answered: AnswerSet, moved: Sequence[MovedAnswer], window: TokenWindow) -> list[str]:
    """The documents without a moved answer, cut to the window."""
    owners = {m.answer.document for m in moved}
    texts = [text for index, text in enumerate(answered.documents) if index not in owners]
    return _cut(texts, window)


def _cut(texts: Sequence[str], window: TokenWindow) -> list[str]:
    """The texts, those that are longer than the window cut to it between words."""
    size, cut = window.size - SPARE, list[str]()
    for start in range(0, len(texts), BATCH):
        batch = texts[start : start + BATCH]
        cut += [
            between_words(text, spans[size - 1][1]) if len(spans) > size else text
            for text, spans in zip(batch, window.spans(batch), strict=True)
        ]
    return cut


def moved_passage(
    moved: Sequence[MovedAnswer], others: Sequence[str], encoder: TextEncoder
) -> dict[str, Profile]:
    """Profiles of the reciprocal rank and the cosine (or dot product) of each query's document, by
    the place of its answer.
    """
    texts = [m.texts[place] for place in range(PLACES) for m in moved]
    texts += [m.unmoved for m in moved]
    passages_PAD = encoder.encode_passages(texts, progress=True).reshape(PLACES + 1, len(moved), -1)
    none_0D = passages_PAD[0, :0]
    others_OD = encoder.encode_passages(others, progress=True) if others else none_0D
    queries = [query for m in moved for query in m.answer.queries]
    queries_QD = encoder.encode_queries(queries, progress=True)
    own_Q = np.repeat(np.arange(len(moved)), [len(m.answer.queries) for m in moved])
    cosines_QP, ranks_QP = scores_by_place(queries_QD, passages_PAD, others_OD, own_Q)
    reciprocal_QP = np.where(ranks_QP <= DEPTH, 1.0 / ranks_QP, 0.0)
    owners = [moved[own].answer.document for own in own_Q.tolist()]
    compared = "dot product" if encoder.by_dot else "cosine"
    scores = {f"MRR@{DEPTH}": reciprocal_QP, compared: cosines_QP}
    return {
        f"moved passage, {name}": replace(
            profile(scores_QP[:, :PLACES], MOVED_TENTHS, owners),
            unmoved=float(scores_QP[:, PLACES].mean()),
        )
        for name, scores_QP in scores.items()
    }


def scores_by_place(
    queries_QD: Vectors, passages_PAD: Vectors, others_OD: Vectors, own_Q: NDArray[np.int64]
) -> tuple[Scores, NDArray[np.int64]]:
    """The cosine (Q, P) of each query and its document, and the document's rank (Q, P), from 1.

    It is ranked among the documents with their answers at the same place, and the others.
    """
    scores_PQA = np.stack([queries_QD @ passages_AD.T for passages_AD in passages_PAD])
    own_PQ1 = scores_PQA[:, np.arange(len(own_Q)), own_Q, None]
    rank_PQ = 1 + (scores_PQA > own_PQ1).sum(axis=2)
    for start in range(0, len(others_OD), BLOCK):
        scores_QO = queries_QD @ others_OD[start : start + BLOCK].T
        rank_PQ += np.stack([(scores_QO > own_Q1).sum(axis=1) for own_Q1 in own_PQ1])
    return own_PQ1[..., 0].T.astype(np.float64), rank_PQ.T
