"""The index beside plain LanceDB, and bm25s with numpy; and killed at random.

    python -m research.benchmarks.search scale --text TEXT/*.jsonl.gz --cache CACHE --out FOLDER
    python -m research.benchmarks.search kill --out FOLDER
    python -m research.benchmarks.search rerank --collection COLLECTIONS/scifact

``scale``: a million chunks of real text with made vectors: MiniLM's of some thousand real chunks,
each moved many times towards the difference of two others (.3 to .7 of it, cosine about .9), so
that they keep that model's clusters and directions. They do not belong to the text beside them.
Queries are held-out real chunks: their own vectors, and their first words. Each part is a process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from research.benchmarks.options import RESEARCH, parser_of
from revela.encoders.base import Encoded, Features, TextEncoder
from revela.evaluation.collection import load_collection
from revela.files import bytes_of
from revela.ranking.bm25 import BM25
from revela.ranking.exact import top_k
from revela.ranking.fusion import DEPTH, reciprocal_rank_fusion
from revela.searching.index import Index
from revela.searching.manifest import Indexing, Info
from revela.searching.rows import metadata_columns
from revela.text.chunk import chunk
from revela.text.load import read_corpus
from revela.text.spool import arrow_list
from revela.types import Document, Role, Vectors

MODEL, CHUNK_WORDS, QUERIES = "embedded:minilm-l6", 48, 300


def cached(path: Path, make: Callable[[], Vectors]) -> Vectors:
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, make())
    return np.load(path)


def encoder(max_tokens: int):
    from revela.encoders.load import load_encoder, resolve

    return load_encoder(resolve(MODEL), "auto", max_tokens)


class Known(TextEncoder):
    """An encoder of precomputed vectors, by text."""

    def __init__(self, texts: Sequence[str], vectors: Vectors) -> None:
        self.vectors = dict(zip(texts, vectors, strict=True)) | {".": vectors[0]}

    def encode_batch(self, features: Features, role: Role, with_tokens: bool) -> Encoded:
        return Encoded(np.stack([self.vectors[text] for text in features["texts"]]))


def build(
    out: Path, documents: Sequence[Document], encoder, settings: Indexing, metadata=()
) -> Index:
    """An index of these documents, by an encoder that need not be a model's."""
    width = encoder.encode_passages(["."]).shape[1]
    info = Info(MODEL, "0", width, settings, metadata_columns(documents, metadata))
    index = Index.begin(out, info, encoder)
    index.add(documents)
    return index


# Re-ranking


def rerank(arguments: argparse.Namespace) -> None:
    """Milliseconds of a search, query encoding included, with and without re-ranking by tokens."""
    folder, model = load_collection(arguments.collection), encoder(256)
    documents = [
        Document(i, text) for i, text in zip(folder.document_ids, folder.documents, strict=True)
    ][: arguments.documents]
    out = arguments.out / "rerank"
    shutil.rmtree(out, ignore_errors=True)
    index = build(out, documents, model, Indexing(keep_tokens=True))
    rows: dict[str, list[float]] = {
        "hybrid": [],
        "hybrid, tokens that are kept": [],
        "hybrid, tokens made at query time": [],
    }
    for number, query in enumerate(folder.queries[:70]):
        for name, row in rows.items():
            if "made" in name and number >= 25:
                continue
            table = index.table
            settings = table.info.settings.replace(keep_tokens="made" not in name)
            table.info = replace(table.info, settings=settings)
            begun = time.perf_counter()
            index.search(query, 10, rerank="late-interaction" if "tokens" in name else None)
            row.append(1e3 * (time.perf_counter() - begun))
    stored = (row["tokens"] for row in index.table.lance.search().limit(10**6).to_list())
    size = sum(len(tokens) for tokens in stored if tokens is not None) / len(index)
    print(f"{len(index):,} chunks, {size:,.0f} bytes of tokens per chunk\n")
    print("| | p50, ms | p99, ms |\n|---|---|---|")
    for name, row in rows.items():
        print(f"| {name} | {np.percentile(row[5:], 50):.1f} | {np.percentile(row[5:], 99):.1f} |")


# Scale


def real_chunks(arguments: argparse.Namespace) -> list[str]:
    """A sample of chunks, the same every time."""
    documents, _ = read_corpus(arguments.text, distinct=False)
    rng = random.Random(0)
    rows = rng.sample(range(len(documents)), min(len(documents), arguments.base))
    texts = [
        rng.choice(chunk(documents[row], 0, CHUNK_WORDS)).text
        for row in rows
        if len(documents[row].text.split()) > 8
    ]
    return texts[: arguments.base]


class Made(TextEncoder):
    """Vectors without an encoder; ``seconds`` is the CPU time that making them took."""

    def __init__(self, base: Vectors) -> None:
        self.base, self.rng, self.seconds = base, np.random.default_rng(0), 0.0

    def encode_batch(self, features: Features, role: Role, with_tokens: bool) -> Encoded:
        began, texts = time.process_time(), features["texts"]
        one, two, three = (
            self.base[self.rng.integers(len(self.base), size=len(texts))] for _ in range(3)
        )
        towards = two - three
        towards /= np.maximum(np.linalg.norm(towards, axis=1, keepdims=True), 1e-6)
        made = one + self.rng.uniform(0.3, 0.7, size=(len(texts), 1)).astype(np.float32) * towards
        made /= np.linalg.norm(made, axis=1, keepdims=True)
        self.seconds += time.process_time() - began
        return Encoded(made)


def at_least(documents: Sequence[Document], chunks: int) -> Iterator[Document]:
    """Documents in random order until they have this many chunks."""
    order = np.random.default_rng(0).permutation(len(documents))
    count = 0
    for row in order:
        if count >= chunks:
            return
        document = documents[int(row)]
        count += len(chunk(document, 0, CHUNK_WORDS))
        yield Document(
            f"{row}", document.text, document.title, metadata={"year": 1990 + int(row) % 36}
        )


def prepare(arguments: argparse.Namespace) -> None:
    """Real chunks and their vectors, in the cache."""
    texts = arguments.cache / "chunks.json"
    if not texts.is_file():
        arguments.cache.mkdir(parents=True, exist_ok=True)
        texts.write_text(json.dumps(real_chunks(arguments)))
    cached(
        arguments.cache / "chunks.npy",
        lambda: encoder(64).encode_passages(json.loads(texts.read_text())[: arguments.base]),
    )


def scale(arguments: argparse.Namespace) -> None:
    prepare(arguments)
    for part in arguments.parts:
        command = [sys.executable, "-m", "research.benchmarks.search", part, *sys.argv[2:]]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        print(json.dumps({"part": part} | json.loads(done.stdout.splitlines()[-1])))


def held_out(arguments: argparse.Namespace) -> tuple[Vectors, list[str], Vectors]:
    """(base vectors, queries' words, queries' vectors)."""
    vectors = np.load(arguments.cache / "chunks.npy")
    texts = json.loads((arguments.cache / "chunks.json").read_text())[:QUERIES]
    words = [" ".join(text.split()[:8]) for text in texts]
    return vectors[QUERIES:], words, vectors[:QUERIES]


def clocked(work: Callable[[], object]) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return {"s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}


def latencies(search: Callable[[int], object]) -> dict[str, float]:
    """Wall and CPU milliseconds of a query, after twenty that warm the caches."""
    rows = [clocked(lambda row=row: search(row)) for row in range(QUERIES)][20:]
    return {
        f"{name}_p{q}_ms": round(float(np.percentile([row[key] * 1e3 for row in rows], q)), 1)
        for name, key in (("wall", "s"), ("cpu", "cpu_s"))
        for q in (50, 99)
    }


def peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def print_facts(**facts: object) -> None:
    print(json.dumps(facts | {"peak_gb": round(peak_gb(), 2)}))


def rows_of(folder: Path, columns: Sequence[str]) -> Iterator[object]:
    import lancedb

    query = lancedb.connect(folder).open_table("chunks").search().select(list(columns))
    yield from query.limit(10**9).to_batches(16384)


def exact_best(folder: Path, queries: Vectors, k: int) -> list[list[float]]:
    """The k greatest inner products of each query, by numpy."""
    best = np.full((len(queries), k), -2.0, np.float32)
    for batch in rows_of(folder, ["vector"]):
        vectors = batch.column("vector").flatten().to_numpy().reshape(-1, queries.shape[1])
        best = np.sort(np.concatenate([best, queries @ vectors.T], axis=1), axis=1)[:, ::-1][:, :k]
    return best.tolist()


def ours(arguments: argparse.Namespace) -> None:
    base, words, vectors = held_out(arguments)
    out, built, made = arguments.out / "ours", {}, Made(base)
    if not out.exists():
        corpus, _ = read_corpus(arguments.text, distinct=False)
        documents = arrow_list(Document, at_least(corpus, arguments.chunks))
        settings = Indexing(chunk_words=CHUNK_WORDS, vectors=arguments.vectors)
        facts = clocked(lambda: build(out, documents, made, settings, ["year"]))
        facts |= {"of_which_making_vectors": made.seconds, "peak_gb": peak_gb()}
        built = {"build": facts | {"documents": len(documents)}}
    index = Index.open(out, encoder=Known(words, vectors))
    modes = {
        m: latencies(lambda row, m=m: index.search(words[row], 10, m))
        for m in ("hybrid", "dense", "lexical")
    }
    filters = {"filtered, a quarter": "year >= 2017", "filtered, a 36th": "year = 2017"}
    modes |= {
        f: latencies(lambda row, w=w: index.search(words[row], 10, "hybrid", w))
        for f, w in filters.items()
    }
    exact = exact_best(out, vectors, 10)

    def recall(depth: int) -> float:
        nearest = ([*index.table.nearest(vector, depth).values()][:10] for vector in vectors)
        pairs = zip(nearest, exact, strict=True)
        hits = [[score >= best[-1] - 1e-6 for _, score in found] for found, best in pairs]
        return sum(map(sum, hits)) / (10 * len(hits))

    facts = dict(recall_hybrid=recall(DEPTH), recall_dense=recall(20))
    print_facts(
        chunks=len(index), folder_gb=round(bytes_of(out) / 1e9, 2), **facts, **modes, **built
    )


def plain(arguments: argparse.Namespace) -> None:
    """LanceDB with default indices and its own hybrid search, on the same rows."""
    import lancedb
    import pyarrow as pa
    from lancedb.index import FTS, IvfPq

    _, words, vectors = held_out(arguments)
    out = arguments.out / "plain"
    shutil.rmtree(out, ignore_errors=True)
    table = None

    def build() -> None:
        nonlocal table
        batches = rows_of(arguments.out / "ours", ["id", "passage", "vector"])
        first = next(batches)
        table = lancedb.connect(out).create_table("chunks", pa.Table.from_batches([first]))
        for batch in batches:
            table.add(pa.Table.from_batches([batch]))
        table.create_index("vector", config=IvfPq())
        table.create_index("passage", config=FTS())

    built = clocked(build)

    def search(row: int) -> list[dict[str, object]]:
        query = table.search(query_type="hybrid").vector(vectors[row]).text(words[row])
        return query.limit(10).to_list()

    exact = exact_best(out, vectors, 10)
    hits = []
    for vector, best in zip(vectors, exact, strict=True):
        rows = table.search(vector).limit(10).select(["vector"]).to_list()
        scores = np.array([row["vector"] for row in rows]) @ vector
        hits.append((scores >= best[-1] - 1e-6).sum() / 10)
    facts = dict(recall=float(np.mean(hits)), folder_gb=round(bytes_of(out) / 1e9, 2))
    print_facts(build=built, hybrid=latencies(search), **facts)


def numpy_and_bm25s(arguments: argparse.Namespace) -> None:
    """The exact baseline: everything in memory."""
    _, words, vectors = held_out(arguments)
    texts, parts = [], []

    def build() -> None:
        nonlocal lexical, passages
        for batch in rows_of(arguments.out / "ours", ["passage", "vector"]):
            texts.extend(batch.column("passage").to_pylist())
            numbers = batch.column("vector").flatten().to_numpy()
            parts.append(numbers.reshape(-1, vectors.shape[1]).copy())
        passages = np.concatenate(parts)
        parts.clear()
        lexical = BM25(texts)

    lexical, passages = BM25([]), vectors
    built = clocked(build)

    def search(row: int) -> dict[int, float]:
        near, _ = top_k(vectors[row : row + 1], passages, DEPTH)
        worded, _ = lexical.top_k([words[row]], DEPTH)
        return reciprocal_rank_fusion([near[0].tolist(), worded[0].tolist()])

    print_facts(build=built, hybrid=latencies(search), recall=1.0)


# Kill


def kill(arguments: argparse.Namespace) -> None:
    from tests.searching.killed_writer import kill_while_appending

    out = arguments.out / "killed"
    print(json.dumps(kill_while_appending(out, arguments.kills, seed=arguments.seed)))


def main() -> None:
    os.environ.setdefault("LANCEDB_LOG", "error")
    parts = {"ours": ours, "plain": plain, "numpy": numpy_and_bm25s}
    whats = {"scale": scale, "kill": kill, "rerank": rerank}
    whats |= parts
    parser = parser_of(__doc__)
    add, out = parser.add_argument, RESEARCH / "out"
    add("what", choices=list(whats))
    add("--collection", type=Path)
    add("--text", type=Path, nargs="+", default=[])
    add("--cache", type=Path, default=out / "search-cache")
    add("--out", type=Path, default=out / "search")
    add("--chunks", type=int, default=1_000_000)
    add("--base", type=int, default=20_000, help="real chunks that MiniLM encodes")
    add("--vectors", default=Indexing.vectors)
    add("--parts", nargs="+", default=list(parts), choices=list(parts))
    add("--kills", type=int, default=20)
    add("--documents", type=int, default=600, help="of the index that is re-ranked")
    add("--seed", type=int, default=0)
    arguments = parser.parse_args()
    whats[arguments.what](arguments)


if __name__ == "__main__":
    main()
