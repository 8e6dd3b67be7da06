"""nDCG@10 of a fitted retriever's vectors cut to their first numbers, with and without rotation.

    taskset -c 1 python -m research.benchmarks.dimensions --data COLLECTIONS --only med cranfield

The start of a run (SmolLM2-135M's lower layers, fitted to the collection's raw text, not trained)
in fp32, texts cut to 256 tokens. The rotation to principal axes is orthogonal, so its transpose
undoes it. "bits": signs of all numbers, compared with the query's, as a binary index does.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from sentence_transformers.sentence_transformer.modules import Dense

from research.benchmarks.quality import UNTRAINED, corpus_of, save_untrained
from revela.evaluation.beir import load_collection, mean_outcomes
from revela.retriever.load import load_encoder
from revela.types import Encoder, Vectors

DIMENSIONS = (64, 128, 256, 576, 1152)


class Changed:
    """An encoder whose vectors are rotated, cut or reduced to signs; each text is encoded once."""

    def __init__(
        self,
        encoder: Encoder,
        known: dict[str, Vectors],
        turn: Vectors | None,
        dimensions: int,
        signs: bool = False,
    ) -> None:
        self.encoder, self.known, self.turn, self.dimensions, self.signs = (
            encoder,
            known,
            turn,
            dimensions,
            signs,
        )

    def encode_queries(self, texts: Sequence[str], progress: bool = False) -> Vectors:
        if "queries" not in self.known:
            self.known["queries"] = self.encoder.encode_queries(texts)
        return self._changed(self.known["queries"])

    def encode_passages(self, texts: Sequence[str], progress: bool = False) -> Vectors:
        if "passages" not in self.known:
            self.known["passages"] = self.encoder.encode_passages(texts)
        return self._changed(self.known["passages"])

    def _changed(self, vectors: Vectors) -> Vectors:
        turned = vectors if self.turn is None else vectors @ self.turn
        cut = np.sign(turned[:, : self.dimensions]) if self.signs else turned[:, : self.dimensions]
        return (cut / np.linalg.norm(cut, axis=1, keepdims=True)).astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--data", type=Path, required=True, help="folder of BEIR-layout collections"
    )
    parser.add_argument("--only", nargs="*", default=["med", "cranfield"], help="collections")
    arguments = parser.parse_args()
    print(
        "| collection | rotated | "
        + " | ".join(map(str, DIMENSIONS))
        + " | bits |\n"
        + "|---" * (len(DIMENSIONS) + 3)
        + "|"
    )
    for name in arguments.only:
        folder = arguments.data / name
        with tempfile.TemporaryDirectory() as scratch:
            save_untrained(
                next(iter(UNTRAINED.values())), corpus_of(folder), Path(scratch) / "model"
            )
            encoder = load_encoder(Path(scratch) / "model", "fp32", 256)
        rotation = (
            [m for m in encoder.model if isinstance(m, Dense)][-1].linear.weight.detach().numpy()
        )
        known: dict[str, Vectors] = {}
        for label, turn in (("no", rotation), ("yes", None)):
            systems = {str(n): Changed(encoder, known, turn, n) for n in DIMENSIONS}
            systems["bits"] = Changed(encoder, known, turn, DIMENSIONS[-1], signs=True)
            scores = mean_outcomes(load_collection(folder), systems)
            print(
                f"| {name} | {label} | "
                + " | ".join(f"{scores[system]['ndcg@10']:.3f}" for system in systems)
                + " |",
                flush=True,
            )


if __name__ == "__main__":
    main()
