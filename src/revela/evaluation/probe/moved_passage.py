"""Move the passage: the answer of a query at ten places of its document; does the document still
rank (Coelho et al., ACL 2024)?

Each answer is taken out of its document, what remains is cut so that both fit into what the model
reads, and the answer is put back at the start, at eight places between, and at the end. All
documents have their answer at the same place in one ranking; ten rankings in all. Scores are the
reciprocal rank (among the first 100, as in the paper) and the cosine.

The paper says that places count tokens, the authors' code counts characters; both can be had. Here
a document may have several answers (paragraphs of an article): none of them stands in what
remains, so that it can only be found where it was put.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from revela.errors import RevelaError
from revela.evaluation.probe.answers import Answer, Answered
from revela.evaluation.probe.position import SPARE, between_words
from revela.evaluation.probe.profile import PLACES, Profile, Scores, profile
from revela.retriever.tokens import Ruler
from revela.types import Encoder, Vectors

Unit = Literal["tokens", "characters"]
DEPTH = 100  # of the reciprocal rank
MOVED_TENTHS = [10 * place / (PLACES - 1) for place in range(PLACES)]


@dataclass(frozen=True)
class Moved:
    """An answer, and its document with it at each of the ten places."""

    answer: Answer
    texts: list[str]


def move_all(answered: Answered, ruler: Ruler, count: int, unit: Unit, seed: int) -> list[Moved]:
    """A sample of answers, moved about.

    An answer counts if it is no longer than half of what the model reads, and what remains of its
    document is at least as long as it.

    Args:
        answered: documents and answers.
        ruler: of the model.
        count: how many answers at most.
        unit: what places count.
        seed: of the sample.

    Raises:
        RevelaError: fewer than two answers count.
    """
    room = ruler.room - SPARE
    lengths = [len(spans) for spans in ruler.spans([answer.text for answer in answered.answers])]
    short = [
        (answer, length)
        for answer, length in zip(answered.answers, lengths, strict=True)
        if length <= room // 2
    ]
    chosen = random.Random(seed).sample(short, min(count, len(short)))
    rests = _rests(answered, [answer for answer, _ in chosen])
    moved = []
    for answer, length in chosen:
        spans = ruler.spans([rests[answer.document]])[0][: room - length]
        if len(spans) >= max(length, PLACES):
            moved.append(
                Moved(
                    answer,
                    inserted(
                        rests[answer.document][: spans[-1][1]], answer.text, places(spans, unit)
                    ),
                )
            )
    if len(moved) < 2:
        raise RevelaError(
            f"{answered.name}: {len(moved)} of {len(answered.answers):,} answers fit beside as much of their document into "
            f"{ruler.room} tokens, and two are needed: raise --max-tokens, or give longer documents"
        )
    return moved


def _rests(answered: Answered, answers: Sequence[Answer]) -> dict[int, str]:
    rests: dict[int, str] = {}
    for answer in answers:
        text = rests.get(answer.document, answered.documents[answer.document])
        rests[answer.document] = " ".join(
            part.strip() for part in text.split(answer.text, 1)
        ).strip()
    return rests


def places(spans: Sequence[tuple[int, int]], unit: Unit) -> list[int]:
    """Ten character offsets from the start of a text to its end: at every ninth of its tokens, or
    of its characters.
    """
    end = spans[-1][1]
    if unit == "characters":
        return [round(place * end / (PLACES - 1)) for place in range(PLACES)]
    starts = [*(start for start, _ in spans), end]
    return [starts[round(place * len(spans) / (PLACES - 1))] for place in range(PLACES)]


def inserted(rest: str, passage: str, offsets: Sequence[int]) -> list[str]:
    """The rest with the passage at each offset, white space between."""
    return [
        " ".join(part for part in (rest[:at].strip(), passage.strip(), rest[at:].strip()) if part)
        for at in offsets
    ]


def moved_passage(
    moved: Sequence[Moved],
    others: Sequence[str],
    encoder: Encoder,
    seed: int = 0,
    progress: bool = False,
) -> dict[str, Profile]:
    """Reciprocal rank and cosine of each query's own document, by the place of the answer in it.

    Args:
        moved: documents that compete with each other, all with their answer at the same place.
        others: texts that compete too.
        encoder: of unit vectors.
        seed: of the intervals, which draw whole documents again.
        progress: show bars.
    """
    texts = [text for place in range(PLACES) for text in (m.texts[place] for m in moved)]
    passages_PAD = encoder.encode_passages(texts, progress=progress).reshape(PLACES, len(moved), -1)
    others_OD = (
        encoder.encode_passages(others, progress=progress) if others else passages_PAD[0, :0]
    )
    queries_QD = encoder.encode_queries(
        [query for m in moved for query in m.answer.queries], progress=progress
    )
    own_Q = np.repeat(np.arange(len(moved)), [len(m.answer.queries) for m in moved])
    cosines_QP, ranks_QP = scores_by_place(queries_QD, passages_PAD, others_OD, own_Q)
    reciprocal_QP = np.where(ranks_QP <= DEPTH, 1.0 / ranks_QP, 0.0)
    owners = [moved[own].answer.document for own in own_Q.tolist()]
    return {
        f"moved passage, MRR@{DEPTH}": profile(reciprocal_QP, MOVED_TENTHS, owners, seed),
        "moved passage, cosine": profile(cosines_QP, MOVED_TENTHS, owners, seed),
    }


def scores_by_place(
    queries_QD: Vectors, passages_PAD: Vectors, others_OD: Vectors, own_Q: NDArray[np.int64]
) -> tuple[Scores, NDArray[np.int64]]:
    """Cosine (Q, P) of each query with its own document, and that document's rank (from 1) among
    all of the same place and the others.
    """
    cosines, ranks = [], []
    above_others_QO = queries_QD @ others_OD.T
    for passages_AD in passages_PAD:
        scores_QA = queries_QD @ passages_AD.T
        own = scores_QA[np.arange(len(own_Q)), own_Q]
        cosines.append(own.astype(np.float64))
        ranks.append(
            1
            + (scores_QA > own[:, None]).sum(axis=1)
            + (above_others_QO > own[:, None]).sum(axis=1)
        )
    return np.column_stack(cosines), np.column_stack(ranks)


def untouched(answered: Answered, moved: Sequence[Moved], ruler: Ruler) -> list[str]:
    """Documents none of whose answers is moved, cut to what the model reads."""
    theirs = {m.answer.document for m in moved}
    texts = [text for index, text in enumerate(answered.documents) if index not in theirs]
    room = ruler.room - SPARE
    spans = ruler.spans(texts)
    return [
        between_words(text, some[room - 1][1]) if len(some) > room else text
        for text, some in zip(texts, spans, strict=True)
    ]
