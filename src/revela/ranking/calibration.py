"""The result of a test on an index's own text (sentence_test.py): the weights of its fusion, and
how certain its hits are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from revela.ranking.fusion import FusionRule
from revela.ranking.steps import Confidence

MEASURED = 5  # version of this measurement: an index of an earlier one is measured again
PRIOR = 5  # added to the counts of both sides, so that a few queries change little


@dataclass(frozen=True)
class Calibration:
    """How often part of a sentence finds its document first, and how often a first hit with a given
    score is right.

    ``least`` is the minimum of ``ratio``: 1, because sentences differ from questions; 0 if the
    queries are docstrings; above 1 for a retriever that was fitted to the text
    (training/retriever/fit.py), because sentences overrate it.
    """

    queries: int = 0
    words: int = 0  # queries that BM25 answers
    vectors: int = 0  # queries that the vectors answer
    passages: int = 0  # in the index at that time
    least: float = 1.0
    chance: float = 0.0  # mean cosine of a query and a passage that does not answer it
    tokens: float = 0.0  # the same for token vectors, if the model has any
    version: int = MEASURED
    confidences: Mapping[str, Confidence] = field(default_factory=dict)
    """By ``SearchOptions.rerank``, for hybrid search by score; none if the text has few sentences,
    as in code."""

    def is_outdated(self, passages: int) -> bool:
        """Whether to measure again, because the text has doubled or the method has changed."""
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
        """The numbers for fusion by score."""
        return FusionRule(self.ratio**2, self.chance, self.tokens)

    def describe(self) -> str:
        """The result and its consequence, for messages."""
        if not self.queries:
            return "the text has too few sentences to tell whether words or vectors know it"
        text = (
            "test on your own text: words find the right document in "
            f"{100 * self.words / self.queries:.0f} of 100 cases, vectors in "
            f"{100 * self.vectors / self.queries:.0f}"
        )
        if self.ratio <= 4:
            if not self.confidences:
                return f"{text}; the text has too few sentences to say how sure a hit is"
            cuts = [f"{sure.cut:.2f}" for sure in self.confidences.values()]
            said = "97 of 100 first hits for queries without an answer score below"
            return f"{text}; {said} {' and, re-ranked, below '.join(cuts)}"
        return (
            f"{text}: this model does not know this text, and searches go by words; give another "
            "--model, or train one (docs/languages.md)"
        )
