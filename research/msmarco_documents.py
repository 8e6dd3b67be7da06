"""Makes a folder in BEIR layout of MS MARCO documents v1, from its public files (each may be .gz),
for Dwell's third stage (train --pairs) and its moved passages (probe --move).

python -m research.msmarco_documents --documents msmarco-docs.tsv.gz
    --dev-queries msmarco-docdev-queries.tsv.gz --dev-qrels msmarco-docdev-qrels.tsv.gz
    --train-queries msmarco-doctrain-queries.tsv.gz --train-qrels msmarco-doctrain-qrels.tsv.gz
    --passages collection.tsv --passage-qrels qrels.dev.tsv --out MSMARCO

The dev queries become qrels/test.tsv, the training queries qrels/train.tsv. passages.jsonl has the
judged passage of each dev query, the first in the collection if there are several; revela probe
finds it in the document. --others 0 keeps only judged documents, for a small machine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from revela.files import atomic_write
from revela.text.readers.common import numbered_lines


def rows_of(file: Path, columns: int, separator: str | None = "\t") -> Iterator[list[str]]:
    """The columns of each line; exits at a line that has fewer."""
    for number, line in numbered_lines(file):
        row = line.rstrip("\r\n").split(separator, columns - 1)
        if len(row) < columns:
            raise SystemExit(f"{file}:{number} has {len(row)} columns of {columns}: is it whole?")
        yield row


def judged(file: Path) -> dict[str, list[str]]:
    """Query id -> ids of relevant documents, of the four columns of TREC."""
    relevant: dict[str, list[str]] = {}
    for query, _, name, grade in rows_of(file, 4, None):
        if int(grade) > 0:
            relevant.setdefault(query, []).append(name)
    return relevant


def write_rows(file: Path, rows: Iterable[Mapping[str, str]]) -> None:
    """Write JSON lines."""
    count = 0
    with atomic_write(file) as temporary, temporary.open("w", encoding="utf-8") as handle:
        for row in rows:
            handle.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    print(f"{file}: {count:,} rows")


def documents(file: Path, relevant: set[str], others: int) -> Iterator[dict[str, str]]:
    """The judged documents and the first ``others``; all, if ``others`` is below 0."""
    for name, _url, title, body in rows_of(file, 4):
        if name in relevant or others:
            others -= name not in relevant
            yield {"_id": name, "title": title, "text": body}


def passages(collection: Path, qrels: Path, queries: set[str]) -> Iterator[dict[str, str]]:
    """The first judged passage of each of these queries, by the query's id."""
    waiting: dict[str, list[str]] = {}
    for query, names in judged(qrels).items():
        for name in names if query in queries else ():
            waiting.setdefault(name, []).append(query)
    done = set[str]()
    for name, text in rows_of(collection, 2):
        for query in waiting.get(name, ()):
            if query not in done:
                done.add(query)
                yield {"_id": query, "text": text}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("documents", "dev-queries", "dev-qrels", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("train-queries", "train-qrels", "passages", "passage-qrels"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--others", type=int, default=-1, help="unjudged documents; all by default")
    given = parser.parse_args(argv)
    for one, other in (("train_queries", "train_qrels"), ("passages", "passage_qrels")):
        if (getattr(given, one) is None) != (getattr(given, other) is None):
            parser.error(f"--{one} and --{other} go together: give both".replace("_", "-"))
    splits = {"test": (given.dev_queries, given.dev_qrels)}
    splits |= {"train": (given.train_queries, given.train_qrels)} if given.train_qrels else {}
    (given.out / "qrels").mkdir(parents=True, exist_ok=True)
    relevant, queries = {name: judged(qrels) for name, (_, qrels) in splits.items()}, []
    for name, (texts, _) in splits.items():
        queries += [{"_id": query, "text": text} for query, text in rows_of(texts, 2)]
        with atomic_write(given.out / "qrels" / f"{name}.tsv") as temporary:
            lines = [f"{q}\t{d}\t1\n" for q, found in relevant[name].items() for d in found]
            temporary.write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))
    write_rows(given.out / "queries.jsonl", queries)
    every = {name for split in relevant.values() for found in split.values() for name in found}
    write_rows(given.out / "corpus.jsonl", documents(given.documents, every, given.others))
    if given.passages:
        rows = passages(given.passages, given.passage_qrels, {*relevant["test"]})
        write_rows(given.out / "passages.jsonl", rows)


if __name__ == "__main__":
    main()
