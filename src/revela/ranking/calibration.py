"""What a test on an index's own text measured (sentence_test.py): the rule of its fusion, and how
sure its hits are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from revela.ranking.fusion import FusionRule

MEASURED = 5  # version of how calibration is measured
PRIOR = 5  # queries added to both sides' counts, so that few queries say little
WRONG_QUANTILE = 0.97  # of hits where nothing answers
OTHER = 0.5  # how much of the best other document's score counts against a hit


class Confidence(NamedTuple):
    """Gives the probability that a first hit is right, if the text answers half of all questions.

    Hits for questions without an answer rarely stand out more than ``half``; hits for questions
    with one mostly do (docs/results.md). Re-ranking by tokens does not change these numbers.

    Attributes:
        half: the quantile of the margins of hits where nothing answers.
        slope: 1 / standard deviation of these margins.
        cut: the quantile of these hits' scores.
    """

    half: float
    slope: float
    cut: float

    @classmethod
    def from_wrong_hits(cls, wrong_Q2: NDArray[np.float64]) -> Confidence:
        """Measure it on queries that nothing answers: the scores of the first hit and of the best
        other document for each.
        """
        margins_Q = np.array([margin(*pair) for pair in wrong_Q2])
        half, cut = (float(np.quantile(of, WRONG_QUANTILE)) for of in (margins_Q, wrong_Q2[:, 0]))
        return cls(half, float(1 / max(margins_Q.std(), 1e-3)), cut)

    def of(self, score: float, other: float) -> float:
        """The probability for a hit's score and the best score of another document."""
        distance = self.slope * (margin(score, other) - self.half)
        return 1 / (1 + math.exp(-max(-700.0, distance)))


def margin(score: float, other: float) -> float:
    """How far a hit stands out from the best other document. For a question without an answer, many
    passages score alike.
    """
    return score - OTHER * other


@dataclass(frozen=True)
class Calibration:
    """How often part of a sentence finds its document first, and how often a first hit with a
    certain score is right (sentence_test.py).

    ``least`` is the minimum of ``ratio``: 1, as sentences are no questions; 0 if the queries are
    docstrings; above 1 for a retriever that was fitted to the text
    (training/retriever/fit.py), as sentences overrate it.
    """

    queries: int = 0
    words: int = 0  # queries that BM25 answers
    vectors: int = 0  # queries that the vectors answer
    passages: int = 0  # in the index at that time
    least: float = 1.0
    chance: float = 0.0  # mean cosine of a query and a passage that does not answer it
    tokens: float = 0.0  # the same of token vectors, where they can be had
    version: int = MEASURED
    confidence: Confidence | None = None
    """Of hits of hybrid search by score; None where the text has few sentences, as in code."""

    def is_outdated(self, passages: int) -> bool:
        """Whether to measure again, as the text has doubled or the method has changed."""
        has_doubled = 2 * self.passages <= passages
        return passages > 0 and (has_doubled or self.version != MEASURED)

    @property
    def lexical_to_dense_ratio(self) -> float:
        """W / V, the ratio of passages found by words to passages found by vectors."""
        return (self.words + PRIOR) / (self.vectors + PRIOR)

    @property
    def ratio(self) -> float:
        """W / V as the fusion uses it: at least ``least``."""
        return max(self.least, self.lexical_to_dense_ratio)

    @cached_property
    def rule(self) -> FusionRule:
        """The rule of the fusion by score."""
        return FusionRule(self.ratio**2, self.chance, self.tokens)

    def describe(self) -> str:
        """The result and what follows from it, for messages."""
        if not self.queries:
            return "the text has too few sentences to tell whether words or vectors know it"
        text = (
            "test on your own text: words find the right document in "
            f"{100 * self.words / self.queries:.0f} of 100 cases, vectors in "
            f"{100 * self.vectors / self.queries:.0f}"
        )
        if self.ratio <= 4:
            if self.confidence is None:
                return f"{text}; the text has too few sentences to say how sure a hit is"
            said = "where nothing answers, 97 of 100 first hits score below"
            return f"{text}; {said} {self.confidence.cut:.2f}"
        return (
            f"{text}: this embedder does not know this text, and searches go by words; give "
            "another --model, or train one (docs/languages.md)"
        )
