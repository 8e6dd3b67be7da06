"""Does ``--model auto`` choose what judged queries prefer?

    python -m research.benchmarks.choosing --data COLLECTIONS LANGUAGES
    python -m research.benchmarks.choosing --data LANGUAGES --only xquad_ru --models owner/name

For each collection the choice is made of its documents alone; then the judged queries are asked,
of whole documents, of each candidate made of all of them. Rows are kept in ``--out``, by collection
and models. Regret: how much the chosen one's judged nDCG@10 with BM25 is below the best one's. Tau
is Kendall's, between label-free and judged scores with BM25; pairs are apart if the judged ones
differ by more than .02.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

from research.benchmarks.options import (
    RESEARCH,
    collections_parser,
    corpus_of,
    folder_of,
    names_in,
)
from revela.corpus.load import read_corpus
from revela.evaluation.choose_model import candidates_of, choose_model, encoder_of
from revela.evaluation.evaluate import load_collection, outcomes
from revela.evaluation.label_free import with_bm25
from revela.files import atomic_write
from revela.groups.dataset import TrainingSet
from revela.settings import Recipe

APART = 0.02  # nDCG@10 between two candidates whose order counts
Row = dict[str, Any]


def row_of(folder: Path, models: Sequence[str]) -> Row:
    """Label-free and judged scores of a collection, what was chosen, and what it took."""
    documents, _ = read_corpus([corpus_of(folder)], distinct=False, min_words=1)
    begun = time.process_time()
    choice = choose_model(documents, models)
    seconds = time.process_time() - begun
    collection, data = load_collection(folder), TrainingSet(Recipe(), documents)
    judged: dict[str, dict[str, float]] = {}
    for candidate in candidates_of(models):
        found = outcomes(collection, {"it": encoder_of(candidate, data)})
        ways = {"BM25": "BM25", "dense": "it", "fused": "it + BM25"}
        judged[str(candidate)] = {w: found[name].means()["ndcg@10"] for w, name in ways.items()}
    return {
        "chosen": str(choice.candidate),
        "why": choice.why,
        "seconds": seconds,
        "weights": dict(choice.weights),
        "judged": judged,
        "queries": {
            system: {task: scores_Q.tolist() for task, scores_Q in tasks.items()}
            for system, tasks in choice.queries.items()
        },
    }


def pairs_in_order(label_free: Sequence[float], judged: Sequence[float]) -> tuple[int, int]:
    """How many pairs, of those whose judged scores are ``APART``, are in the same order by both,
    and how many there are.
    """
    apart = [
        (i, j) for i, j in combinations(range(len(judged)), 2) if abs(judged[i] - judged[j]) > APART
    ]
    right = sum((label_free[i] - label_free[j]) * (judged[i] - judged[j]) > 0 for i, j in apart)
    return right, len(apart)


def mean_of(queries: dict[str, list[float]], fused: bool) -> float | None:
    """The mean over tasks of a system's scores, alone or with BM25; None if there are none."""
    tasks = [task for task in queries if (with_bm25(task) not in queries) == fused]
    return fmean(fmean(queries[task]) for task in tasks) if tasks else None


def print_row(name: str, row: Row) -> float:
    """Print the scores of BM25 and of each candidate; gives the regret."""
    judged = {"BM25": {"fused": next(iter(row["judged"].values()))["BM25"]}, **row["judged"]}
    regret = max(s["fused"] for s in row["judged"].values()) - judged[row["chosen"]]["fused"]
    for system, scores in judged.items():
        queries = row["queries"].get(system, {})
        dense = None if system == "BM25" else mean_of(queries, fused=False)
        values = (dense, mean_of(queries, fused=True), scores.get("dense"), scores["fused"])
        cells = " | ".join("" if value is None else f"{value:.3f}" for value in values)
        chosen = f"{regret:.3f}" if system == row["chosen"] else ""
        print(f"| {name} | {system} | {cells} | {chosen} |", flush=True)
    return regret


def main() -> None:
    from scipy.stats import kendalltau

    parser = collections_parser(__doc__)
    add = parser.add_argument
    add("--models", nargs="*", default=[], help="candidates beside the embedded models")
    add("--out", type=Path, default=RESEARCH / "out" / "choosing")
    arguments = parser.parse_args()
    print("| | | label-free: vectors | with BM25 | judged: vectors | with BM25 | chosen: regret |")
    print("|---|---|---|---|---|---|---|")
    regrets, taus, right, apart = list[float](), list[float](), 0, 0
    for name in names_in(arguments.data, arguments.only):
        models = "-".join(Path(model).name for model in ("embedded", *arguments.models))
        kept = arguments.out / models / f"{name}.json"
        if not kept.is_file():
            row = row_of(folder_of(name, arguments.data), arguments.models)
            with atomic_write(kept) as temporary:
                temporary.write_text(json.dumps(row))
        row = json.loads(kept.read_text())
        regrets.append(print_row(name, row))
        if row["queries"]:
            label_free = [mean_of(row["queries"][system], True) or 0.0 for system in row["judged"]]
            judged = [scores["fused"] for scores in row["judged"].values()]
            taus.append(float(kendalltau(label_free, judged).statistic))
            found = pairs_in_order(label_free, judged)
            right, apart = right + found[0], apart + found[1]
    print(f"regret {fmean(regrets):.4f} in the mean, {max(regrets):.3f} at most")
    if taus:
        print(
            f"tau {fmean(taus):.2f} in the mean; {right} of {apart} pairs that are apart in order"
        )


if __name__ == "__main__":
    main()
