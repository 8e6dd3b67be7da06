"""`make demo`: a raw language model becomes a retriever, on text of this machine, without labels.

Source files of Python packages are the text. Docstrings of packages that are held out are the
queries, and their functions, without them, the documents.

- `revela train`: 40 steps of next-token prediction (revela-gated) from raw weights, two minutes on
  two idle cores, with the settings of research/recipes/from-raw.toml and a curve on the held-out
  functions;
- `revela fit`: the same weights, fitted to the text without training;
- `revela index` and `revela search`, by the better of the two;
- a table of both with BM25 and MiniLM, and what each method gave at equal tokens (from_raw.py).

Each step is a `revela` command, printed before it runs.
"""

from __future__ import annotations

import json
import random
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from research.benchmarks.from_raw import JUDGED, RECIPE, RESULTS
from research.benchmarks.options import parser_of, print_cells, print_header, read_table
from research.plot_run import main as plot_run
from revela.evaluation.collection import save_collection
from revela.evaluation.label_free import docstring_task
from revela.terminal import duration
from revela.training.commands import flags_of
from revela.training.recipe import read_recipe
from revela.training.record import METRICS, Metrics
from revela.types import Document

MINILM = "embedded:minilm-l6"
HELD_OUT = {
    *("asyncio", "email", "http", "json", "logging", "zipfile", "statistics", "tarfile"),
    *("rich", "requests"),
}
SKIPPED = {
    *("test", "tests", "idlelib", "lib2to3", "site-packages", "_vendor", "__pycache__"),
    *("pydoc_data", "turtledemo"),
}
# Answered by asyncio/timeouts.py, email/quoprimime.py and rich/progress.py, of the first 20
# held-out files.
QUESTIONS = [
    "give up waiting after some seconds",
    "decode a quoted-printable e-mail header",
    "draw a progress bar in the terminal",
]
SIZES = range(200, 200_000)  # bytes of a file
COLUMNS = {"": "vectors alone", " + BM25": "+ BM25"}
BM25, RAW, TRAINED, FITTED = "BM25", "as it is", "trained", "fitted"
POINTS = 4
Scores = Mapping[str, float]


def sources() -> Iterator[tuple[str, Path, Path]]:
    """(package, root, file) of the Python files of the standard library and site-packages."""
    for root in dict.fromkeys(Path(sysconfig.get_paths()[k]) for k in ("stdlib", "purelib")):
        for file in sorted(root.rglob("*.py")):
            parts = file.relative_to(root).parts
            is_skipped = SKIPPED & set(parts[:-1]) or not file.is_file()
            if not is_skipped and file.stat().st_size in SIZES:
                yield parts[0].removesuffix(".py"), root, file


def write_packages(out: Path, max_files: int, max_held: int, max_functions: int) -> tuple[int, int]:
    """Write train.jsonl, held_out.jsonl, and test/: docstring -> function in BEIR layout."""
    train, held = list[tuple[Path, Path]](), list[tuple[Path, Path]]()
    for package, root, file in sources():
        (held if package in HELD_OUT else train).append((root, file))
    train_rows, held_rows = [*islice(read(train), max_files)], [*islice(read(held), max_held)]
    write_rows(out / "train.jsonl", train_rows)
    write_rows(out / "held_out.jsonl", held_rows)
    documents = [Document(r["_id"], r["text"], kind="code") for r in held_rows]
    save_collection(docstring_task(documents, max_functions), out / "test")
    return len(train_rows), len(held_rows)


def read(files: list[tuple[Path, Path]]) -> Iterator[dict[str, str]]:
    """The files that are UTF-8, shuffled."""
    random.Random(0).shuffle(files)
    for root, file in files:
        with suppress(OSError, UnicodeDecodeError):
            text = file.read_text(encoding="utf-8")
            yield {"_id": str(file.relative_to(root)), "text": text}


def write_rows(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(*command: str) -> float:
    """Print and run a command; the seconds that it took."""
    print(f"\n$ revela {shlex.join(command)}", flush=True)
    began = time.monotonic()
    subprocess.run([str(Path(sys.executable).with_name("revela")), *command], check=True)
    return time.monotonic() - began


def train_from_raw(out: Path, steps: int) -> None:
    """Train OUT/trained, and draw its curve."""
    settings, _ = read_recipe(RECIPE)
    limits = {"max_tokens_read": 0, "max_steps": steps}
    flags = flags_of({"method": "revela-gated", **settings, **limits})
    judged = ["--on", f"{out}/test", "--points", str(POINTS)]
    run("train", f"{out}/train.jsonl", *flags, *judged, "--out", f"{out}/{TRAINED}")
    plot_run([f"{out}/{TRAINED}"])


def scores_of(out: Path) -> dict[str, Scores]:
    """nDCG@10 of BM25, the raw model, and each model alone and fused, by suffix."""
    file, models = out / "scores.json", [f"{out}/{TRAINED}", f"{out}/{FITTED}", MINILM]
    exact = ["--precision", "fp32"]  # int8 takes 0.05 from a retriever that has just begun to learn
    run("eval", *models, "--on", f"{out}/test", *exact, "--json", str(file))
    scores = json.loads(file.read_text())["test"]
    start = next(row.judged for row in Metrics(out / TRAINED / METRICS).written() if row.judged)
    found: dict[str, Scores] = {
        BM25: {"": scores[BM25]["means"]["ndcg@10"]},
        RAW: {"": start["test"]},
    }
    for model in models:
        name = Path(model).name
        found[name] = {s: scores[f"{name}{s}"]["means"]["ndcg@10"] for s in COLUMNS}
    return found


def print_equal_tokens() -> None:
    """What each method gave at equal tokens from raw weights, by research/results."""
    if not (rows := read_table(RESULTS / f"{RECIPE.stem}.csv")):
        return
    print(
        "\nFrom the same raw weights each method has read as many tokens of Wikipedia "
        "(python -m research.benchmarks.from_raw; nDCG@10 of whole collections, vectors alone):\n"
    )
    print_header(["million tokens", *JUDGED])
    for row in rows:
        print_cells(row["row"], (float(row[name]) for name in ("million tokens", *JUDGED)))


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--out", type=Path, default=Path("demo"))
    add("--steps", type=int, default=40, help="of training")
    add("--files", type=int, default=200, help="files to train on and to fit to")
    add("--held-out-files", type=int, default=20, help="files to index and search")
    add("--functions", type=int, default=100, help="functions searched")
    arguments = parser.parse_args(argv)
    out, began, steps = arguments.out, time.monotonic(), arguments.steps
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    sizes = arguments.files, arguments.held_out_files, arguments.functions
    trained, held = write_packages(out, *sizes)
    packages = f"{held:,} files of {len(HELD_OUT)} packages held out"
    print(f"{trained:,} source files to train on; {packages}")
    train_from_raw(out, steps)
    model = read_recipe(RECIPE)[0]["model"]
    fitting = run("fit", f"{out}/train.jsonl", "--model", model, "--out", f"{out}/{FITTED}")
    found = scores_of(out)
    best = max((TRAINED, FITTED), key=lambda name: found[name][" + BM25"])
    run("index", f"{out}/held_out.jsonl", "--model", f"{out}/{best}", "--out", f"{out}/index")
    for question in QUESTIONS:
        run("search", f"{out}/index", question, "--top", "3")
    print_equal_tokens()
    labels = {
        RAW: "SmolLM2-135M, raw",
        TRAINED: f"SmolLM2-135M, {steps} steps of revela-gated",
        FITTED: "SmolLM2-135M, fitted",
        MINILM: "MiniLM, an embedding model trained on text pairs",
    }
    print("\nA docstring finds its function, in packages held out of training (nDCG@10):\n")
    print_header([*COLUMNS.values()])
    for name, scores in found.items():
        print_cells(labels.get(name, name), (scores.get(suffix, "") for suffix in COLUMNS))
    took, alone = duration((time.monotonic() - began) / 60), {n: s[""] for n, s in found.items()}
    minutes = max(row.minutes for row in Metrics(out / TRAINED / METRICS).written())
    more = "more" if alone[TRAINED] > alone[FITTED] else "less"
    print(
        f"\nNext-token prediction alone took the raw model from {alone[RAW]:.3f} to "
        f"{alone[TRAINED]:.3f} in {duration(minutes)} ({out}/{TRAINED}/curves.png). That is {more} "
        f"than the label-free fit gives in {duration(fitting / 60)}, {alone[FITTED]:.3f}; BM25 has "
        f"{alone[BM25]:.3f}. All of this took {took}; `revela serve {out}/index` is a search page "
        f"on {held} files."
    )


if __name__ == "__main__":
    main()
