"""Cost of scoring beside encoding: `revela eval MODEL --on FOLDER` less its encoder's time.

    python -m research.benchmarks.scoring --data COLLECTIONS/scifact --max-tokens 128

Processor seconds of one thread, so other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from revela.evaluation.beir import load_collection, outcomes
from revela.evaluation.significance import standings
from revela.retriever.load import load_encoder
from revela.types import Encoder, Vectors
from revela.weights import resolve


class Timed:
    """An encoder that counts the processor seconds it takes."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder, self.seconds = encoder, 0.0

    def encode_queries(self, texts: Sequence[str], progress: bool = False) -> Vectors:
        begun = time.process_time()
        vectors = self.encoder.encode_queries(texts, progress)
        self.seconds += time.process_time() - begun
        return vectors

    def encode_passages(self, texts: Sequence[str], progress: bool = False) -> Vectors:
        begun = time.process_time()
        vectors = self.encoder.encode_passages(texts, progress)
        self.seconds += time.process_time() - begun
        return vectors


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="embedded:minilm-l6")
    parser.add_argument("--max-tokens", type=int, default=128)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    encoder = Timed(load_encoder(resolve(arguments.model), "auto", arguments.max_tokens))
    encoder.encoder.encode_queries(["warm"])
    collection = load_collection(arguments.data)
    begun = time.process_time()
    rows = standings(outcomes(collection, {"model": encoder}), ["BM25"])
    seconds = time.process_time() - begun
    sizes = f"{len(collection.documents):,} documents, {len(collection.queries):,} queries"
    print(f"{sizes}, at most {arguments.max_tokens} tokens")
    share = f"{seconds:.1f} s: {seconds / encoder.seconds:.3f} times"
    print(f"encoding {encoder.seconds:.1f} s, with BM25, fusion, metrics and tests {share}")
    for row in rows:
        scores = (f"{metric} {value:.5f}" for metric, value in row.means.items())
        print(f"{row.system}: {', '.join(scores)}")


if __name__ == "__main__":
    main()
