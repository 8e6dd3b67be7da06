"""What benchmarks share: flags, test collections, parts of them, kept results, Markdown tables."""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from revela.evaluation.collection import Collection
from revela.files import atomic_write
from revela.searching.manifest import Indexing
from revela.text.chunk import chunk
from revela.text.judgements import jsonl_file
from revela.types import Chunk, Document, evenly_spaced

RESEARCH = Path(__file__).parents[1]
OUT = RESEARCH / "out"


def parser_of(about: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a module's docstring."""
    plain = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=about, formatter_class=plain)


def collections_parser(about: str | None, model: str = "") -> argparse.ArgumentParser:
    """With --data and --only, and --model if it has a default."""
    parser = parser_of(about)
    add = parser.add_argument
    add("--data", type=Path, nargs="+", required=True, help="folders of BEIR-layout collections")
    add("--only", nargs="*", default=[], help="collections; all by default")
    if model:
        add("--model", default=model, help="as for the `revela` commands")
    return parser


def collections_in(data: Sequence[Path], only: Sequence[str] = ()) -> dict[str, Path]:
    """The folders of all collections below these folders, or of some, by name."""
    folders = {
        path.parent.parent.name: path.parent.parent
        for folder in data
        for path in folder.glob("*/qrels/test.tsv")
    }
    return {name: folders[name] for name in sorted(folders) if not only or name in only}


def corpus_of(folder: Path) -> Path:
    """The documents of a collection."""
    return jsonl_file(folder, "corpus.jsonl")


def passages_of(documents: Sequence[Document]) -> tuple[list[Chunk], list[str]]:
    """The chunks that `revela index` makes of documents, and their texts after the titles."""
    chunks = [
        piece for i, d in enumerate(documents) for piece in chunk(d, i, Indexing().chunk_words)
    ]
    return chunks, [f"{documents[c.document].title} {c.text}".strip() for c in chunks]


def kept_json(path: Path, make: Callable[[], Any]) -> Any:
    """The content of a JSON file, which is made if it does not exist."""
    if not path.is_file():
        content = make()
        with atomic_write(path) as temporary:
            temporary.write_text(json.dumps(content))
    return json.loads(path.read_text())


def read_table(file: Path) -> list[dict[str, str]]:
    """The rows of a CSV file; none if it does not exist."""
    if not file.is_file():
        return []
    with file.open(newline="") as lines:
        return [*csv.DictReader(lines)]


def write_out(name: str, content: Any) -> None:
    """Write JSON to research/out."""
    OUT.mkdir(exist_ok=True)
    (OUT / name).write_text(json.dumps(content, indent=1))


def print_header(titles: Sequence[str]) -> None:
    """The head of a Markdown table; the column of row names has no title."""
    print(f"| | {' | '.join(titles)} |\n" + "|---" * (1 + len(titles)) + "|")


def print_cells(name: str, values: Iterable[object], digits: int = 3) -> None:
    """A row of a Markdown table."""
    cells = (f"{value:.{digits}f}" if isinstance(value, float) else f"{value}" for value in values)
    print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def part_of(
    collection: Collection, documents: int, queries: int, characters: int | None = None
) -> Collection:
    """Evenly spaced queries, their documents, and other evenly spaced ones, maybe cut short."""
    kept = evenly_spaced(len(collection.query_ids), queries)
    ids = [collection.query_ids[i] for i in kept]
    qrels = {name: collection.qrels[name] for name in ids}
    chosen = {d for grades in qrels.values() for d, grade in grades.items() if grade > 0}
    others = [d for d in collection.document_ids if d not in chosen]
    if room := max(0, min(len(others), documents - len(chosen))):
        chosen |= {others[i] for i in evenly_spaced(len(others), room)}
    rows = [i for i, d in enumerate(collection.document_ids) if d in chosen]
    return replace(
        collection,
        document_ids=[collection.document_ids[i] for i in rows],
        documents=[collection.documents[i][:characters] for i in rows],
        titles=[collection.titles[i][:characters] for i in rows] if collection.titles else (),
        query_ids=ids,
        queries=[collection.queries[i] for i in kept],
        qrels=qrels,
    )
