"""Processor time and peak memory of building groups; each build is a process of its own.

    taskset -c 1 python -m research.benchmarks.groups --text TEXT --what documents
    taskset -c 1 python -m research.benchmarks.groups --text TEXT --what clusters --chunks 100000

``documents``: 1 GB of text to stored groups by document, once with any short documents together,
once with similar ones. TEXT is a folder of JSONL files; a smaller one is read several times, each
copy with ids and a last sentence of its own, and near-duplicates are kept (finding them is measured
elsewhere). ``clusters``: that many chunks, embedded by MiniLM on their first 64 tokens, clustered
and stored. Results stay in research/out/groups until the next run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path

from revela.corpus.chunk import chunk
from revela.corpus.read import read_corpus
from revela.types import Document

OUT = Path(__file__).parents[1] / "out" / "groups"
WORDS = 48  # of a chunk, as by default


def copies(documents: Sequence[Document]) -> Iterator[Document]:
    """The documents repeatedly; no copy is an exact duplicate."""
    for turn in count():
        for document in documents:
            last = f"\nThis is copy {turn} of it." if turn else ""
            yield Document(f"{turn}-{document.id}", document.text + last, document.title)


def up_to(documents: Iterable[Document], size_in_bytes: float) -> Iterator[Document]:
    """As many documents as have this much text."""
    total = 0
    for document in documents:
        if total >= size_in_bytes:
            return
        total += len(document.full_text.encode())
        yield document


def with_chunks(documents: Iterable[Document], wanted: int) -> Iterator[Document]:
    """As many documents as have this many chunks."""
    total = 0
    for document in documents:
        if total >= wanted:
            return
        total += len(chunk(document, 0, WORDS))
        yield document


def write_jsonl(documents: Iterable[Document], path: Path) -> None:
    with path.open("w") as file:
        for document in documents:
            file.write(
                json.dumps({"_id": document.id, "title": document.title, "text": document.text})
                + "\n"
            )


def measured(name: str, command: Sequence[str]) -> None:
    """Run ``revela`` to its end and print its time and memory."""
    print(f"== {name}: revela {' '.join(command)}", flush=True)
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "revela", *command])
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"it ended with exit code {os.waitstatus_to_exitcode(status)}")
    cpu, wall = usage.ru_utime + usage.ru_stime, time.monotonic() - began
    took = f"{cpu:.0f} processor seconds, {wall:.0f} s by the clock"
    print(f"{name}: {took}, at most {usage.ru_maxrss / 2**20:.2f} GB resident", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--text", type=Path, required=True, help="folder of JSONL files with documents"
    )
    parser.add_argument("--what", choices=["documents", "clusters"], default="documents")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of text")
    parser.add_argument("--chunks", type=int, default=100_000, help="to be clustered")
    parser.add_argument(
        "--neighbours",
        nargs="*",
        default=["random", "similar"],
        help="which short documents fill a group by document",
    )
    arguments = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    documents, report = read_corpus([arguments.text])
    print(*report.lines(), sep="\n", flush=True)
    out, corpus = OUT / "folder", OUT / "corpus.jsonl"
    common = [
        "groups",
        str(corpus),
        "--out",
        str(out),
        "--near-duplicates",
        "0",
        "--threads",
        "1",
        "--model",
        "embedded:smollm2-135m",
    ]
    if arguments.what == "documents":
        write_jsonl(up_to(copies(documents), arguments.gigabytes * 1e9), corpus)
        builds = {
            f"by document, {kind} neighbours": [*common, "--neighbours", kind]
            for kind in arguments.neighbours
        }
    else:
        write_jsonl(with_chunks(copies(documents), arguments.chunks), corpus)
        builds = {
            "by clusters": [
                *common,
                "--held-out",
                "0",
                "--groups",
                "cluster",
                "--surrogate",
                "embedded:minilm-l6",
            ]
        }
    for name, command in builds.items():
        shutil.rmtree(out, ignore_errors=True)
        measured(name, command)
        print(
            f"{sum(file.stat().st_size for file in out.iterdir()) / 1e9:.2f} GB of groups",
            flush=True,
        )


if __name__ == "__main__":
    main()
