"""What a contextual retriever's context is worth: nDCG@10 of its vectors alone, by whose documents
it reads.

    python -m research.benchmarks.contexts --models runs/* --on collections/{cranfield,conala} \
        --contexts own null other words --draws 2 --out FILE
    python -m research.benchmarks.contexts --table FILE --against registers
    python -m research.benchmarks.contexts --cost embedded:minilm-l6 --text FILE

A context is drawn from the collection's own documents (never its queries), as many as there are
slots or 4 or 8 of them; from those of one topic, the tenth that BM25 finds for one of them (stale:
what an index has that began so); of another collection's (the next one of --on); of those of every
collection of --on in turn (each); of random words of its documents; or of none (null). Retrievers
without slots are scored once.

--documents N scores large collections on N documents, those with judgements among them.

Scores of several draws, and of the runs of several seeds (folders that differ by a last -SEED),
are averaged per query before anything is tested; tests are paired, over all queries of all
collections alike, squad_dev's cut to 500.

--cost times a step of the pairs preset on 32 pairs of 48 words of --text, forward and backward,
with and without a context: median of five, by turns.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import random
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from revela.corpus.arrow_list import arrow_list
from revela.corpus.read import read_corpus
from revela.device import uses_bf16
from revela.evaluation.beir import Collection, load_collection
from revela.evaluation.metrics import per_query
from revela.evaluation.significance import margin, p_values
from revela.files import atomic_write
from revela.index.bm25 import BM25
from revela.index.exact import top_k
from revela.objectives.base import Parts
from revela.retriever.build import untrained_retriever
from revela.retriever.context import add_context, train_first_stage
from revela.retriever.encode import RetrieverEncoder, transformer_in_bf16, without_padding
from revela.retriever.load import load_encoder
from revela.retriever.lora import add_lora
from revela.settings import Recipe
from revela.training.loop import sides
from revela.training.train import build_objective
from revela.types import Chunk, Vectors
from revela.weights import find_weights, resolve

QUERIES = 500  # most of a collection
WHITENING, RIDGE = 0.25, 1e-2  # as in the label-free fit
CONTEXTS = ("own", "4", "8", "stale", "null", "other", "each", "words")
Scores = dict[str, dict[str, dict[str, dict[str, float]]]]
"""nDCG@10 by model, context and draw, collection, and query."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=[])
    parser.add_argument("--on", nargs="+", type=Path, default=[])
    parser.add_argument("--contexts", nargs="+", choices=CONTEXTS, default=["own"])
    parser.add_argument("--documents", type=int, default=0, help="most of a collection; 0: all")
    parser.add_argument("--draws", type=int, default=1, help="of the collection's own documents")
    parser.add_argument("--out", type=Path, default=Path("research/out/contexts.json"))
    parser.add_argument("--table", nargs="+", type=Path, help="print these results")
    parser.add_argument("--against", default="registers", help="test against rows of this name")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cost", default="", help="time steps from this model")
    parser.add_argument("--text", type=Path, help="a corpus, for --cost")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.cost:
        print_cost(arguments.cost, arguments.text)
        return
    if not arguments.table:
        measure(arguments)
    print_table(arguments.table or [arguments.out], arguments.against)


def measure(arguments: argparse.Namespace) -> None:
    """Score what is not in the file yet, and write it after each collection."""
    out: Path = arguments.out
    found: Scores = json.loads(out.read_text()) if out.is_file() else {}
    collections = [
        shortened(load_collection(folder), arguments.documents) for folder in arguments.on
    ]
    sources = {collection.name: collection.documents for collection in collections}
    each = [f"of {name}" for name in sources]
    contexts = [c for name in arguments.contexts for c in (each if name == "each" else [name])]
    for name in arguments.models:
        encoder = load_encoder(resolve(name), "auto")
        rows = found.setdefault(Path(name).name, {})
        wanted = contexts if encoder.slots else ["plain"]
        for i, collection in enumerate(collections):
            other = collections[(i + 1) % len(collections)].name
            for context in wanted:
                name_of = {"other": other}.get(context, context.removeprefix("of "))
                source = sources.get(name_of, collection.documents)
                for draw in range(arguments.draws if context == "own" else 1):
                    row = rows.setdefault(f"{context}-{draw}", {})
                    if collection.name in row:
                        continue
                    texts = drawn(context, source, encoder.slots, draw)
                    queries, passages = encoded(collection, encoder.with_context_of(texts))
                    row[collection.name] = ndcg(collection, queries, passages)
                    refit = rows.setdefault(f"{context} + refit-{draw}", {})
                    refit[collection.name] = ndcg(collection, *refitted(queries, passages))
                    print(
                        f"{Path(name).name} {context} {collection.name}: "
                        f"{statistics.mean(row[collection.name].values()):.3f}, refitted "
                        f"{statistics.mean(refit[collection.name].values()):.3f}; "
                        f"mean cosine of documents {mean_cosine(passages):.2f}",
                        flush=True,
                    )
                    with atomic_write(out) as temporary:
                        temporary.write_text(json.dumps(found))


def shortened(collection: Collection, most: int) -> Collection:
    """The collection with a sample of its queries if it has many, and ``most`` documents."""
    kept = collection.query_ids
    if len(kept) > QUERIES:
        kept = sorted(random.Random(0).sample(kept, QUERIES))
    texts = dict(zip(collection.query_ids, collection.queries, strict=True))
    qrels = {query: collection.qrels[query] for query in kept}
    documents = dict(zip(collection.document_ids, collection.documents, strict=True))
    if 0 < most < len(documents):
        judged = {document for row in qrels.values() for document in row}
        names = random.Random(0).sample(collection.document_ids, len(documents))
        names = sorted(names, key=lambda name: name not in judged)[:most]  # judged ones first
        documents = {name: documents[name] for name in names}
    return Collection(
        collection.name,
        list(documents),
        list(documents.values()),
        kept,
        [texts[query] for query in kept],
        qrels,
    )


def drawn(context: str, source: Sequence[str], slots: int, seed: int) -> list[str]:
    """The texts of a context, of a collection's documents."""
    rng = random.Random(f"{context}/{seed}")
    if context in ("null", "plain"):
        return []
    if context == "stale":
        nearest, _ = BM25(source).top_k([rng.choice(source)], max(slots, len(source) // 10))
        source = [source[i] for i in nearest[0]]
    texts = rng.sample(source, min(int(context) if context.isdigit() else slots, len(source)))
    if context == "words":
        words = [word for text in texts for word in text.split()]
        texts = [" ".join(rng.sample(words, min(40, len(words)))) for _ in range(slots)]
    return texts


def encoded(collection: Collection, encoder: RetrieverEncoder) -> tuple[Vectors, Vectors]:
    """Vectors (N, D) of the queries and of the documents."""
    return encoder.encode_queries(collection.queries), encoder.encode_passages(collection.documents)


def refitted(queries: Vectors, passages: Vectors) -> tuple[Vectors, Vectors]:
    """The vectors (x - mean) C^-p of unit length, of the collection's documents: what statistics of
    a corpus give in closed form, without reading a context (row 3)."""
    mean = passages.mean(axis=0)
    values, axes = np.linalg.eigh(np.cov((passages - mean).T.astype(np.float64)))
    scale = (values.clip(0) + RIDGE * values.mean()) ** -WHITENING
    weight = ((axes * scale) @ axes.T).astype(np.float32)
    fitted = [(vectors - mean) @ weight for vectors in (queries, passages)]
    q, p = (x / np.linalg.norm(x, axis=1, keepdims=True).clip(1e-9) for x in fitted)
    return q, p


def mean_cosine(vectors: Vectors) -> float:
    """Of two documents; near 1 where the vectors have become alike."""
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True).clip(1e-9)
    return float((unit.mean(axis=0) ** 2).sum())


def ndcg(collection: Collection, queries: Vectors, passages: Vectors) -> dict[str, float]:
    """nDCG@10 of each query."""
    nearest = top_k(queries, passages, 10)
    run = {
        query: {collection.document_ids[d]: float(s) for d, s in zip(row, values, strict=True)}
        for query, row, values in zip(collection.query_ids, *nearest, strict=True)
    }
    scores = per_query(collection.qrels, run)
    return {query: row["ndcg@10"] for query, row in scores.items()}


def print_cost(model: str, text: Path) -> None:
    """Seconds of a step with J = 0, 16, 64 and what they are of J = 0."""
    words = itertools.chain.from_iterable(d.text.split() for d in read_corpus([text])[0])
    texts = [" ".join(itertools.islice(words, 48)) for _ in range(64)]
    rows = arrow_list(Chunk, (Chunk(i, text, texts[i + 32]) for i, text in enumerate(texts[:32])))
    steps: dict[int, Callable[[], None]] = {}
    for slots in (0, 16, 64):
        recipe = Recipe.of("pairs", model=model, group_size=32, context=slots, context_from="batch")
        folder = find_weights(model, "")
        retriever = untrained_retriever(recipe, folder, [])
        first = add_context(recipe, retriever, texts[0])
        add_lora(retriever, 64, 64, 0.0)
        if first is not None:
            train_first_stage(first, 64, 64, 0.0)
        parts = Parts(
            recipe, retriever, [], rows, retriever.device, uses_bf16("auto", retriever.device),
            first_stage=first,
        )  # fmt: skip
        objective, collate = build_objective(parts)
        batch = collate(
            [{"row": i, "epoch": 0, "document": i, "text": r.text, "query": r.query}
             for i, r in enumerate(rows)]
        )  # fmt: skip
        tokens = sum(int(side["attention_mask"].sum()) for side in sides(batch))
        print(f"J = {slots}: {tokens / 64:.0f} tokens a text, those of the context among them")
        retriever.train()
        steps[slots] = functools.partial(step, objective, sides(batch), retriever, parts.bf16)
    seconds: dict[int, list[float]] = {slots: [] for slots in steps}
    for turn in range(6):
        for slots, take in steps.items():
            began = time.perf_counter()
            take()
            if turn:
                seconds[slots].append(time.perf_counter() - began)
    plain = statistics.median(seconds[0])
    for slots, times in seconds.items():
        middle = statistics.median(times)
        print(f"J = {slots}: {middle:.2f} s a step, x{middle / plain:.2f}")


def step(
    objective: torch.nn.Module, batch: list[dict[str, torch.Tensor]], model: Any, bf16: bool
) -> None:
    """Forward and backward, as the loop runs them."""
    with without_padding(model), transformer_in_bf16(model, bf16):
        objective([dict(side) for side in batch]).backward()


def print_table(files: Sequence[Path], against: str) -> None:
    """A row per arm and context: each collection's mean, the mean over all queries, the spread over
    draws, and the difference from the reference of the same kind of groups."""
    values: dict[str, dict[str, list[dict[str, float]]]] = defaultdict(lambda: defaultdict(list))
    for file in files:
        for model, rows in json.loads(file.read_text()).items():
            arm = re.sub(r"-\d+$", "", model)
            for context, scores in rows.items():
                kind = context.rpartition("-")[0]
                flat = {f"{c}/{q}": v for c, row in scores.items() for q, v in row.items()}
                values[arm][kind].append(flat)
    firsts = [next(iter(kinds.values()))[0] for kinds in values.values()]
    names = sorted({key.partition("/")[0] for first in firsts for key in first})
    print("| arm | context | runs | " + " | ".join(names) + " | queries | p | spread of runs |")
    print("|---|---|---|" + "---|" * (len(names) + 3))
    for arm, kinds in sorted(values.items()):
        for kind, runs in kinds.items():
            mean = {key: float(np.mean([run[key] for run in runs])) for key in runs[0]}
            by_name = [
                np.mean([v for key, v in mean.items() if key.partition("/")[0] == name] or [np.nan])
                for name in names
            ]
            spread = np.std([np.mean(list(run.values())) for run in runs])
            cells = " | ".join(f"{value:.3f}" for value in by_name)
            whole = f"{np.mean(list(mean.values())):.4f}"
            tested = compared(mean, reference(values, arm, against))
            print(f"| {arm} | {kind} | {len(runs)} | {cells} | {whole} | {tested} | {spread:.4f} |")


def reference(
    values: dict[str, dict[str, list[dict[str, float]]]], arm: str, against: str
) -> dict[str, float] | None:
    """Per query, the mean of the runs of the arm that differs by ``against`` in its last word."""
    kinds = values.get(f"{arm.rpartition('-')[0]}-{against}")
    if not kinds:
        return None
    runs = next(iter(kinds.values()))
    return {key: float(np.mean([run[key] for run in runs])) for key in runs[0]}


def compared(mean: dict[str, float], other: dict[str, float] | None) -> str:
    """The difference, its 95 % margin and p."""
    if other is None or mean.keys() != other.keys() or mean == other:
        return ""
    differences = np.array([mean[key] - other[key] for key in mean])
    p = float(p_values(differences[:, None])[0])
    return f"{differences.mean():+.4f} ±{margin(differences) or 0:.4f}, p {p:.3f}"


if __name__ == "__main__":
    main()
