"""What does a score say of a first hit? Judged questions, with and without an answer in the text.

    python -m research.benchmarks.confidence --data COLLECTIONS LANGUAGES

Of each collection at most ``DOCUMENTS`` documents and ``QUERIES`` judged questions, fused by score.
Each question is asked twice: of all documents, and of those that do not answer it. Printed are the
score below which nine of ten wrong first hits of the label-free test lie; the shares of questions
without an answer, and of right first hits, that score more; and the expected calibration error of
``Calibration.confidence`` over both kinds, in ten groups of equal size.
"""

from __future__ import annotations

from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from research.benchmarks.options import (
    collections_in,
    collections_parser,
    part_of,
    print_cells,
    print_header,
)
from revela.evaluation.collection import Collection, load_collection
from revela.index.calibration import SentenceTest
from revela.index.exact import rankings_of, top_k
from revela.index.fusion import DEPTH
from revela.index.search import MemorySnapshot, fuse
from revela.model_files import resolve
from revela.retriever.load import load_encoder
from revela.types import Encoder

DOCUMENTS, QUERIES, CHARACTERS, BINS = 1000, 250, 1500, 10
Scores = NDArray[np.float64]


def first_hits(part: Collection, snapshot: MemorySnapshot, encoder: Encoder) -> tuple[Scores, ...]:
    """Scores of first hits and whether they are right, and scores where no document answers."""
    vectors = encoder.encode_queries(part.queries)
    dense = rankings_of(*top_k(vectors, snapshot.vectors_ND, DEPTH))
    found, right, without = list[float](), list[float](), list[float]()
    for i, name in enumerate(part.query_ids):
        grades = part.qrels[name]
        relevant = {row for row, d in enumerate(part.document_ids) if grades.get(d, 0) > 0}
        for left_out in (set[int](), relevant):
            sides = (
                {row: score for row, score in side[i].items() if row not in left_out}
                for side in (dense, part.lexical)
            )
            fused = fuse(snapshot, part.queries[i], vectors[i], *sides)
            row, score = next(iter(fused.items()))
            if left_out:
                without.append(score)
            else:
                found.append(score)
                right.append(float(row in relevant))
    return np.array(found), np.array(right), np.array(without)


def calibration_error(predicted: Scores, right: Scores) -> float:
    """The mean distance between predicted and observed shares, over ``BINS`` groups."""
    groups = np.array_split(np.argsort(predicted, kind="stable"), BINS)
    apart = (len(g) * abs(predicted[g].mean() - right[g].mean()) for g in groups)
    return float(sum(apart) / len(right))


def main() -> None:
    parser = collections_parser(__doc__, model="embedded:minilm-l6")
    arguments = parser.parse_args()
    encoder = load_encoder(resolve(arguments.model), "auto")
    print_header(["nine of ten below", "no answer, above", "right, above", "calibration error"])
    rows = []
    for name, folder in collections_in(arguments.data, arguments.only).items():
        part = part_of(load_collection(folder), DOCUMENTS, QUERIES, CHARACTERS)
        vectors = encoder.encode_passages(part.documents)
        test = SentenceTest(part.documents, part.bm25.terms.language)
        measured = test(encoder, vectors, scored=True)
        if "hybrid" not in measured.scores:
            print_cells(name, ["too few wrong first hits", "", "", ""])
            continue
        snapshot = MemorySnapshot(part.bm25, part.documents, vectors, measured.odds)
        found, right, without = first_hits(part, snapshot, encoder)
        half = measured.scores["hybrid"][0]
        scores = np.r_[found, without]
        confidences = np.array([measured.confidence(score, "hybrid") for score in scores])
        error = calibration_error(confidences, np.r_[right, np.zeros(len(without))])
        over = (without > half).mean(), (found[right > 0] > half).mean()
        rows.append((half, *map(float, over), error))
        print_cells(name, rows[-1], 2)
    print_cells("mean", map(fmean, zip(*rows, strict=True)), 2)


if __name__ == "__main__":
    main()
