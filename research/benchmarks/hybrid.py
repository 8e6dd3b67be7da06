"""nDCG@10 of dense, BM25, both fusions and re-ranking by tokens.

    python -m research.benchmarks.hybrid --data COLLECTIONS LANGUAGES --model embedded:minilm-l6
    python -m research.benchmarks.hybrid --data COLLECTIONS --model fitted
    python -m research.benchmarks.hybrid --data LANGUAGES --model fitted:google/gemma-3-270m

``--model fitted``: the lower layers of SmolLM2-135M, or of a named LM, fitted to each collection's
raw text; ``table``: a table of its words. Texts are cut to 256 tokens. Vectors, and the signs of
the token vectors, are kept in ``--cache`` and computed once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from research.benchmarks.options import (
    OUT,
    collections_in,
    collections_parser,
    corpus_of,
    print_cells,
    print_header,
)
from revela.encoders.base import Encoded, Features, TextEncoder
from revela.encoders.load import load_encoder, resolve
from revela.evaluation.collection import Collection, load_collection
from revela.evaluation.evaluate import outcomes
from revela.evaluation.metrics import mean_scores
from revela.ranking.late_interaction import encode_packed
from revela.training.fit import fit
from revela.training.recipe import Recipe
from revela.training.retriever.module import RetrieverEncoder
from revela.types import QueryTokens, Role, Vectors

SMOL = "embedded:smollm2-135m"
MAX_TOKENS = 256


class Kept(TextEncoder):
    """An encoder that keeps the vectors of a collection in a file."""

    def __init__(
        self,
        encoder: RetrieverEncoder,
        file: Path,
        documents: Sequence[str],
        queries: Sequence[str],
        tokens: bool,
    ) -> None:
        self.encoder, self.documents = encoder, documents
        if not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            passages, packed = (
                encode_packed(encoder, documents)
                if tokens
                else (encoder.encode_passages(documents), [])
            )
            ends = np.cumsum([0, *map(len, packed)])
            bits = np.frombuffer(b"".join(packed), np.uint8)
            np.savez(
                file,
                passages=passages,
                queries=encoder.encode_queries(queries),
                ends=ends,
                bits=bits,
            )
        found = np.load(file)
        self.passages, self.queries, self.ends, self.bits = (
            found[name] for name in ("passages", "queries", "ends", "bits")
        )
        self.given, self.collection_queries = 0, queries
        self.words_to_vectors = encoder.words_to_vectors

    def encode_batch(self, features: Features, role: Role, with_tokens: bool) -> Encoded:
        return self.encoder.encode_batch(features, role, with_tokens)

    def encode_queries(self, texts: Sequence[str], progress: bool = False) -> Vectors:
        is_whole = texts is self.collection_queries
        return self.queries if is_whole else self.encoder.encode_queries(texts)

    def encode_passages(self, texts: Sequence[str], progress: bool = False) -> Vectors:
        return self.passages if texts is self.documents else self.encoder.encode_passages(texts)

    def encode_with_tokens(
        self, texts: Sequence[str], progress: bool = False
    ) -> tuple[Vectors, list[Vectors]]:
        """The collection's next documents in order; tokens are given by their signs."""
        part = slice(self.given, self.given + len(texts))
        self.given = part.stop
        width = 8 * -(-self.encoder.query_tokens(["a"])[0].tokens.shape[1] // 8)
        packed = [
            self.bits[first:past]
            for first, past in zip(self.ends[part], self.ends[1:][part], strict=True)
        ]
        signs = [np.unpackbits(bits).reshape(-1, width) * np.float32(2) - 1 for bits in packed]
        return self.passages[part], signs

    def query_tokens(self, queries: Sequence[str]) -> list[QueryTokens]:
        return self.encoder.query_tokens(queries)


def options() -> argparse.Namespace:
    parser = collections_parser(__doc__, model="embedded:minilm-l6")
    add = parser.add_argument
    add("--cache", type=Path, default=OUT / "hybrid", help="where vectors are kept")
    add("--no-tokens", action="store_true", help="do not re-rank")
    add("--steps", type=int, help="of training the half for words of a fitted model, as revela fit")
    return parser.parse_args()


def kept_of(data: Path, collection: Collection, arguments: argparse.Namespace) -> Kept:
    """The vectors of one collection, from the cache or computed now."""
    folder = arguments.cache / data.name
    how, _, lm = arguments.model.partition(":")
    if how in ("fitted", "table"):
        label = "-".join([how, *([Path(lm).name] if lm else [])])
        label += "" if arguments.steps is None else f"-{arguments.steps}-steps"
        model = folder / label
        if not model.exists():
            static = how == "table"
            length = {} if static else {"max_tokens": MAX_TOKENS}
            recipe = Recipe().replace(model=lm or SMOL, **length)
            fit([corpus_of(data)], model, recipe, static=static, steps=arguments.steps)
    else:
        model, label = resolve(arguments.model), arguments.model.split(":")[-1].replace("/", "-")
    encoder = load_encoder(model, "auto", MAX_TOKENS)
    file = folder / f"{label}.npz"
    texts = collection.documents, collection.queries
    return Kept(encoder, file, *texts, tokens=not arguments.no_tokens)


def main() -> None:
    arguments = options()
    columns = {"dense": "it", "RRF": "it + BM25 (RRF)", "by score": "it + BM25"}
    if not arguments.no_tokens:
        columns["+ late interaction"] = "it + BM25 + late interaction"
    titles = ["BM25", *columns, "by score over RRF", "over the better side"]
    print_header(titles)
    rows = []
    for name, folder in collections_in(arguments.data, arguments.only).items():
        collection = load_collection(folder)
        kept = kept_of(folder, collection, arguments)
        rerank = "none" if arguments.no_tokens else "late-interaction"
        found = outcomes(collection, {"it": kept}, rerank=rerank)
        bm25 = mean_scores(found["BM25"])["ndcg@10"]
        scores = [mean_scores(found[system])["ndcg@10"] for system in columns.values()]
        dense, by_rank, by_score, *_ = scores
        rows.append([bm25, *scores, by_score - by_rank, by_score - max(bm25, dense)])
        print_cells(name, rows[-1])
    print_cells("mean", np.mean(rows, axis=0), 4)
    print_cells("least", np.min(rows, axis=0))


if __name__ == "__main__":
    main()
