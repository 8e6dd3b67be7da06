"""What decides how far an index scales, each part by itself, on synthetic rows.

    python -m research.benchmarks.scale lookup --rows 10000000 --out FOLDER
    python -m research.benchmarks.scale recall --rows 1000000 --width 384 --out FOLDER
    python -m research.benchmarks.scale memory --documents 100000 --out FOLDER
    python -m research.benchmarks.scale edits --documents 600 --out FOLDER

``lookup``: milliseconds to look up 200 ids, as --append does for each batch. ``recall``: recall@10
against the exact scan, on synthetic clusters. ``memory``: seconds and peak memory of ``revela
index`` with a static retriever, for so many documents of 60 words and for ten times as many.
``edits``: one of as many files, of 2,000 words each, is edited ten times; seconds of each update of
the index, with token vectors by MiniLM, and the bytes that they keep.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from research.benchmarks.options import RESEARCH, parser_of
from revela.cli.index import index as make_index
from revela.files import bytes_of
from revela.searching.index import Index
from revela.searching.locations import Start
from revela.searching.manifest import Indexing, Info
from revela.searching.rows import Row, Stored, arrow_rows
from revela.searching.sync import rescan, sync
from revela.searching.table import CELLS, Table

BATCH = 2**17  # rows made at a time
LOOKED_UP, TIMES = 200, 50
FILE = 34  # documents in a file that is edited


def made(folder: Path, rows: int, width: int, seed: int = 0) -> Table:
    """A table of synthetic rows: unit vectors in clusters of about 100."""
    info = Info("none", "none", width, Indexing())
    folder.mkdir(parents=True, exist_ok=True)
    table = Table.open(folder, info, create=True)
    centres = np.random.default_rng(seed).normal(size=(max(1, rows // 100), width))
    for start in range(len(table), rows, BATCH):
        rng = np.random.default_rng([seed, start])
        count = min(BATCH, rows - start)
        digests = [f"{i:016x}" for i in range(start, start + count)]
        names = [f"document-{i}" for i in range(start, start + count)]
        pairs = zip(names, digests, strict=True)
        chunks = [Row(name, 0, "", name, Start(), digest, ()) for name, digest in pairs]
        stored = [Stored(vector, None) for vector in near(centres, count, rng)]
        table.replace(arrow_rows(info, chunks, stored, [None] * count), [])
    return table


def near(centres: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Unit vectors beside random centres."""
    found = centres[rng.integers(len(centres), size=count)]
    found = found + 0.7 * rng.normal(size=found.shape)
    return (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32)


def lookup(arguments: argparse.Namespace) -> None:
    table = made(arguments.out / "lookup", arguments.rows, 2)
    table.lance.optimize()  # as an index is left that is finished
    began = time.perf_counter()
    before = table.frozen()
    indexed = time.perf_counter() - began
    rng = np.random.default_rng(1)
    ids = [
        [f"document-{i}" for i in rng.integers(2 * arguments.rows, size=LOOKED_UP)]
        for _ in range(TIMES + 5)
    ]
    for name, reader in (("as it is", before), ("without an index", None)):
        if reader is None:
            table.lance.drop_index("id_idx")
            reader = table
        times = []
        for batch in ids[: TIMES + 5 if reader is before else 8]:
            wall, cpu = time.perf_counter(), time.process_time()
            found = reader.digests(batch)
            times.append((time.perf_counter() - wall, time.process_time() - cpu))
            assert found.keys() == {i for i in batch if int(i.split("-")[1]) < arguments.rows}
        wall_ms, cpu_ms = np.median(np.array(times[5:]) * 1e3, axis=0)
        facts = dict(rows=arguments.rows, wall_ms=round(wall_ms, 1), cpu_ms=round(cpu_ms, 1))
        print(json.dumps({"lookup": name, **facts, "indexed_in_s": round(indexed, 1)}), flush=True)


def recall(arguments: argparse.Namespace) -> None:
    folder = arguments.out / "recall"
    table = made(folder, arguments.rows, arguments.width)
    began = time.perf_counter()
    table.pack()
    seconds = time.perf_counter() - began
    centres = np.random.default_rng(0).normal(size=(max(1, arguments.rows // 100), arguments.width))
    queries = near(centres, 200, np.random.default_rng(2))
    hits = 0
    for query in queries:
        exact = table.lance.search(query, vector_column_name="vector").distance_type("dot")
        rows = exact.bypass_vector_index().limit(10).select(["id"]).to_list()
        found = [owner.id for owner, _ in table.nearest(query, 10).values()]
        hits += len({row["id"] for row in rows} & set(found))
    facts = dict(rows=arguments.rows, width=arguments.width, cells=CELLS)
    print(json.dumps({**facts, "recall@10": hits / 2000, "indexed_in_s": round(seconds, 1)}))


def documents(count: int) -> Iterator[dict[str, str]]:
    rng = np.random.default_rng(0)
    words = np.array([f"word{i}" for i in range(20_000)])
    for i in range(count):
        text = " ".join(words[np.minimum(rng.zipf(1.3, size=60) - 1, len(words) - 1)])
        yield {"_id": f"document-{i}", "text": f"{text}."}


def corpus_of(folder: Path, count: int, files: int = 20) -> Path:
    """JSONL files of synthetic documents."""
    corpus = folder / f"corpus-{count}"
    if not corpus.exists():
        corpus.mkdir(parents=True)
        sinks = [(corpus / f"{i:02}.jsonl").open("w") for i in range(files)]
        for i, row in enumerate(documents(count)):
            sinks[i % files].write(json.dumps(row) + "\n")
        for sink in sinks:
            sink.close()
    return corpus


def looking_up(folder: Path) -> Path:
    """A static retriever with 64 numbers per token."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding
    from transformers import AutoTokenizer

    from revela.encoders.load import resolve

    if not folder.exists():
        tokenizer = AutoTokenizer.from_pretrained(resolve("embedded:minilm-l6"))
        static = StaticEmbedding(tokenizer.backend_tokenizer, embedding_dim=64)
        SentenceTransformer(modules=[static, Normalize()]).save(str(folder))
    return folder


def memory(arguments: argparse.Namespace) -> None:
    script = (
        "import resource, sys\nfrom revela.cli import main\n"
        "try:\n    main()\nfinally:\n"
        "    print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)\n"
    )
    model = looking_up(arguments.out / "looking-up")
    for count in (arguments.documents, 10 * arguments.documents):
        out = arguments.out / f"memory-{count}-{time.time_ns()}"
        flags = (corpus_of(arguments.out, count), "--out", out, "--model", model)
        command = [sys.executable, "-c", script, "index", *map(str, flags)]
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        seconds = time.perf_counter() - began
        peak_gb = int(re.findall(r"peak (\d+)", done.stderr)[-1]) / 2**20
        facts = dict(documents=count, seconds=round(seconds), peak_gb=round(peak_gb, 2))
        print(json.dumps({**facts, "index_gb": round(bytes_of(out) / 2**30, 2)}), flush=True)


def edits(arguments: argparse.Namespace) -> None:
    folder, out = arguments.out / "files", arguments.out / "edits"
    folder.mkdir(parents=True, exist_ok=True)
    rows = documents(FILE * arguments.documents)
    for i in range(arguments.documents):
        page = "\n\n".join(row["text"] for row in islice(rows, FILE))
        (file := folder / f"{i}.txt").write_text(page)
    settings = Indexing(keep_tokens=True)
    make_index([folder], out=out, model="embedded:minilm-l6", settings=settings, sync=True)
    index, seconds, sizes = Index.open(out), list[float](), [bytes_of(out)]
    for number in range(10):
        file.write_text(page.replace(".", f" edit{number}.", 1))
        began = time.perf_counter()
        with index.changes() as changes:
            sync(changes, rescan(changes))
        seconds.append(round(time.perf_counter() - began, 2))
        sizes.append(bytes_of(out))
    kept = [round((size - sizes[0]) / 1e6, 2) for size in sizes[1:]]
    print(json.dumps(dict(chunks=len(index), seconds=seconds, kept_mb=kept)))


def main() -> None:
    whats = {"lookup": lookup, "recall": recall, "memory": memory, "edits": edits}
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=list(whats))
    parser.add_argument("--out", type=Path, default=RESEARCH / "out" / "scale")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--documents", type=int, default=2000)
    arguments = parser.parse_args()
    whats[arguments.what](arguments)


if __name__ == "__main__":
    main()
