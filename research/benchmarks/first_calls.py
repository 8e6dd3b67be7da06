"""What first calls cost: of `revela search FOLDER`, of a cold process, of a service's embeddings.

    python -m research.benchmarks.first_calls --data COLLECTIONS/scifact

A folder of ``--documents`` files is searched with an empty cache (until the first answer, by words
if it is large, and until the last), then again by a new process; and served: the median of searches
one after another, and the slowest one while the first request for embeddings of 256 passages is
answered. Medians of ``--turns``, of the slowest one too.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from research.benchmarks.options import corpus_of, parser_of, print_cells, print_header
from revela.text.load import read_corpus
from revela.types import Document, evenly_spaced

QUERY = "does vitamin D help bones"
SEARCHES, PASSAGES = 200, 256
Environment = Mapping[str, str]


def write_folder(documents: Sequence[Document], folder: Path) -> None:
    folder.mkdir()
    for i, document in enumerate(documents):
        (folder / f"{i}.md").write_text(f"# {document.title}\n\n{document.text}\n")


def search_seconds(folder: Path, environment: Environment) -> tuple[float, float]:
    """Of a process: until its first answer is printed, by words if there are no vectors, and until
    its last.
    """
    command = [sys.executable, "-m", "revela", "search", str(folder), QUERY, "--top", "1"]
    pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    began, first = time.perf_counter(), 0.0
    with subprocess.Popen(command, env=environment, **pipes) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("1. ") and not first:
                first = time.perf_counter() - began
    assert process.returncode == 0
    return first, time.perf_counter() - began


def post(url: str, **body: Any) -> float:
    """Seconds until the answer is read."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    began = time.perf_counter()
    with urllib.request.urlopen(request) as answer:
        answer.read()
    return time.perf_counter() - began


def served_seconds(
    folder: Path, passages: Sequence[str], environment: Environment
) -> tuple[float, float, float]:
    """Of a search (median), of the slowest one beside the first embeddings, and of these."""
    command = [sys.executable, "-m", "revela", "serve", str(folder), "--port", "0"]
    pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with subprocess.Popen(command, env=environment, **pipes) as server:
        try:
            assert server.stdout is not None
            lines = (re.search(r"http://[\d.]+:\d+", line) for line in server.stdout)
            url = next(found.group() for found in lines if found)
            threading.Thread(target=server.stdout.read, daemon=True).start()
            texts = (" ".join(text.split()[:8]) for text in passages)  # none is asked for twice
            usual = [post(f"{url}/v1/search", query=next(texts)) for _ in range(SEARCHES)]
            model = json.loads(urllib.request.urlopen(f"{url}/v1/models").read())["data"][0]["id"]
            parts = [" ".join(text.split()[:80]) for text in passages[-PASSAGES:]]
            done = list[float]()
            asking = threading.Thread(
                target=lambda: done.append(post(f"{url}/v1/embeddings", model=model, input=parts))
            )
            asking.start()
            beside = list[float]()
            while asking.is_alive():
                beside.append(post(f"{url}/v1/search", query=next(texts)))
            asking.join()
            return median(usual), max(beside), done[0]
        finally:
            server.terminate()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="a collection in BEIR's layout")
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    documents, _ = read_corpus([corpus_of(arguments.data)])
    chosen = [documents[i] for i in evenly_spaced(len(documents), arguments.documents)]
    rows = []
    for _ in range(arguments.turns):
        with tempfile.TemporaryDirectory() as temporary:
            folder, environment = Path(temporary, "texts"), dict(os.environ)
            environment["REVELA_CACHE"] = str(Path(temporary, "cache"))
            write_folder(chosen, folder)
            first, whole = search_seconds(folder, environment)
            again = median(search_seconds(folder, environment)[1] for _ in range(3))
            texts = [document.text for document in documents]
            rows.append([first, whole, again, *served_seconds(folder, texts, environment)])
    search, slowest = (median(row[i] for row in rows) for i in (3, 4))
    titles = ["first answer, s", "first search, s", "from cold, s"]
    print_header([*titles, "served, ms", "slowest beside", "times"])
    cells = [*(median(row[i] for row in rows) for i in range(3)), 1000 * search, 1000 * slowest]
    print_cells(f"{len(chosen):,} documents", [*cells, slowest / search], digits=2)
    print(f"first embeddings of {PASSAGES} passages: {median(row[5] for row in rows):.2f} s")


if __name__ == "__main__":
    main()
