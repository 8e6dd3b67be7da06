"""nDCG@10 of what one would use instead: txtai, and LanceDB with sentence-transformers.

    python -m research.benchmarks.alternatives --data COLLECTIONS LANGUAGES --queries 300

Each searches by words and by vectors at once, in its default way, by the vectors of the embedder
that revela takes by default (MiniLM for English, multilingual-e5-small for other languages) and of
revela's passages, as neither cuts documents; a document counts by its best passage.
`research.benchmarks.served` has the same of revela. txtai and faiss-cpu are for you to install; the
scores are kept in ``--out``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

import lancedb
import numpy as np
from lancedb.index import FTS

from research.benchmarks.options import (
    OUT,
    collections_in,
    collections_parser,
    corpus_of,
    kept_json,
    passages_of,
    print_cells,
    print_header,
)
from revela import Retriever
from revela.encoders.default_model import suited_model
from revela.evaluation.collection import load_collection
from revela.evaluation.metrics import mean_scores, per_query
from revela.text.load import read_corpus
from revela.types import evenly_spaced

PASSAGES = 100  # of which a query's ten documents are the best
Vectors = dict[str, np.ndarray]  # by text, of passages and queries
Found = list[list[int]]  # numbers of passages by query, best first


def by_txtai(passages: Sequence[str], queries: Sequence[str], vectors: Vectors, _: Path) -> Found:
    from txtai import Embeddings

    embeddings = Embeddings(
        method="external",
        transform=lambda texts: np.stack([vectors[t] for t in texts]),
        hybrid=True,
    )
    embeddings.index(passages)
    found = embeddings.batchsearch(queries, PASSAGES)
    return [[int(number) for number, _ in hits] for hits in found]


def by_lancedb(
    passages: Sequence[str], queries: Sequence[str], vectors: Vectors, out: Path
) -> Found:
    rows = [{"number": i, "text": t, "vector": vectors[t]} for i, t in enumerate(passages)]
    table = lancedb.connect(out).create_table("passages", rows)
    table.create_index("text", config=FTS())
    found = []
    for query in queries:
        search = table.search(query_type="hybrid").vector(vectors[query]).text(query)
        found.append([row["number"] for row in search.limit(PASSAGES).to_list()])
    return found


SYSTEMS: dict[str, Callable[[Sequence[str], Sequence[str], Vectors, Path], Found]] = {
    "txtai": by_txtai,
    "LanceDB": by_lancedb,
}


def scores_of(folder: Path, queries: int) -> dict[str, float]:
    """nDCG@10 of both systems on a collection."""
    collection = load_collection(folder)
    documents, _ = read_corpus([corpus_of(folder)], distinct=False, min_words=0)
    pieces, passages = passages_of(documents)
    chosen = evenly_spaced(len(collection.queries), queries or len(collection.queries))
    asked = [collection.queries[i] for i in chosen]
    encoder = Retriever(suited_model([document.text for document in documents])[0])
    texts = list(dict.fromkeys(passages))
    vectors = dict(zip(texts, encoder.encode_passages(texts), strict=True))
    vectors |= zip(asked, encoder.encode_queries(asked), strict=True)
    scores = {}
    for name, search in SYSTEMS.items():
        with tempfile.TemporaryDirectory() as out:
            found = search(passages, asked, vectors, Path(out))
        run = {}
        for i, numbers in zip(chosen, found, strict=True):
            query = collection.query_ids[i]
            ids = list(dict.fromkeys(documents[pieces[n].document].id for n in numbers))
            ids = [i for i in ids if i != query or query not in collection.among_documents]
            run[query] = {document: -float(place) for place, document in enumerate(ids[:10])}
        qrels = {query: collection.qrels[query] for query in run}
        scores[name] = mean_scores(per_query(qrels, run))["ndcg@10"]
    return scores


def main() -> None:
    parser = collections_parser(__doc__)
    parser.add_argument("--queries", type=int, default=0, help="of a collection; 0: all")
    parser.add_argument("--out", type=Path, default=OUT / "alternatives")
    arguments = parser.parse_args()
    print_header(list(SYSTEMS))
    for data in arguments.data:
        rows = []
        for name, folder in collections_in([data], arguments.only).items():
            file = arguments.out / name / f"scores-{arguments.queries}.json"
            rows.append(kept_json(file, partial(scores_of, folder, arguments.queries)))
            print_cells(name, [rows[-1][system] for system in SYSTEMS])
        if len(rows) > 1:
            print_cells(f"mean of {len(rows)}", [fmean(r[s] for r in rows) for s in SYSTEMS])


if __name__ == "__main__":
    main()
