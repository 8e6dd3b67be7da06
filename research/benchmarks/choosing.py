"""Does a test without labels rank retrievers as judged queries do?

    python -m research.benchmarks.choosing --data COLLECTIONS LANGUAGES

Systems: MiniLM; SmolLM2-135M at 2 and 6 layers, fitted, and at 2 as it is; the table of its words,
as it begins and trained; BM25; and the fusion of each with BM25. They are made of a sample of a
collection's documents without the held-out ones, are asked label-free queries about these
(evaluation/label_free.py), and then ``QUERIES`` judged ones of ``DOCUMENTS`` documents. Rows are
kept in ``--out``; what they say is printed: Kendall's tau with the judged nDCG@10, the share of
pairs in the right order whose judged scores differ by more than ``APART``, and what choosing by it
loses against the best (regret).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

from research.benchmarks.options import (
    OUT,
    collections_in,
    collections_parser,
    corpus_of,
    kept_json,
    part_of,
    print_header,
)
from revela.encoders.base import TextEncoder
from revela.encoders.load import resolve
from revela.evaluation.collection import load_collection
from revela.evaluation.evaluate import outcomes
from revela.evaluation.label_free import HeldOutCheck, tasks, with_bm25
from revela.evaluation.metrics import mean_scores
from revela.text.analyzer import detect
from revela.text.load import read_corpus, split_held_out
from revela.text.spool import arrow_list
from revela.training.rank_models import MIN_QUERIES, Candidate, encoder_of
from revela.training.recipe import Recipe
from revela.training.retriever.build import untrained_retriever
from revela.training.retriever.module import RetrieverEncoder
from revela.training.training_set import TrainingSet
from revela.training.word_table import tables
from revela.types import Document, evenly_spaced

LM, MINILM = "embedded:smollm2-135m", "embedded:minilm-l6"
SAMPLE, HELD_OUT, PASSAGES, ASKED = 400, 0.4, 250, 200  # of the test
DOCUMENTS, QUERIES = 300, 150  # judged
TOKENS, CHARACTERS = 128, 2000  # that are read of a text, and of a document
APART = 0.02  # nDCG@10 between two systems whose order counts
BM25 = "BM25"
Row = dict[str, Any]


def systems(data: TrainingSet) -> Iterator[tuple[str, TextEncoder]]:
    """Each retriever, made of the documents that are not held out."""
    both = data.documents, data.held_out
    yield "MiniLM", encoder_of(Candidate(MINILM, "embedder"), data.recipe, *both)
    language = data.recipe.corpus.language
    begun, trained = tables(resolve(LM), *both, language=language)
    yield "table begun", begun.encoder()
    yield "table", trained.encoder()
    for layers in (2, 6):
        recipe = data.recipe.replace(layers=layers)
        fitted = encoder_of(Candidate(LM, "fit"), recipe, *both)
        yield f"{layers} layers", fitted
    raw = untrained_retriever(data.recipe.replace(layers=2).retriever, resolve(LM), data.documents)
    yield "2 layers, raw", RetrieverEncoder(raw, True)


def row_of(folder: Path) -> Row:
    """Label-free scores of each query and judged means, by system."""
    documents, _ = read_corpus([corpus_of(folder)], distinct=False, min_words=1)
    some = (documents[i] for i in evenly_spaced(len(documents), SAMPLE))
    sample = arrow_list(Document, (replace(d, text=d.text[:CHARACTERS]) for d in some))
    language = detect([document.full_text for document in sample])
    recipe = Recipe().replace(language=language, max_tokens=TOKENS)
    data = TrainingSet(recipe, *split_held_out(sample, HELD_OUT, SAMPLE))
    held, words = data.held_out, recipe.corpus.chunk_words
    check = HeldOutCheck(tasks(held, words, ASKED, PASSAGES, 0), language)
    part = part_of(load_collection(folder), DOCUMENTS, QUERIES, CHARACTERS)
    free = {BM25: {task: list(s) for task, s in check.queries_of_bm25().items()}}
    judged, seconds = dict[str, float](), dict[str, float]()
    for name, encoder in systems(data):
        begun = time.process_time()
        for system, tasks_of in check.queries(encoder, name).items():
            free[system] = {task: list(scores_Q) for task, scores_Q in tasks_of.items()}
        found = outcomes(part, {name: encoder})
        judged |= {
            system: mean_scores(found[system])["ndcg@10"]
            for system in (BM25, name, with_bm25(name))
        }
        seconds[name] = time.process_time() - begun
    return {"free": free, "judged": judged, "seconds": seconds}


def pairs_in_order(label_free: Sequence[float], judged: Sequence[float]) -> tuple[int, int]:
    """The number of pairs with judged scores ``APART`` in the same order by both, and of all."""
    apart = [
        (i, j) for i, j in combinations(range(len(judged)), 2) if abs(judged[i] - judged[j]) > APART
    ]
    right = sum((label_free[i] - label_free[j]) * (judged[i] - judged[j]) > 0 for i, j in apart)
    return right, len(apart)


def mean_of(scores: Mapping[str, Sequence[float]], names: Sequence[str]) -> float:
    """The mean over the queries of all these tasks."""
    return fmean(score for name in names for score in scores.get(name, ()))


TASKS = "sibling", "title", "docstring"


def agreement(rows: Mapping[str, Row], among: str) -> None:
    """Print how well tests with ``MIN_QUERIES`` agree with judged scores of dense or fused systems,
    or all.
    """
    from scipy.stats import kendalltau

    taus, right, apart, regrets = list[float](), 0, 0, list[float]()
    for row in rows.values():
        if sum(len(row["free"][BM25].get(name, ())) for name in TASKS) < MIN_QUERIES:
            continue
        kept = [
            system
            for system in row["judged"]
            if among == "all" or system == BM25 or (BM25 in system) == (among == "fused")
        ]
        free = [mean_of(row["free"][system], TASKS) for system in kept]
        judged = [row["judged"][system] for system in kept]
        taus.append(float(kendalltau(free, judged).statistic))
        found = pairs_in_order(free, judged)
        right, apart = right + found[0], apart + found[1]
        regrets.append(max(judged) - judged[max(range(len(free)), key=free.__getitem__)])
    agree = f"{len(taus)} | {fmean(taus):.2f} | {right / apart:.2f} of {apart}"
    print(f"| {among} | {agree} | {fmean(regrets):.4f} | {max(regrets):.3f} |")


def main() -> None:
    parser = collections_parser(__doc__)
    parser.add_argument("--out", type=Path, default=OUT / "choosing")
    arguments = parser.parse_args()
    rows = dict[str, Row]()
    for name, folder in collections_in(arguments.data, arguments.only).items():
        row = rows[name] = kept_json(arguments.out / f"{name}.json", partial(row_of, folder))
        counts = {task: len(scores) for task, scores in row["free"][BM25].items()}
        print(name, counts, f"{sum(row['seconds'].values()):.0f} s", flush=True)
        for system, score in row["judged"].items():
            free = {task: round(fmean(s), 3) for task, s in row["free"][system].items()}
            print(f"    {score:.3f} {system} {free}", flush=True)
    print_header(["systems", "collections", "tau", "pairs in order", "regret, mean", "most"])
    for among in ("dense", "fused", "all"):
        agreement(rows, among)


if __name__ == "__main__":
    main()
