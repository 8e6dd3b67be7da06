"""`make demo`: the main job on text that every machine has, the Python packages installed beside it.

Trains SmolLM2-135M on their source code, where docstrings are the queries (preset pairs), asks docstrings for functions of packages
that it has not seen, indexes those packages and answers three questions. Every step is a command that you can run yourself; each is
printed first.
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
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from quality import UNTRAINED, save_untrained
from revela.data.heldout import docstring_task
from revela.search.metrics import METRICS
from revela.types import Document

SMOL = "embedded:smollm2-135m"
HELD_OUT = {"asyncio", "email", "http", "json", "logging", "zipfile", "statistics", "tarfile", "rich", "requests"}
SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "_vendor", "__pycache__", "pydoc_data", "turtledemo"}
QUESTIONS = [
    "add a file to a zip archive",
    "wait until several coroutines are finished",
    "draw a progress bar in the terminal",
]


def sources() -> Iterator[tuple[str, Path, Path]]:
    """(package, root, file) of every Python file of the standard library and of what is installed beside it."""
    for root in dict.fromkeys(Path(sysconfig.get_paths()[k]) for k in ("stdlib", "purelib")):
        for file in sorted(root.rglob("*.py")):
            parts = file.relative_to(root).parts
            if not SKIPPED & set(parts[:-1]):
                yield parts[0].removesuffix(".py"), root, file


def write_corpora(out: Path, max_files: int, max_held: int, max_functions: int) -> tuple[int, int]:
    """train.jsonl and held_out.jsonl of source files, and docstrings/, a BEIR-layout folder of docstring -> function."""
    train, held = [], []
    for package, root, file in sources():
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if 200 < len(text) < 200_000:
            (held if package in HELD_OUT else train).append({"_id": str(file.relative_to(root)), "text": text})
    random.Random(0).shuffle(train)
    random.Random(0).shuffle(held)
    train, held = train[:max_files], held[:max_held]
    for name, rows in (("train", train), ("held_out", held)):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = docstring_task([Document(r["_id"], r["text"], kind="code") for r in held], max_functions)
    folder = out / "docstrings"
    (folder / "qrels").mkdir(parents=True)
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"_id": f"f{i}", "text": t}) + "\n" for i, t in enumerate(task.passages)))
    (folder / "queries.jsonl").write_text("".join(json.dumps({"_id": f"q{i}", "text": t}) + "\n" for i, t in enumerate(task.queries)))
    judged = "".join(f"q{i}\tf{next(iter(r))}\t1\n" for i, r in enumerate(task.relevant))
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged)
    return len(train), len(held)


def run(*command: str) -> None:
    print(f"\n$ revela {shlex.join(command)}", flush=True)
    subprocess.run([str(Path(sys.executable).with_name("revela")), *command], check=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("demo"))
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--files", type=int, default=4000, help="source files to train on")
    parser.add_argument("--held-out-files", type=int, default=120, help="source files held out, indexed and searched")
    parser.add_argument("--functions", type=int, default=1000, help="functions searched")
    arguments = parser.parse_args()
    out = arguments.out
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    trained, held = write_corpora(out, arguments.files, arguments.held_out_files, arguments.functions)
    print(f"{trained:,} source files to train on; {held:,} files of {len(HELD_OUT)} packages held out")
    save_untrained(UNTRAINED["mean, 6 layers"], out / "train.jsonl", out / "untrained")
    save_untrained(UNTRAINED["mean, 6 layers, fitted"], out / "train.jsonl", out / "fitted")
    limit = ["--max-minutes", f"{arguments.minutes:g}"]
    run("train", f"{out}/train.jsonl", "--preset", "pairs", "--model", SMOL, "--lm", SMOL, *limit, "--out", f"{out}/model")
    run("eval", f"{out}/untrained", f"{out}/fitted", f"{out}/model", "--on", f"{out}/docstrings", "--json", f"{out}/scores.json")
    run("index", f"{out}/held_out.jsonl", "--model", f"{out}/model", "--out", f"{out}/index")
    for question in QUESTIONS:
        run("search", f"{out}/index", question, "--top", "3")
    scores = json.loads((out / "scores.json").read_text())["docstrings"]
    names = {
        "untrained": "untrained",
        "BM25": "BM25",
        "fitted": "fitted to the corpus, not trained",
        "model": "trained",
        "model + BM25": "hybrid (trained + BM25)",
    }
    print(
        f"\nA docstring finds its function, in packages that were never trained on:\n\n| system | {' | '.join(METRICS)} |\n|---|"
        + "---|" * len(METRICS)
    )
    for key, label in names.items():
        print(f"| {label} | " + " | ".join(f"{scores[key][m]:.3f}" for m in METRICS) + " |")


if __name__ == "__main__":
    main()
