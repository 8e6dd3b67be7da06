"""nDCG@10 of tables of words, as they begin and trained, beside BM25.

    python -m research.benchmarks.tables --data COLLECTIONS LANGUAGES --model embedded:smollm2-135m

As `revela fit --static` makes them, of all documents of each collection; whole documents, fused by
score. Rows are kept in ``--out``, by collection and seed.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from statistics import fmean

from research.benchmarks.options import (
    OUT,
    collections_in,
    collections_parser,
    corpus_of,
    kept_json,
    print_cells,
    print_header,
)
from revela.encoders.load import resolve
from revela.evaluation.collection import load_collection
from revela.evaluation.evaluate import outcomes
from revela.evaluation.metrics import mean_scores
from revela.text.analyzer import Analyzer
from revela.text.load import read_corpus
from revela.training.retriever.static_from_words import build_word_table
from revela.training.word_table import Examples, train_table

COLUMNS = ["BM25", "begun", "+ BM25", "trained", "+ BM25"]


def scores_of(folder: Path, model: Path, seed: int) -> dict[str, float]:
    """nDCG@10 of both tables on a collection, alone and fused, with their sizes and times."""
    collection = load_collection(folder)
    documents, _ = read_corpus([corpus_of(folder)], distinct=False, min_words=1)
    begun = time.perf_counter(), time.process_time()
    examples = Examples.of(documents)
    table = build_word_table(model, examples.texts, Analyzer(collection.bm25.terms.language))
    made = time.perf_counter()
    trained = train_table(table, examples, seed=seed)
    done = time.perf_counter(), time.process_time()
    encoders = {"begun": table.encoder(), "trained": trained.encoder()}
    found = {
        name: mean_scores(scores)["ndcg@10"]
        for name, scores in outcomes(collection, encoders).items()
    }
    return found | {
        "words": float(len(table.stem_V)),
        "seconds to make": made - begun[0],
        "seconds": done[0] - begun[0],
        "processor seconds": done[1] - begun[1],
    }


def main() -> None:
    parser = collections_parser(__doc__, model="embedded:smollm2-135m")
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[0])
    add("--out", type=Path, default=OUT / "tables")
    arguments = parser.parse_args()
    model = resolve(arguments.model)
    print_header([*COLUMNS, "words", "seconds"])
    rows = []
    for name, folder in collections_in(arguments.data, arguments.only).items():
        for seed in arguments.seeds:
            kept = arguments.out / model.name / f"{name}-{seed}.json"
            scores = kept_json(kept, partial(scores_of, folder, model, seed))
            ways = ("BM25", "begun", "begun + BM25", "trained", "trained + BM25")
            rows.append([scores[way] for way in ways])
            size = f"{scores['words']:,.0f}", f"{scores['seconds']:.0f}"
            print_cells(name, [*rows[-1], *size])
    print_cells("mean", [*map(fmean, zip(*rows, strict=True)), "", ""], 4)


if __name__ == "__main__":
    main()
