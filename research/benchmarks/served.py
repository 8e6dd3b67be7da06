"""nDCG@10 of what `revela index` makes and `revela search` finds: the README's table.

    python -m research.benchmarks.served --data COLLECTIONS LANGUAGES

`revela index` reads each collection's corpus.jsonl with its default settings (chunks of 120 words,
MiniLM for English and multilingual-e5-small for other languages) and --keep-tokens; all judged
queries, or ``--queries`` evenly spaced ones, are searched for ten documents, by each way of `revela
search`. Indices and scores are kept in ``--out``, so that the same command resumes a run; remove
that folder to measure anew.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm import tqdm

from research.benchmarks.options import (
    OUT,
    collections_in,
    collections_parser,
    corpus_of,
    kept_json,
    print_cells,
    print_header,
)
from revela.cli.index import index as make_index
from revela.evaluation.collection import load_collection
from revela.evaluation.metrics import mean_scores, per_query
from revela.searching.index import Index
from revela.searching.manifest import Indexing
from revela.searching.state import read_info
from revela.types import evenly_spaced

K = 10
WAYS: dict[str, dict[str, Any]] = {
    "BM25": dict(mode="lexical"),
    "vectors": dict(mode="dense"),
    "RRF": dict(fusion="rank"),
    "fused by score": {},
    "+ late interaction": dict(rerank="late-interaction"),
}
# Collections that constants were chosen on (research/notebook.md).
RERANKING = {
    *("scifact", "cranfield", "med", "npl_vaswani", "squad_dev", "pubmedqa_l"),
    *("conala", "cosqa", "mbpp"),
}
FUSION = {
    *RERANKING,
    *("xquad_en", "xquad_de", "xquad_tr", "xquad_ru", "xquad_ar", "xquad_th", "xquad_zh"),
    *("tydi_fi", "tydi_ru", "tydi_ar", "tydi_ko", "thquad_tr", "piaf_fr", "iapp_th"),
    *("jsquad_ja", "cmrc2018_zh"),
}
LEGEND = "* constants of the fusion were chosen on it; ** those of the re-ranking too"


def scores_of(folder: Path, model: str | None, out: Path, queries: int) -> dict[str, float]:
    """nDCG@10 of every way to search a collection."""
    index, collection = index_of(folder, model, out / "index"), load_collection(folder)
    chosen = evenly_spaced(len(collection.queries), queries or len(collection.queries))
    vectors = index.encoder.encode_queries([collection.queries[i] for i in chosen])
    runs: dict[str, dict[str, dict[str, float]]] = {way: {} for way in WAYS}
    for i, vector in zip(tqdm(chosen, folder.name, unit="query"), vectors, strict=True):
        name, query = collection.query_ids[i], collection.queries[i]
        itself = {name} & collection.among_documents
        for way, settings in WAYS.items():
            hits = index.search(query, K + len(itself), encoded=vector, **settings)
            found = [hit.id for hit in hits if hit.id not in itself][:K]
            runs[way][name] = {document: -place for place, document in enumerate(found)}
    qrels = {name: collection.qrels[name] for name in runs["BM25"]}
    return {way: mean_scores(per_query(qrels, run))["ndcg@10"] for way, run in runs.items()}


def index_of(folder: Path, model: str | None, out: Path) -> Index:
    """The index of a collection, kept or made now."""
    if not ((info := read_info(out)) and info.finished):
        with redirect_stdout(sys.stderr):
            make_index(
                [corpus_of(folder)], out=out, model=model, settings=Indexing(keep_tokens=True)
            )
    return Index.open(out, model)


def print_row(title: str, scores: Sequence[Mapping[str, float]]) -> None:
    """Print the mean of these scores."""
    print_cells(title, (fmean(each[way] for each in scores) for way in WAYS))


def main() -> None:
    parser = collections_parser(__doc__)
    add = parser.add_argument
    add("--model", help="as for `revela index`; by default chosen by each collection's language")
    add("--queries", type=int, default=0, help="of a collection, at most; 0: all")
    add("--out", type=Path, default=OUT / "served", help="where indices and scores are kept")
    arguments = parser.parse_args()
    kept = arguments.out / (arguments.model or "default").split(":")[-1].replace("/", "-")
    print_header(list(WAYS))
    for data in arguments.data:
        rows = []
        for name, folder in collections_in([data], arguments.only).items():
            file = kept / name / f"scores-{arguments.queries}.json"
            make = partial(scores_of, folder, arguments.model, kept / name, arguments.queries)
            rows.append(kept_json(file, make))
            print_row(name + r"\*" * ((name in FUSION) + (name in RERANKING)), rows[-1:])
        if len(rows) > 1:
            print_row(f"mean of {len(rows)}", rows)
    print(f"\n{LEGEND}".replace("*", r"\*"))


if __name__ == "__main__":
    main()
