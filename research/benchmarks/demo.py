"""`make demo`: train, score, index and search on the Python packages of this machine.

Two starting points, one table. A raw language model: SmolLM2-135M untrained, fitted to the text,
and trained on it (preset pairs: docstrings are the queries). An embedder: MiniLM as it is, and
adapted to the text (preset gated). The test: docstrings search functions of packages that were held
out, by vectors alone, fused with BM25, and re-ranked by tokens. The best model is indexed and
answers three questions. Each step is a `revela` command, printed before it runs.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

from research.benchmarks.quality import UNTRAINED, save_untrained
from revela.evaluation.label_free import docstring_task
from revela.types import Document

SMOL, MINILM = "embedded:smollm2-135m", "embedded:minilm-l6"
HELD_OUT = {
    *("asyncio", "email", "http", "json", "logging", "zipfile", "statistics", "tarfile"),
    *("rich", "requests"),
}
SKIPPED = {
    *("test", "tests", "idlelib", "lib2to3", "site-packages", "_vendor", "__pycache__"),
    *("pydoc_data", "turtledemo"),
}
# Answered by asyncio/timeouts.py, email/quoprimime.py and rich/progress.py, which are among the
# first 20 held-out files.
QUESTIONS = [
    "give up waiting after some seconds",
    "decode a quoted-printable e-mail header",
    "draw a progress bar in the terminal",
]


def sources() -> Iterator[tuple[str, Path, Path]]:
    """(package, root, file) of the Python files of the standard library and site-packages."""
    for root in dict.fromkeys(Path(sysconfig.get_paths()[k]) for k in ("stdlib", "purelib")):
        for file in sorted(root.rglob("*.py")):
            parts = file.relative_to(root).parts
            if not SKIPPED & set(parts[:-1]):
                yield parts[0].removesuffix(".py"), root, file


def write_corpora(out: Path, max_files: int, max_held: int, max_functions: int) -> tuple[int, int]:
    """Write train.jsonl, held_out.jsonl, and docstrings/: docstring -> function in BEIR layout."""
    train, held = [], []
    for package, root, file in sources():
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if 200 < len(text) < 200_000:
            (held if package in HELD_OUT else train).append(
                {"_id": str(file.relative_to(root)), "text": text}
            )
    random.Random(0).shuffle(train)
    random.Random(0).shuffle(held)
    train, held = train[:max_files], held[:max_held]
    for name, rows in (("train", train), ("held_out", held)):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = docstring_task([Document(r["_id"], r["text"], kind="code") for r in held], max_functions)
    folder = out / "docstrings"
    (folder / "qrels").mkdir(parents=True)
    (folder / "corpus.jsonl").write_text(
        "".join(json.dumps({"_id": f"f{i}", "text": t}) + "\n" for i, t in enumerate(task.passages))
    )
    (folder / "queries.jsonl").write_text(
        "".join(json.dumps({"_id": f"q{i}", "text": t}) + "\n" for i, t in enumerate(task.queries))
    )
    judged = "".join(f"q{i}\tf{next(iter(r))}\t1\n" for i, r in enumerate(task.relevant))
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged)
    return len(train), len(held)


def run(*command: str) -> None:
    print(f"\n$ revela {shlex.join(command)}", flush=True)
    subprocess.run([str(Path(sys.executable).with_name("revela")), *command], check=True)


def train_models(out: Path, minutes: float) -> dict[str, str]:
    """Make the four models below ``out``; label -> model of these and MiniLM."""
    text = out / "train.jsonl"
    save_untrained(UNTRAINED["mean, 6 layers"], text, out / "untrained")
    save_untrained(UNTRAINED["mean, 6 layers, fitted"], text, out / "fitted")
    brief = f"--lm {SMOL} --max-minutes {minutes:g} --check-every 0 --check-passages 300".split()
    smol = ["--preset", "pairs", "--model", f"{out}/fitted"]  # a second fit would take minutes
    run("train", str(text), *smol, *brief, "--out", f"{out}/trained")
    run("train", str(text), "--model", MINILM, *brief, "--out", f"{out}/adapted")
    return {
        "SmolLM2-135M, untrained": f"{out}/untrained",
        "SmolLM2-135M, fitted": f"{out}/fitted",
        "SmolLM2-135M, fitted and trained": f"{out}/trained",
        "MiniLM": MINILM,
        "MiniLM, adapted": f"{out}/adapted",
    }


def print_table(bm25: float, found: dict[str, list[float]], winner: str) -> None:
    print("\nA docstring finds its function, in packages that were never trained on (nDCG@10):\n")
    print("| | vectors alone | + BM25 | + BM25, re-ranked by tokens | + BM25 by rank (RRF) |")
    print("|---|---|---|---|---|")
    print(f"| BM25 | {bm25:.3f} | | | |")
    for label, row in found.items():
        name = f"**{label}**" if label == winner else label
        print(f"| {name} | {' | '.join(f'{score:.3f}' for score in row)} |")


def main() -> None:
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--out", type=Path, default=Path("demo"))
    add("--minutes", type=float, default=0.5, help="of each of the two trainings")
    add("--files", type=int, default=200, help="source files to train on")
    add("--held-out-files", type=int, default=30, help="source files to index and search")
    add("--functions", type=int, default=100, help="functions searched")
    arguments = parser.parse_args()
    out, began = arguments.out, time.monotonic()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    sizes = arguments.files, arguments.held_out_files, arguments.functions
    trained, held = write_corpora(out, *sizes)
    packages = f"{held:,} files of {len(HELD_OUT)} packages held out"
    print(f"{trained:,} source files to train on; {packages}")
    models = train_models(out, arguments.minutes)
    judged = ["--on", f"{out}/docstrings", "--rerank", "tokens", "--json", f"{out}/scores.json"]
    run("eval", *models.values(), *judged)
    scores = json.loads((out / "scores.json").read_text())["docstrings"]
    found = {
        label: [
            scores[Path(model).name + more]["ndcg@10"]
            for more in ("", " + BM25", " + BM25 + tokens", " + BM25 (RRF)")
        ]
        for label, model in models.items()
    }
    winner = max(found, key=lambda label: found[label][2])
    index = f"{out}/index"
    best = ["--model", models[winner], "--out", index]
    run("index", f"{out}/held_out.jsonl", *best, "--keep-tokens")
    for question in QUESTIONS:
        run("search", index, question, "--top", "3", "--rerank", "tokens")
    print_table(scores["BM25"]["ndcg@10"], found, winner)
    minutes = (time.monotonic() - began) / 60
    print(f"\n{minutes:.1f} minutes in all. Now run this and open the page that it names:\n")
    print(f"  revela serve {index}")


if __name__ == "__main__":
    main()
