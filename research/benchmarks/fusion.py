"""The rule of the fusion, chosen by leaving out whole collections and whole languages.

    python -m research.benchmarks.fusion --data COLLECTIONS LANGUAGES

Two tables, for MiniLM and for SmolLM2-135M's lower layers fitted to each collection: nDCG@10 of
BM25, vectors, both fusions and fixed shares on each collection; and what each form of the weight

    w = c max(least, W / V)^b (g_words / g_vectors)^p

gives on collections that it was not chosen on. Vectors are kept as by ``hybrid``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path

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
from revela.evaluation.evaluate import DEPTH, Collection, load_collection
from revela.index.exact import top_k
from revela.index.fusion import DEPTH as FUSED
from revela.index.fusion import RRF_K, WEIGHT, contrast
from revela.index.manifest import PRIOR, Calibration

MODELS = {"MiniLM": "embedded:minilm-l6", "SmolLM2 fitted": "fitted"}
Numbers = NDArray[np.float64]
Form = tuple[float, float, float, float]  # c, b, p, least
FORMS = list(
    product((0.25, 0.35, 0.5, 0.7, 1.0), (0.0, 1.0, 1.5, 2.0, 3.0), (0.0, 0.5, 1.0), (0.0, 1.0))
)
FLOORS = [(WEIGHT, 2.0, 1.0, least) for least in (1.0, 1.5, 2.0, 2.5, 3.0, 4.0)]


@dataclass(frozen=True)
class Found:
    """The candidates of a query: cosines, shares of the best BM25, scores by rank, gains; the ideal
    DCG; g_words / g_vectors.
    """

    cosines: Numbers
    shares: Numbers
    by_rank: Numbers
    gains: Numbers
    ideal: float
    contrast: float

    def ndcg(self, scores: Numbers) -> float:
        first = np.argsort(-scores, kind="stable")[:10]
        return float((self.gains[first] / np.log2(np.arange(len(first)) + 2)).sum() / self.ideal)


@dataclass(frozen=True)
class Side:
    """A collection's queries, and what was measured without labels."""

    queries: list[Found]
    measured: Calibration

    def mean(self, score: Callable[[Found], Numbers]) -> float:
        return float(np.mean([query.ndcg(score(query)) for query in self.queries]))

    def form(self, c: float, b: float, p: float, least: float) -> float:
        ratio = max(least, (self.measured.words + PRIOR) / (self.measured.vectors + PRIOR))
        return self.mean(lambda q: q.cosines + c * ratio**b * q.contrast**p * q.shares)


def side_of(collection: Collection, kept: Kept) -> Side:
    """What was found on a collection, by words and by vectors."""
    near, _ = top_k(kept.queries, kept.passages, min(DEPTH, FUSED))
    number = {name: i for i, name in enumerate(collection.document_ids)}
    found = []
    for i, query in enumerate(collection.query_ids):
        words = collection.lexical[i]
        greatest = collection.bm25.max_scores([collection.queries[i]])[0]
        share_of = {d: float(score / greatest) for d, score in islice(words.items(), FUSED)}
        candidates = list(dict.fromkeys([*near[i].tolist(), *share_of]))
        places = [
            {d: r for r, d in enumerate(ranking, 1)} for ranking in (near[i].tolist(), share_of)
        ]
        cosines = kept.passages[candidates] @ kept.queries[i]
        relevant = {number[name]: grade for name, grade in collection.qrels[query].items()}
        best = sorted(relevant.values(), reverse=True)[:10]
        cosine_of = dict(zip(candidates, cosines.tolist(), strict=True))
        found.append(
            Found(
                cosines,
                np.array([share_of.get(d, 0.0) for d in candidates]),
                np.array([sum(1 / (RRF_K + p[d]) for p in places if d in p) for d in candidates]),
                np.array([relevant.get(d, 0) for d in candidates], float),
                float((np.array(best) / np.log2(np.arange(len(best)) + 2)).sum()),
                contrast(cosine_of, share_of),
            )
        )
    return Side(found, collection.calibrate(kept, kept.passages))


def language_of(name: str, languages: Sequence[str]) -> str:
    """Of a collection's name: xquad_ru is in Russian; others are in English."""
    return name.rpartition("_")[2] if name in languages else "en"


def print_scores(sides: dict[str, Side]) -> None:
    """nDCG@10 of each way to fuse."""
    ways: dict[str, Callable[[Side], float]] = {
        "BM25": lambda side: side.mean(lambda q: q.shares),
        "vectors": lambda side: side.mean(lambda q: q.cosines),
        "RRF": lambda side: side.mean(lambda q: q.by_rank),
        "a = .5": lambda side: side.mean(lambda q: q.cosines + q.shares),
        "by score": lambda side: side.form(WEIGHT, 2, 1, side.measured.least),
    }
    titles = [*ways, "over the better side", "words find", "vectors find"]
    print_header(titles)
    rows = []
    for name, side in sides.items():
        scores = [way(side) for way in ways.values()]
        rows.append([*scores, scores[-1] - max(scores[:2])])
        measured = side.measured
        found = [count / max(1, measured.queries) for count in (measured.words, measured.vectors)]
        print_cells(name, [*rows[-1], *found])
    print_cells("mean", [*np.mean(rows, axis=0), "", ""], 4)


def print_left_out(
    of_form: dict[str, Numbers],
    forms: Sequence[Form],
    ours: Form,
    group_of: Callable[[str], str],
) -> None:
    """The mean of the forms that were chosen without each group, on that group."""
    left, chosen = dict[str, float](), list[Form]()
    groups = sorted({group_of(name) for name in of_form})
    for group in groups:
        others = [scores for name, scores in of_form.items() if group_of(name) != group]
        best = int(np.mean(others, axis=0).argmax())
        chosen.append(forms[best])
        left |= {name: s[best] for name, s in of_form.items() if group_of(name) == group}
    every = np.mean(list(of_form.values()), axis=0)
    print(f"left out, one of {len(groups)} at a time: {np.mean(list(left.values())):.4f}")
    rule = every[forms.index(ours)]
    print(f"  the rule: {rule:.4f}; the best of {len(forms)} on all: {every.max():.4f}")
    counts = {form: chosen.count(form) for form in dict.fromkeys(chosen)}
    print(
        "  chosen (c, b, p, least):", ", ".join(f"{form} {n} times" for form, n in counts.items())
    )


def main() -> None:
    parser = collections_parser(__doc__)
    add = parser.add_argument
    add("--models", nargs="*", default=list(MODELS), help=", ".join(MODELS))
    add("--steps", type=int, help="of training the half for words of a fitted model, as revela fit")
    add("--cache", type=Path, default=OUT / "hybrid")
    arguments = parser.parse_args()
    arguments.no_tokens = True
    of_form: dict[str, list[Numbers]] = {}
    of_floor: dict[str, Numbers] = {}
    languages = list(collections_in(arguments.data[1:]))
    ways = (lambda name: name), (lambda name: language_of(name, languages))
    for label in arguments.models:
        arguments.model, sides = MODELS[label], dict[str, Side]()
        for name, folder in collections_in(arguments.data, arguments.only).items():
            collection = load_collection(folder)
            sides[name] = side_of(collection, kept_of(folder, collection, arguments))
            of_form.setdefault(name, []).append(np.array([sides[name].form(*f) for f in FORMS]))
            of_floor[name] = np.array([sides[name].form(*f) for f in FLOORS])
        print(f"\n{label}\n")
        print_scores(sides)
        print(f"\nthe rule with W / V at least {', '.join(f'{f[3]:g}' for f in FLOORS)}")
        for name, scores in of_floor.items():
            print_cells(name, scores)
        print_cells("mean", np.mean(list(of_floor.values()), axis=0), 4)
        least = max(side.measured.least for side in sides.values())
        for way in ways:
            print_left_out(of_floor, FLOORS, (WEIGHT, 2.0, 1.0, least), way)
    every = {name: np.mean(scores, axis=0) for name, scores in of_form.items()}
    print("\nforms, mean of the models")
    for way in ways:
        print_left_out(every, FORMS, (WEIGHT, 2.0, 1.0, 1.0), way)


if __name__ == "__main__":
    main()
