"""Ways to fuse BM25 and vectors without labels, on equal candidates, and how the rule was chosen.

    python -m research.benchmarks.fusion --data COLLECTIONS LANGUAGES

For each embedder (MiniLM; multilingual-e5-small; SmolLM2-135M's lower layers fitted to each
collection; its table of words): nDCG@10 of BM25, of the vectors and of each fusion of the 200 best
of both; on how many collections a fusion is more than .02 below the better side; and, for those
that give probabilities, their calibration error. Then what each form of the weight

    w = k max(least, W / V)^b

gives on collections, languages and embedders that it was not chosen on. Whole documents; vectors
are kept as by ``hybrid``. bayesian-bm25 (tried: 0.11) is for you to install.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from research.benchmarks.hybrid import Kept, kept_of
from research.benchmarks.options import (
    OUT,
    collections_in,
    collections_parser,
    print_cells,
    print_header,
)
from revela.evaluation.collection import Collection, load_collection
from revela.ranking.bm25 import K1, B, max_score
from revela.ranking.calibration import Calibration
from revela.ranking.exact import top_k
from revela.ranking.fusion import DEPTH, RRF_K, WORDS, above_chance
from revela.types import evenly_spaced

MODELS = {
    "MiniLM": "embedded:minilm-l6",
    "e5-small": "embedded:e5-small",
    "SmolLM2 fitted": "fitted",
    "its words": "table",
}
HARM, BINS = 0.02, 10
Numbers = NDArray[np.float64]
Form = tuple[float, float, float]  # k, b, least
FORMS = list(product((0.35, 0.5, 0.75, 1.0, 1.5), (1.0, 1.5, 2.0, 3.0), (0.0, 1.0)))
OURS: Form = (WORDS, 2.0, 1.0)


@dataclass(frozen=True)
class Query:
    """The candidates of a query: cosines and BM25 scores (0: no word), whether they are among the
    200 nearest, bayesian-bm25's probability; BM25's maximum, gains, and the ideal DCG.
    """

    cosines: Numbers
    bm25: Numbers
    is_near: NDArray[np.bool_]
    probability: Numbers
    maximum: float
    gains: Numbers
    ideal: float

    @cached_property
    def shares(self) -> Numbers:
        return self.bm25 / (self.maximum or 1.0)

    def ndcg(self, scores: Numbers) -> float:
        first = np.argsort(-scores, kind="stable")[:10]
        return float((self.gains[first] / np.log2(np.arange(len(first)) + 2)).sum() / self.ideal)

    def unanswered(self) -> Query:
        """The same without what is relevant."""
        rest = self.gains == 0
        kept = {name: getattr(self, name)[rest] for name in ("cosines", "bm25", "is_near", "gains")}
        return replace(self, **kept, probability=self.probability[rest])


@dataclass(frozen=True)
class Side:
    """A collection's queries, and what was measured without labels."""

    queries: list[Query]
    measured: Calibration

    def mean(self, fusion: Fusion) -> float:
        return float(np.mean([query.ndcg(fusion(query, self.measured)) for query in self.queries]))

    def calibration_error(
        self, fusion: Fusion, probability: Callable[[float, Calibration], float]
    ) -> float:
        """Expected calibration error of the first hits' probability, over all queries with and
        without what answers them; bins of equal width.
        """
        found = []
        for query in self.queries:
            for asked in (query, query.unanswered()):
                if len(asked.gains):
                    scores = fusion(asked, self.measured)
                    first = int(np.argmax(scores))
                    p = probability(float(scores[first]), self.measured)
                    found.append((p, asked.gains[first] > 0))
        p_N, right_N = np.array(found, float).T
        bins_N = np.minimum((p_N * BINS).astype(int), BINS - 1)
        errors = [
            abs(p_N[bins_N == b].sum() - right_N[bins_N == b].sum()) for b in np.unique(bins_N)
        ]
        return float(sum(errors) / len(p_N))


Fusion = Callable[[Query, Calibration], Numbers]


def scaled(scores: Numbers, least: float, most: float) -> Numbers:
    """Scores from 0 at ``least`` to 1 at ``most``."""
    return (scores - least) / (most - least) if most > least else np.zeros_like(scores)


def ranks(scores: Numbers, is_listed: NDArray[np.bool_]) -> Numbers:
    """1 / (60 + rank) of those that a list holds, else 0."""
    order = np.argsort(-np.where(is_listed, scores, -np.inf), kind="stable")
    rank = np.empty(len(scores))
    rank[order] = np.arange(1, len(scores) + 1)
    return np.where(is_listed, 1 / (RRF_K + rank), 0.0)


def rrf(query: Query, _: Calibration) -> Numbers:
    return ranks(query.cosines, query.is_near) + ranks(query.bm25, query.bm25 > 0)


def by_lists(
    query: Query, limits: Callable[[Numbers], tuple[float, float]], weight: float
) -> Numbers:
    """Each list's scores between its limits; a list without a candidate gives it 0."""
    sides = (query.cosines, query.is_near, weight), (query.bm25, query.bm25 > 0, 1 - weight)
    total = np.zeros(len(query.gains))
    for scores, is_listed, share in sides:
        if is_listed.any():
            total += share * np.where(is_listed, scaled(scores, *limits(scores[is_listed])), 0.0)
    return total


def dbsf(query: Query, _: Calibration) -> Numbers:
    """Distribution-based score fusion, as Qdrant has it: three deviations around the mean."""

    def limits(scores: Numbers) -> tuple[float, float]:
        mean, deviation = float(scores.mean()), float(scores.std())
        return mean - 3 * deviation, mean + 3 * deviation

    return by_lists(query, limits, 0.5)


def relative(query: Query, _: Calibration) -> Numbers:
    """Relative score fusion, with the vectors' share that is Weaviate's default."""
    return by_lists(query, lambda scores: (float(scores.min()), float(scores.max())), 0.75)


def halves(query: Query, _: Calibration) -> Numbers:
    """Half and half, each side from its least to its greatest candidate."""
    by_vectors, by_words = (
        scaled(side, side.min(), side.max()) for side in (query.cosines, query.bm25)
    )
    return by_vectors + by_words


def balanced(query: Query, _: Calibration) -> Numbers:
    from bayesian_bm25.fusion import balanced_log_odds_fusion

    return np.asarray(balanced_log_odds_fusion(query.probability, query.cosines))


def log_odds(query: Query, _: Calibration) -> Numbers:
    from bayesian_bm25.fusion import cosine_to_probability, log_odds_conjunction

    sides = np.stack([query.probability, np.asarray(cosine_to_probability(query.cosines))], axis=-1)
    return np.asarray(log_odds_conjunction(sides))


def ours(query: Query, measured: Calibration, form: Form = OURS) -> Numbers:
    k, b, least = form
    # Other than 1 where queries are docstrings, or the retriever was fitted to the text.
    ratio = max(least if measured.least == 1 else measured.least, measured.lexical_to_dense_ratio)
    w, chance = k * ratio**b, measured.chance
    return (above_chance(query.cosines, chance) + w * query.shares) / (1 + w)


FUSIONS: dict[str, Fusion] = {
    "BM25": lambda query, _: query.bm25,
    "vectors": lambda query, _: query.cosines,
    "RRF": rrf,
    "DBSF": dbsf,
    "relative, .75": relative,
    "halves": halves,
    "bayesian-bm25, balanced": balanced,
    "bayesian-bm25, log-odds": log_odds,
    "ours": ours,
}


def side_of(collection: Collection, kept: Kept, at_most: int) -> Side:
    """What is found on a collection, by words and by vectors."""
    from bayesian_bm25.scorer import BayesianBM25Scorer

    terms = collection.bm25.terms
    scorer = BayesianBM25Scorer(k1=K1, b=B, base_rate="auto")
    scorer.index([list(terms(text)) for text in collection.documents], show_progress=False)
    chosen = evenly_spaced(len(collection.queries), at_most or len(collection.queries))
    texts = [collection.queries[i] for i in chosen]
    near_QK, _ = top_k(kept.queries[list(chosen)], kept.passages, DEPTH)
    rows_QK, scores_QK = collection.bm25.top_k(texts, DEPTH)
    asked = (terms.of_query(text, likely=True) for text in texts)
    maxima = [max_score(collection.bm25.idf(own)) for own in asked]
    number = {name: i for i, name in enumerate(collection.document_ids)}
    queries = []
    for q, i in enumerate(chosen):
        words = {
            int(row): float(s) for row, s in zip(rows_QK[q], scores_QK[q], strict=True) if s > 0
        }
        near = near_QK[q].tolist()
        candidates = list(dict.fromkeys([*near, *words]))
        grades = collection.qrels[collection.query_ids[i]]
        relevant = {number[name]: grade for name, grade in grades.items() if grade > 0}
        best = sorted(relevant.values(), reverse=True)[:10]
        known = collection.bm25.known(terms(texts[q]))
        probabilities = scorer.get_probabilities(known) if known else None
        queries.append(
            Query(
                np.asarray(kept.passages[candidates] @ kept.queries[i], np.float64),
                np.array([words.get(d, 0.0) for d in candidates]),
                np.isin(candidates, near),
                np.zeros(len(candidates)) if probabilities is None else probabilities[candidates],
                maxima[q],
                np.array([relevant.get(d, 0) for d in candidates], float),
                float((np.array(best) / np.log2(np.arange(len(best)) + 2)).sum()),
            )
        )
    return Side(queries, collection.calibrate(kept, kept.passages, scored=True))


def print_scores(sides: Mapping[str, Side]) -> None:
    """nDCG@10 of each fusion, and what it does beside the better side."""
    print_header([*FUSIONS, "words find", "vectors find"])
    rows = []
    for name, side in sides.items():
        rows.append([side.mean(fusion) for fusion in FUSIONS.values()])
        measured = side.measured
        found = [count / max(1, measured.queries) for count in (measured.words, measured.vectors)]
        print_cells(name, [*rows[-1], *found])
    scores = np.array(rows)
    over = scores - scores[:, :2].max(axis=1, keepdims=True)
    print_cells("mean", [*scores.mean(axis=0), "", ""], 4)
    print_cells("least, to the better side", [*over.min(axis=0), "", ""])
    print_cells(f"more than {HARM} below it", [*(over < -HARM).sum(axis=0), "", ""])
    scored = [side for side in sides.values() if side.measured.confidences]
    ways = {
        "ours": (ours, lambda score, found: found.confidences["none"].of(score, 0.0)),
        "log-odds": (log_odds, lambda score, _: score),
    }
    for name, (fusion, probability) in ways.items():
        errors = [side.calibration_error(fusion, probability) for side in scored]
        print(f"calibration error, {name}: {np.mean(errors):.3f}, at most {max(errors):.3f}")


def print_left_out(of_form: Mapping[tuple[str, str], Numbers], group: str, part: Any) -> None:
    """The mean of the forms that were chosen without each group, on that group."""
    left, chosen = list[float](), list[Form]()
    for held in sorted({part(key) for key in of_form}):
        others = [scores for key, scores in of_form.items() if part(key) != held]
        best = int(np.mean(others, axis=0).argmax()) if others else FORMS.index(OURS)
        chosen.append(FORMS[best])
        left += [float(scores[best]) for key, scores in of_form.items() if part(key) == held]
    counts = {form: chosen.count(form) for form in dict.fromkeys(chosen)}
    which = ", ".join(f"{form} {n} times" for form, n in counts.items())
    print(f"without each {group}: {np.mean(left):.4f}; chosen (k, b, least): {which}")


def main() -> None:
    parser = collections_parser(__doc__)
    add = parser.add_argument
    add("--models", nargs="*", default=list(MODELS), help=", ".join(MODELS))
    add("--steps", type=int, help="of training the half for words of a fitted model, as revela fit")
    add("--queries", type=int, default=0, help="of a collection, at most; 0: all")
    add("--cache", type=Path, default=OUT / "hybrid")
    arguments = parser.parse_args()
    arguments.no_tokens = True
    of_form = dict[tuple[str, str], Numbers]()
    languages = set(collections_in(arguments.data[1:]))
    for label in arguments.models:
        arguments.model, sides = MODELS[label], dict[str, Side]()
        for name, folder in collections_in(arguments.data, arguments.only).items():
            collection = load_collection(folder)
            kept = kept_of(folder, collection, arguments)
            sides[name] = side_of(collection, kept, arguments.queries)
            scores = [sides[name].mean(lambda q, m, form=form: ours(q, m, form)) for form in FORMS]
            of_form[label, name] = np.array(scores)
        print(f"\n{label}\n")
        print_scores(sides)
    every = np.mean(list(of_form.values()), axis=0)
    best = int(every.argmax())
    print(f"\nthe rule: {every[FORMS.index(OURS)]:.4f}; the best form: {every[best]:.4f}")
    print_left_out(of_form, "embedder", lambda key: key[0])
    print_left_out(of_form, "collection", lambda key: key[1])
    print_left_out(of_form, "language", lambda key: language_of(key[1], languages))


def language_of(name: str, languages: set[str]) -> str:
    """Of a collection's name: xquad_ru is in Russian; others are in English."""
    return name.rpartition("_")[2] if name in languages else "en"


if __name__ == "__main__":
    main()
