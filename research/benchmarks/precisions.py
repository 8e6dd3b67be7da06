"""What bf16 and int8 cost: nDCG@10 of the vectors alone, and cosines to those in fp32.

    python -m research.benchmarks.precisions --data COLLECTIONS LANGUAGES --model embedded:e5-small

Of each collection, ``--queries`` evenly spaced ones are searched in the documents judged for them
and ``--documents`` others.
"""

from __future__ import annotations

from statistics import fmean
from typing import get_args

from research.benchmarks.options import (
    collections_in,
    collections_parser,
    part_of,
    print_cells,
    print_header,
)
from revela.encoders.load import load_encoder, resolve
from revela.evaluation.collection import load_collection
from revela.evaluation.evaluate import by_id, without_themselves
from revela.evaluation.metrics import mean_scores, per_query
from revela.types import Precision

TITLES = ("fp32", "bf16", "int8", "cosine of bf16", "cosine of int8", "least cosine of int8")
assert {*TITLES[:3]} == {*get_args(Precision)} - {"auto"}


def main() -> None:
    parser = collections_parser(__doc__, model="embedded:minilm-l6")
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--documents", type=int, default=500)
    arguments = parser.parse_args()
    folder = resolve(arguments.model)
    precisions: tuple[Precision, ...] = ("fp32", "bf16", "int8")
    encoders = [load_encoder(folder, precision) for precision in precisions]
    print_header(TITLES)
    rows = []
    for name, path in collections_in(arguments.data, arguments.only).items():
        part = part_of(load_collection(path), arguments.documents, arguments.queries)
        scores, passages = [], []
        for encoder in encoders:
            passages.append(encoder.encode_passages(part.documents))
            nearest = part.nearest(encoder.encode_queries(part.queries), passages[-1])
            run = without_themselves(part, by_id(part, nearest))
            scores.append(mean_scores(per_query(part.qrels, run))["ndcg@10"])
        bf16, int8 = ((other * passages[0]).sum(axis=1) for other in passages[1:])
        rows.append([*scores, float(bf16.mean()), float(int8.mean()), float(int8.min())])
        print_cells(name, rows[-1], digits=4)
    print_cells("mean", [fmean(column) for column in zip(*rows, strict=True)], digits=4)


if __name__ == "__main__":
    main()
