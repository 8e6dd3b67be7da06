"""Passages a second of whole indexing processes: `revela index`, txtai, and LanceDB with
sentence-transformers.

    python -m research.benchmarks.indexing --data COLLECTIONS/scifact --documents 1000

Each indexes the same documents by MiniLM (revela by multilingual-e5-small, too), for search by
words and by vectors, with its defaults. revela reads and cuts the documents; the others, which do
not cut, are given its passages. The processes take turns. ``--before CHECKOUT`` adds the `revela
index` of another checkout; ``ONEDNN_MAX_CPU_ISA`` limits the processor of all. txtai and faiss-cpu
are for you to install.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from research.benchmarks.options import (
    RESEARCH,
    corpus_of,
    parser_of,
    passages_of,
    print_cells,
    print_header,
)
from revela.encoders.embedded import E5, MINILM
from revela.encoders.load import resolve
from revela.text.load import read_corpus
from revela.types import evenly_spaced

Run = tuple[float, float, int]  # seconds, of the processor too, and MB at most


def by_txtai(passages: Sequence[str], out: Path, model: Path) -> None:
    from txtai import Embeddings

    embeddings = Embeddings(path=str(model), hybrid=True, content=True)
    embeddings.index(passages)
    embeddings.save(str(out))


def by_lancedb(passages: Sequence[str], out: Path, model: Path) -> None:
    import lancedb
    from sentence_transformers import SentenceTransformer

    vectors_ND = SentenceTransformer(str(model)).encode(passages)
    rows = [{"text": p, "vector": v} for p, v in zip(passages, vectors_ND, strict=True)]
    table = lancedb.connect(out).create_table("passages", rows)
    table.create_fts_index("text")


OTHERS: dict[str, Callable[[Sequence[str], Path, Path], None]] = {
    "txtai": by_txtai,
    "LanceDB, sentence-transformers": by_lancedb,
}


def run_process(command: Sequence[str], checkout: Path, out: Path) -> Run:
    """Run a process in a checkout, and remove what it made."""
    environment = {**os.environ, "PYTHONPATH": f"{checkout / 'src'}:{checkout}"}
    if "PYTHONPATH" in os.environ:
        environment["PYTHONPATH"] += f":{os.environ['PYTHONPATH']}"
    began = time.perf_counter()
    null = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    child = os.posix_spawn(
        sys.executable, [sys.executable, *command], environment, file_actions=null
    )
    _, status, used = os.wait4(child, 0)
    seconds = time.perf_counter() - began
    if status:
        sys.exit(f"{' '.join(command)} failed")
    shutil.rmtree(out)
    return seconds, used.ru_utime + used.ru_stime, used.ru_maxrss // 1024


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="a collection in BEIR's layout")
    add("--documents", type=int, default=1000)
    add("--turns", type=int, default=5)
    add("--before", type=Path, help="another checkout of revela")
    add("--before-flags", nargs="*", default=[], help="of its `revela index`, as precision=fp32")
    add("--only", nargs="*", help="systems")
    add("--child", help="what this process is to index by", choices=OTHERS)
    add("--passages", type=Path)
    add("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.child:
        passages = json.loads(arguments.passages.read_text())
        return OTHERS[arguments.child](passages, arguments.out, resolve(MINILM))
    documents, _ = read_corpus([corpus_of(arguments.data)])
    chosen = [documents[i] for i in evenly_spaced(len(documents), arguments.documents)]
    _, passages = passages_of(chosen)
    with tempfile.TemporaryDirectory() as temporary:
        folder, here = Path(temporary), RESEARCH.parent
        text, given, out = folder / "corpus.jsonl", folder / "passages.json", folder / "out"
        rows = ({"id": d.id, "title": d.title, "text": d.text} for d in chosen)
        text.write_text("".join(json.dumps(row) + "\n" for row in rows))
        given.write_text(json.dumps(passages))
        index = ["-m", "revela", "index", str(text), "--out", str(out)]
        runs: dict[str, Callable[[], Run]] = {
            name: partial(run_process, [*index, "--model", model], here, out)
            for name, model in (("revela", MINILM), ("revela, e5-small", E5))
        }
        if arguments.before:
            former = [*index, "--model", MINILM, *(f"--{f}" for f in arguments.before_flags)]
            runs["before"] = partial(run_process, former, arguments.before, out)
        for name in OTHERS:
            own = ["-m", "research.benchmarks.indexing", "--data", str(arguments.data)]
            own += ["--child", name, "--passages", str(given), "--out", str(out)]
            runs[name] = partial(run_process, own, here, out)
        runs = {name: run for name, run in runs.items() if name in (arguments.only or runs)}
        turns = [{name: run() for name, run in runs.items()} for _ in range(arguments.turns + 1)]
    print_header(["passages a second", "revela is faster, times", "processor s", "MB"])
    for name in runs:
        of = [turn[name] for turn in turns[1:]]  # the first one warms the caches
        faster = median(turn[name][0] / turn["revela"][0] for turn in turns[1:])
        seconds, processor, memory = (median(run[i] for run in of) for i in range(3))
        print_cells(
            name, [f"{len(passages) / seconds:.0f}", f"{faster:.2f}", processor, f"{memory:.0f}"]
        )


if __name__ == "__main__":
    main()
