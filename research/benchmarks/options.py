"""Flags that several benchmarks have: folders of test collections, and which of them; and parts of
these.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from revela.evaluation.collection import Collection
from revela.types import evenly_spaced

RESEARCH = Path(__file__).parents[1]


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


def names_in(data: Sequence[Path], only: Sequence[str]) -> list[str]:
    """The collections of these folders."""
    found = sorted(
        path.parent.parent.name for folder in data for path in folder.glob("*/qrels/test.tsv")
    )
    return [name for name in found if name in only] if only else found


def folder_of(name: str, data: Sequence[Path]) -> Path:
    """The folder of a collection."""
    return next(folder / name for folder in data if (folder / name).is_dir())


def corpus_of(folder: Path) -> Path:
    """The documents of a collection."""
    return next(p for p in (folder / "corpus.jsonl.gz", folder / "corpus.jsonl") if p.is_file())


def part_of(collection: Collection, documents: int, queries: int, characters: int) -> Collection:
    """Some queries, evenly spaced, their documents, and others, evenly spaced, cut short."""
    kept = evenly_spaced(len(collection.query_ids), queries)
    ids = [collection.query_ids[i] for i in kept]
    qrels = {name: collection.qrels[name] for name in ids}
    wanted = {d for grades in qrels.values() for d, grade in grades.items() if grade > 0}
    others = [d for d in collection.document_ids if d not in wanted]
    if room := max(0, min(len(others), documents - len(wanted))):
        wanted |= {others[i] for i in evenly_spaced(len(others), room)}
    rows = [i for i, d in enumerate(collection.document_ids) if d in wanted]
    return replace(
        collection,
        document_ids=[collection.document_ids[i] for i in rows],
        documents=[collection.documents[i][:characters] for i in rows],
        query_ids=ids,
        queries=[collection.queries[i] for i in kept],
        qrels=qrels,
    )
