"""Writes folders in BEIR layout."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path


def write_collection(
    folder: Path,
    documents: Iterable[Mapping[str, str]],
    queries: Mapping[str, str],
    judged: Mapping[tuple[str, str], int],
    split: str = "test",
) -> Path:
    """Write documents (rows with _id and text), queries by id, and grades by query and document."""
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    write_lines(folder / "corpus.jsonl", documents)
    write_lines(folder / "queries.jsonl", [{"_id": i, "text": t} for i, t in queries.items()])
    lines = [f"{query}\t{document}\t{grade}\n" for (query, document), grade in judged.items()]
    (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))
    return folder


def write_judged(folder: Path, rows: Iterable[Mapping[str, str]], split: str = "test") -> Path:
    """Write documents, and the beginning of each as the query that finds it."""
    rows = list(rows)
    queries = {row["_id"]: row["text"].split(".")[0] for row in rows}
    return write_collection(folder, rows, queries, {(name, name): 1 for name in queries}, split)


def write_lines(file: Path, rows: Iterable[Mapping[str, str]]) -> Path:
    """Write JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
