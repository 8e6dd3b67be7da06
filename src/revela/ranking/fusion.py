"""Hybrid search: join the ranking by vectors and the ranking by words into one.

By score (``fuse_scores``), the default:

    score(q, d) = (c(q, d) + w s(q, d)) / (1 + w)

    c(q, d) = (cos(q, d) - chance) / (1 - chance)             s(q, d) = BM25(q, d) / best(q)
    w       = 0.75 max(least, W / V)^2

Both sides run from 0 (nothing in common) to 1 (the best possible match), for every embedder and
text, so that scores of different queries can be compared:

- ``chance`` is the mean cosine of a query and a passage that does not answer it (calibration.py).
  c is 0 below it. Stretching or shifting all cosines does not change c: multilingual-e5, whose
  cosines lie between 0.75 and 0.9, and an embedder whose cosines begin at 0 are comparable.
- ``best(q)`` is the theoretical maximum of BM25 (Bruch, Gai & Ingber, An Analysis of Fusion
  Functions for Hybrid Retrieval, TOIS 2023).

The weight w of the words needs no labels. W counts how often words find the passage that a sentence
was taken from, V how often vectors do. ``least`` is 1, because sentences share more words with
passages than questions do (Calibration.least). It is one number per corpus; weights per query were
not better (research/notebook.md).

The score of a document is that of its best passage, lower if it has many (``by_length``):

    score(q, D) = max_d score(q, d) (21 / (20 + n))^0.1                  n passages d of D

Of many passages one matches by chance: a long change log was ranked above the page that answers.
A document of 20 passages loses 6 %, one of 300 24 %; short documents lose nothing.

By rank (``fuse_ranks``): reciprocal rank fusion (Cormack, Clarke & Buettcher, SIGIR 2009), the sum
over rankings of 1 / (k + rank), for comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from revela.errors import RevelaError
from revela.types import Vectors

Fusion = Literal["score", "rank"]
Item = TypeVar("Item", bound=Hashable)
Scores = dict[int, float]
"""A ranking: the rows of texts and their scores, best first."""


class Owner(NamedTuple):
    """The document that a row is of: its id and its number of rows."""

    id: str
    chunks: int = 1


OwnerOf = Callable[[int], Owner]
"""Gives the document of a row."""

WORDS = 0.75  # weight of the words where they find a passage as often as vectors do
DIGITS = 6  # of ``chance``: hides the order in which it was summed
MOST_ALIKE = 0.95  # maximum of ``chance``, for texts that are almost the same
RRF_K = 60  # the constant of the paper, and of Revela's hybrid rows
DEPTH = 200  # candidates from each side
LENGTH = 0.1  # exponent of a document's number of passages
SHORT = 20  # passages; the length of a shorter document hardly counts


def check_weight(weight: float | None) -> None:
    """Raise RevelaError unless a weight of the vectors is between 0 and 1."""
    if weight is not None and not 0 <= weight <= 1:
        raise RevelaError(
            f"--weight {weight}: give the vectors' share, from 0 (words alone) to 1 (vectors alone)"
        )


class FusionRule(NamedTuple):
    """What fusion by score needs to know of a corpus.

    Attributes:
        squared_ratio: max(least, W / V)^2.
        chance: mean cosine of a query and a passage that does not answer it.
        tokens: the same mean for token vectors (late_interaction.py).
    """

    squared_ratio: float = 1.0
    chance: float = 0.0
    tokens: float = 0.0

    @property
    def weight(self) -> float:
        """The weight of the vectors, 1 / (1 + w)."""
        return 1 / (1 + WORDS * self.squared_ratio)


def above_chance(scores: ArrayLike, chance: float) -> NDArray[np.float64]:
    """Rescale scores so that chance becomes 0 and 1 stays 1; lower scores become 0."""
    return np.maximum(0.0, (np.asarray(scores, np.float64) - chance) / (1 - chance))


def similarities(scores: Mapping[Item, float], chance: float) -> dict[Item, float]:
    """``above_chance`` of each item."""
    return dict(zip(scores, above_chance([*scores.values()], chance).tolist(), strict=True))


def as_chance(mean: float) -> float:
    """The mean score of unrelated texts as ``chance``: between 0 and ``MOST_ALIKE``, rounded."""
    return round(min(MOST_ALIKE, max(0.0, mean)), DIGITS)


def chance_of(vectors_ND: Vectors) -> float:
    """The mean cosine of two different unit vectors of (N, D): ``chance`` if there are no queries;
    0 for fewer than two vectors.

    >>> round(chance_of(np.array([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])), 2)  # of .6, .8 and 0
    0.47
    """
    count = len(vectors_ND)
    if count < 2:
        return 0.0
    total = float(np.square(vectors_ND.sum(axis=0, dtype=np.float64)).sum())
    return as_chance((total - count) / (count * (count - 1)))


def fuse_scores(
    cosines: Mapping[Item, float],
    shares: Mapping[Item, float],
    rule: FusionRule,
    weight: float | None = None,
) -> dict[Item, float]:
    """Fuse two rankings by score: the score of every candidate, best first.

    Args:
        cosines: cosine of every candidate.
        shares: s(q, d) of the candidates that share a word with the query.
        weight: weight of the vectors, 0 to 1; None: the rule's.

    Example:
        >>> rule = FusionRule(squared_ratio=4.0)
        >>> fused = fuse_scores({"a": 0.8, "b": 0.6, "c": 0.1}, {"b": 0.5}, rule)
        >>> {document: round(score, 2) for document, score in fused.items()}
        {'b': 0.53, 'a': 0.2, 'c': 0.03}
    """
    own = rule.weight if weight is None else weight
    return best_first(
        {
            item: own * similarity + (1 - own) * shares.get(item, 0.0)
            for item, similarity in similarities(cosines, rule.chance).items()
        }
    )


def best_first(scores: Mapping[Item, float]) -> dict[Item, float]:
    """Sort by score; ties stay in their order."""
    return dict(sorted(scores.items(), key=lambda pair: -pair[1]))


def by_length(scores: Scores, owner_of: OwnerOf) -> Scores:
    """Lower the scores of documents by their lengths.

    Example:
        >>> owners = {7: Owner("manual", 300), 8: Owner("note", 1)}
        >>> by_length({7: 0.42, 8: 0.40}, owners.__getitem__)
        {8: 0.4, 7: 0.31...}
    """
    return best_first({row: score * length_factor(owner_of(row)) for row, score in scores.items()})


def length_factor(owner: Owner) -> float:
    """What a document's score is multiplied by for its length, at most 1."""
    return float(((SHORT + 1) / (SHORT + owner.chunks)) ** LENGTH)


def best_chunks(scores: Scores, owner_of: OwnerOf) -> Scores:
    """The first row of each document in a ranking."""
    best = dict[str, int]()
    for row in scores:
        best.setdefault(owner_of(row).id, row)
    return {row: scores[row] for row in best.values()}


def reciprocal_rank_fusion(rankings: Sequence[Collection[Item]]) -> dict[Item, float]:
    """Fuse rankings of items by rank: the score of every item, best first.

    Example:
        >>> list(reciprocal_rank_fusion([["a", "b"], ["b", "c"]]))
        ['b', 'a', 'c']
    """
    scores: dict[Item, float] = {}
    for ranking in rankings:
        for rank, item in enumerate(ranking, start=1):
            scores[item] = scores.get(item, 0.0) + 1.0 / (RRF_K + rank)
    return best_first(scores)


def fuse_ranks(rankings: Sequence[Scores], owner_of: OwnerOf) -> Scores:
    """Fuse rankings of rows by rank: the best row of each document, with the document's score.

    A document's rank in a ranking is that of its first row. Its best row is its first one in the
    fusion of the rankings of rows.
    """
    best = best_chunks(reciprocal_rank_fusion(rankings), owner_of)
    row_of = {owner_of(row).id: row for row in best}
    documents = [dict.fromkeys(owner_of(row).id for row in ranking) for ranking in rankings]
    return {row_of[name]: score for name, score in reciprocal_rank_fusion(documents).items()}
