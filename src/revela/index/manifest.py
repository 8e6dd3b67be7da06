"""The manifest of an index, part of its state (state.py): model, settings, measurements, and
whether it is finished.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from revela.encoder.processor import has_bf16, has_gpu
from revela.encoder.prompts import Prompts
from revela.index.fusion import FusionRule
from revela.index.language import CORPUS_WORDS, Analyzer
from revela.settings import Indexing, Precision

MEASURED = 4  # version of how calibration is measured
OTHER = 0.5  # how much of the best other document's score counts against a hit
PRIOR = 5  # queries added to both sides' counts, so that few queries say little


def apart(score: float, other: float) -> float:
    """How far a hit stands out from the best other document. For a question without an answer, many
    passages score alike.
    """
    return score - OTHER * other


@dataclass(frozen=True)
class Calibration:
    """How often part of a sentence finds its document first, and how often a first hit with a
    certain score is right (calibration.py).

    ``least`` is the minimum of ``ratio``: 1, as sentences are no questions; 0 if the queries are
    docstrings; above 1 for a retriever that was fitted to the text (retriever/fit.py), as sentences
    overrate it.
    """

    queries: int = 0
    words: int = 0  # queries that BM25 answers
    vectors: int = 0  # queries that the vectors answer
    passages: int = 0  # in the index at that time
    least: float = 1.0
    chance: float = 0.0  # mean cosine of a query and a passage that does not answer it
    tokens: float = 0.0  # the same of token vectors, where they can be had
    version: int = MEASURED
    scores: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """(half, slope, cut) by search: "hybrid", and re-ranked by "tokens". ``cut`` is the score below
    which most first hits lie where nothing answers; the others are those of ``confidence``. None
    are measured where the text has few sentences, as in code.
    """

    def confidence(self, score: float, other: float, search: str) -> float | None:
        """Probability that a first hit is right, if the text answers half of all questions; None if
        that was not measured. A hit that scores 0 has confidence 0: it has no word of the question,
        and its vector is no nearer than any passage's.

        Args:
            score: the hit's score.
            other: the best score of another document.
            search: a key of ``scores``, measured or not; "" for other searches.
        """
        if search and score <= 0:
            return 0.0
        if search not in self.scores:
            return None
        half, slope, _ = self.scores[search]
        return 1 / (1 + math.exp(-max(-700.0, slope * (apart(score, other) - half))))

    def is_outdated(self, passages: int) -> bool:
        """Whether to measure again, as the text has doubled or the method has changed."""
        has_doubled = 2 * self.passages <= passages
        return passages > 0 and (has_doubled or self.version != MEASURED)

    @property
    def counted(self) -> float:
        """W / V, the ratio of passages found by words to passages found by vectors."""
        return (self.words + PRIOR) / (self.vectors + PRIOR)

    @property
    def ratio(self) -> float:
        """W / V as the fusion uses it: at least ``least``."""
        return max(self.least, self.counted)

    @property
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
            below = ", ".join(f"{cut:.2f} ({how})" for how, (_, _, cut) in self.scores.items())
            said = "where nothing answers, 97 of 100 first hits score below"
            few = "how sure a hit is cannot be told, as the text has too few sentences"
            return f"{text}; {said} {below}" if below else f"{text}; {few}"
        return (
            f"{text}: this embedder does not know this text, and searches go by words; give "
            "another --model, or train one (docs/languages.md)"
        )


@dataclass(frozen=True)
class Info:
    """The manifest of an index: model, settings and measurements."""

    model: str  # folder of the retriever
    fingerprint: str  # of that folder
    width: int  # of the stored vectors
    settings: Indexing
    columns: Mapping[str, str] = field(default_factory=dict)  # of metadata, and their Arrow types
    finished: bool = False  # the first documents are all in
    language: str = ""  # for ``Analyzer``; "": not found yet
    calibration: Calibration = field(default_factory=Calibration)
    precision: str = ""  # that the vectors were made in
    prompts: Prompts = field(default_factory=Prompts)  # that the vectors were made with

    def analyzer(self, cache_size: int = CORPUS_WORDS) -> Analyzer:
        """The analyzer that splits passages and queries into terms."""
        return Analyzer(self.language, cache_size)

    def precision_of(self, given: Precision) -> Precision:
        """The precision for queries and new documents: the given one. "auto" is that of the
        vectors, but fp32 instead of bf16 where bf16 is slow.
        """
        if given != "auto":
            return given
        if self.precision == "int8":
            return "int8"
        is_fast = self.precision != "fp32" and (has_bf16() or has_gpu())
        return "bf16" if is_fast else "fp32"

    def choices(self) -> Info:
        """The user's choices only, without measurements."""
        return replace(self, language="", calibration=Calibration())

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Info:
        content = json.loads(text)
        measured = content["calibration"]
        measured["scores"] = {how: tuple(found) for how, found in measured["scores"].items()}
        content["calibration"] = Calibration(**measured)
        content["settings"] = Indexing(**content["settings"])
        content["prompts"] = Prompts(*content["prompts"])
        return cls(**content)
