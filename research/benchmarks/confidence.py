"""What does a score say of a first hit? Judged questions, with and without an answer in the text,
and questions of other collections.

    python -m research.benchmarks.confidence --data COLLECTIONS LANGUAGES

`revela index` makes an index of at most ``DOCUMENTS`` whole documents of each collection, with its
defaults (MiniLM for English and multilingual-e5-small for other languages), and ``QUERIES`` judged
questions are searched twice: in all documents, and in those that do not answer them; and
``FOREIGN`` questions of every other collection. Printed are, of questions without an answer, of
foreign ones and of right first hits, the shares of which `revela search` says "sure", and "probably
no answer"; the shares that score above what `revela index` names; the share of first hits that are
right; and the expected calibration error of ``Hit.confidence`` over own questions with and without
an answer, in ten groups of equal size. Indices are kept in ``--out``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import redirect_stdout
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from research.benchmarks.options import (
    OUT,
    collections_in,
    collections_parser,
    part_of,
    print_cells,
    print_header,
)
from revela.cli.index import index as make_index
from revela.evaluation.collection import Collection, load_collection
from revela.files import atomic_write
from revela.searching.filters import id_filter
from revela.searching.index import Index
from revela.searching.manifest import Indexing
from revela.searching.state import read_info
from revela.text.judgements import read_rows
from revela.types import Hits, evenly_spaced

DOCUMENTS, QUERIES, FOREIGN, BINS = 1000, 250, 10, 10
Numbers = NDArray[np.float64]


def index_of(folder: Path, part: Collection, model: str | None, out: Path, tokens: bool) -> Index:
    """The index of some documents of a collection, kept or made now."""
    if not ((info := read_info(out)) and info.finished):
        chosen, corpus = set(part.document_ids), out.parent / "corpus.jsonl"
        rows = read_rows(folder, "corpus.jsonl")
        lines = (f"{json.dumps(row)}\n" for name, row in rows.items() if name in chosen)
        with atomic_write(corpus) as temporary:
            temporary.write_text("".join(lines))
        with redirect_stdout(sys.stderr):
            make_index([corpus], out=out, model=model, settings=Indexing(keep_tokens=tokens))
    return Index.open(out, model, default_rerank="late-interaction" if tokens else None)


def first_hits(index: Index, part: Collection) -> tuple[list[Hits], list[bool], list[Hits]]:
    """The first hit of each question and whether it is right, and those where nothing answers."""
    found, right, without = list[Hits](), list[bool](), list[Hits]()
    by_tokens = index.options().rerank == "late-interaction"
    encode = index.encoder.query_tokens if by_tokens else index.encoder.encode_queries
    for name, query, read in zip(part.query_ids, part.queries, encode(part.queries), strict=True):
        relevant = [document for document, grade in part.qrels[name].items() if grade > 0]
        found.append(index.search(query, 1, encoded=read))
        right.append(found[-1][0].id in relevant)
        where = f"not {id_filter(relevant)}"
        if hits := index.search(query, 1, where=where, encoded=read):
            without.append(hits)
    return found, right, without


def foreign_hits(index: Index, parts: Iterable[Collection]) -> list[Hits]:
    """The first hit of some questions of each of these collections."""
    asked = [part.queries[i] for part in parts for i in evenly_spaced(len(part.queries), FOREIGN)]
    return [hits for hits in index.search_many(asked, k=1) if hits]


def calibration_error(predicted: Numbers, right: Numbers) -> float:
    """The mean distance between predicted and observed shares, over ``BINS`` groups."""
    groups = np.array_split(np.argsort(predicted, kind="stable"), BINS)
    apart = (len(g) * abs(predicted[g].mean() - right[g].mean()) for g in groups)
    return float(sum(apart) / len(right))


def main() -> None:
    parser = collections_parser(__doc__)
    add = parser.add_argument
    add("--model", help="as for `revela index`; by default chosen by each collection's language")
    add("--tokens", action="store_true", help="keep token vectors, and re-rank by them")
    add("--out", type=Path, default=OUT / "confidence", help="for indices")
    arguments = parser.parse_args()
    kinds = "no answer", "foreign", "right"
    said = [f"{kind}, {what}" for what in ("sure", "unlikely", "above") for kind in kinds]
    titles = [*said, "score", "right", "calibration error"]
    print_header(titles)
    rows, folders = [], collections_in(arguments.data, arguments.only)
    parts = {n: part_of(load_collection(f), DOCUMENTS, QUERIES) for n, f in folders.items()}
    for name, folder in folders.items():
        part = parts[name]
        place = arguments.out / name / "index"
        index = index_of(folder, part, arguments.model, place, arguments.tokens)
        # Where the text has too few sentences, it is only said whether it is about other things.
        how = "late-interaction" if arguments.tokens else "none"
        sure = index.calibration.confidences.get(how)
        cut = sure and sure.cut
        found, right, without = first_hits(index, part)
        error = None
        if cut is not None:
            confidence = np.array([hits[0].confidence for hits in (*found, *without)])
            error = calibration_error(confidence, np.r_[right, np.zeros(len(without))])
        foreign = foreign_hits(index, (other for n, other in parts.items() if n != name))
        firsts = [hits for hits, is_right in zip(found, right, strict=True) if is_right]
        asked = without, foreign, firsts
        shares: list[float | None] = [
            fmean(hits.answer in said for hits in of)
            for said in (["sure"], ["unlikely", "elsewhere"])
            for of in asked
        ]
        shares += [cut and fmean(hits[0].score > cut for hits in of) for of in asked]
        rows.append((*shares, cut, fmean(right), error))
        print_cells(name, ["" if cell is None else cell for cell in rows[-1]], 2)
    known = [row for row in rows if row[-1] is not None]
    print_cells("mean", map(fmean, zip(*known, strict=True)), 2)


if __name__ == "__main__":
    main()
