"""Flags that several benchmarks have: folders of test collections, and which of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

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
