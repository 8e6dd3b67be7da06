"""nDCG@10 of tables of words, as they begin and trained, beside BM25.

    python -m research.benchmarks.tables --data COLLECTIONS LANGUAGES --model embedded:smollm2-135m

As `revela fit --static` makes them, of all documents of each collection; whole documents, fused by
score. Rows are kept in ``--out``, by collection and seed.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import fmean

from research.benchmarks.options import RESEARCH, collections_parser, folder_of, names_in
from revela.evaluation.evaluate import Collection, load_collection, outcomes
from revela.files import atomic_write
from revela.index.language import Analyzer
from revela.model_files import resolve
from revela.retriever.static_from_words import build_word_table
from revela.training.train_table import texts_of, train_table
from revela.types import Document

COLUMNS = ["BM25", "begun", "+ BM25", "trained", "+ BM25"]


def scores_of(collection: Collection, model: Path, seed: int) -> dict[str, float]:
    """nDCG@10 of both tables, alone and fused, and what they take."""
    documents = [
        Document(name, text)
        for name, text in zip(collection.document_ids, collection.documents, strict=True)
    ]
    begun = time.perf_counter(), time.process_time()
    texts = texts_of(documents)
    table = build_word_table(model, texts, Analyzer(collection.bm25.terms.language))
    made = time.perf_counter()
    trained = train_table(table, texts, seed=seed)
    done = time.perf_counter(), time.process_time()
    encoders = {"begun": table.encoder(), "trained": trained.encoder()}
    found = {
        name: outcome.means()["ndcg@10"] for name, outcome in outcomes(collection, encoders).items()
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
    add("--out", type=Path, default=RESEARCH / "out" / "tables")
    arguments = parser.parse_args()
    model = resolve(arguments.model)
    print(f"| | {' | '.join(COLUMNS)} | words | seconds |\n" + "|---" * 8 + "|")
    rows = []
    for name in names_in(arguments.data, arguments.only):
        for seed in arguments.seeds:
            kept = arguments.out / model.name / f"{name}-{seed}.json"
            if not kept.is_file():
                collection = load_collection(folder_of(name, arguments.data))
                scores = scores_of(collection, model, seed)
                with atomic_write(kept) as temporary:
                    temporary.write_text(json.dumps(scores))
            scores = json.loads(kept.read_text())
            ways = ("BM25", "begun", "begun + BM25", "trained", "trained + BM25")
            rows.append([scores[way] for way in ways])
            cells = " | ".join(f"{score:.3f}" for score in rows[-1])
            size = f"{scores['words']:,.0f} | {scores['seconds']:.0f}"
            print(f"| {name} | {cells} | {size} |", flush=True)
    means = " | ".join(f"{fmean(column):.4f}" for column in zip(*rows, strict=True))
    print(f"| mean | {means} | | |")


if __name__ == "__main__":
    main()
