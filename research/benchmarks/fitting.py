"""What ``revela.fit`` gives and takes: nDCG@10 of a model's vectors alone, before and after it is
fitted to each collection's documents.

    python -m research.benchmarks.fitting --models embedded:minilm-l6 embedded:smollm2-135m \
        --on collections/{scifact,cosqa,conala,cranfield} --documents 1000 --max-tokens 128

A language model's six lower layers are taken, with the prompts of ``revela train``. --documents N
scores large collections on N documents, those with judgements among them. fp32.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer

import revela
from research.benchmarks.contexts import shortened
from revela.evaluation.beir import load_collection, mean_outcomes
from revela.retriever.build import build_retriever
from revela.retriever.encode import RetrieverEncoder
from revela.settings import Retriever
from revela.weights import resolve

PARTS = {"token_weighting": 0.0, "whitening": 0.0, "lexical": 0.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", required=True)
    parser.add_argument("--on", nargs="+", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=0, help="most of a collection; 0: all")
    parser.add_argument("--max-tokens", type=int, default=512, help="where texts are cut")
    parser.add_argument("--without", nargs="*", choices=PARTS, default=[], help="parts of the fit")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    left_out = {name: PARTS[name] for name in arguments.without}
    print("| collection | model | BM25 | before | fitted |\n|---|---|---|---|---|", flush=True)
    for folder in arguments.on:
        collection = shortened(load_collection(folder), arguments.documents)
        for name in arguments.models:
            before, fitted = (untrained(name, arguments.max_tokens) for _ in range(2))
            revela.fit(fitted, collection.documents, **left_out)
            models = {"before": before, "fitted": fitted}
            encoders = {label: RetrieverEncoder(model, False) for label, model in models.items()}
            found = mean_outcomes(collection, encoders)
            scores = [f"{found[system]['ndcg@10']:.3f}" for system in ("BM25", *models)]
            print("|", " | ".join([collection.name, name, *scores]), "|", flush=True)


def untrained(name: str, max_tokens: int) -> SentenceTransformer:
    """An embedder, or a language model's lower layers as ``revela train`` takes them."""
    model = build_retriever(
        resolve(name),
        layers=Retriever.layers,
        pooling=Retriever.pooling,
        max_tokens=max_tokens,
        lower_case=False,
        query_prompt=Retriever.query_prompt,
        passage_prompt=Retriever.passage_prompt,
    )
    model.max_seq_length = min(model.max_seq_length, max_tokens)
    return model


if __name__ == "__main__":
    main()
