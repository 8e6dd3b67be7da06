"""`make demo`: fit, train, score, index and search on text of this machine.

Without flags, on Python packages: docstrings search functions of held-out packages, by vectors
alone, fused with BM25, and re-ranked by tokens. One start is a raw language model: a table of its
words (`revela fit --static`), untrained, fitted to the text (`revela fit`), and trained on it
(contrastive-pairs: docstrings are the queries). The other is MiniLM, as it is and adapted to the
text (revela-gated).

With --language de, or another, on manual pages and documents of packages in that language: the
description of a held-out page finds the page, with MiniLM, the table and the fitted model, by
vectors alone and fused with BM25.

The best model is indexed and answers three questions. Each step is a `revela` command, printed
before it runs.
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from research.benchmarks.options import parser_of, print_cells, print_header
from research.benchmarks.quality import UNTRAINED, save_untrained
from research.benchmarks.translated import translated
from revela.evaluation.collection import save_collection
from revela.evaluation.label_free import MIN_QUERY_WORDS, docstring_task, tasks
from revela.searching.manifest import Indexing
from revela.terminal import duration
from revela.text.words import count_words
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
# Answered by asyncio/timeouts.py, email/quoprimime.py and rich/progress.py, of the first 20
# held-out files.
QUESTIONS = [
    "give up waiting after some seconds",
    "decode a quoted-printable e-mail header",
    "draw a progress bar in the terminal",
]
LENGTHS = range(200, 200_000)  # characters of a file
MIN_DOCUMENTS = 50  # in a language
MAX_PASSAGES = 600  # of held-out documents
STEPS = 100  # of training the table in a minute
COLUMNS = {"": "vectors alone", " + BM25": "+ BM25"}
RERANKED = {
    " + BM25 + late interaction": "+ BM25, re-ranked by tokens",
    " + BM25 (RRF)": "+ BM25 by rank (RRF)",
}


def sources() -> Iterator[tuple[str, Path, Path]]:
    """(package, root, file) of the Python files of the standard library and site-packages."""
    for root in dict.fromkeys(Path(sysconfig.get_paths()[k]) for k in ("stdlib", "purelib")):
        for file in sorted(root.rglob("*.py")):
            parts = file.relative_to(root).parts
            if not SKIPPED & set(parts[:-1]):
                yield parts[0].removesuffix(".py"), root, file


def write_packages(out: Path, max_files: int, max_held: int, max_functions: int) -> tuple[int, int]:
    """Write train.jsonl, held_out.jsonl, and test/: docstring -> function in BEIR layout."""
    train, held = [], []
    for package, root, file in sources():
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if len(text) in LENGTHS:
            (held if package in HELD_OUT else train).append(
                {"_id": str(file.relative_to(root)), "text": text}
            )
    random.Random(0).shuffle(train)
    random.Random(0).shuffle(held)
    train, held = train[:max_files], held[:max_held]
    write_rows(out / "train.jsonl", train)
    write_rows(out / "held_out.jsonl", held)
    documents = [Document(r["_id"], r["text"], kind="code") for r in held]
    save_collection(docstring_task(documents, max_functions), out / "test")
    return len(train), len(held)


def write_pages(
    out: Path, documents: Sequence[Document], max_files: int, max_held: int
) -> tuple[int, list[str]]:
    """Write train.jsonl, held_out.jsonl, and test/: title -> document without it, in BEIR layout.
    At most a third of the documents with a title is held out.

    Returns:
        The number of documents to fit to, and the queries.
    """
    drawn = random.Random(0).sample(documents, len(documents))
    described = list(filter(is_described, drawn))
    held = described[: min(max_held, len(described) // 3)]
    ids = {document.id for document in held}
    train = [document for document in drawn if document.id not in ids][:max_files]
    for file, part in (("train", train), ("held_out", held)):
        rows = []
        for document in part:
            name = Path(document.id).name.removesuffix(".gz")  # such as ls.1
            title = f"{name} {document.title}".strip() if part is train else name
            rows.append({"_id": document.id, "title": title, "text": document.text})
        write_rows(out / f"{file}.jsonl", rows)
    made = tasks(held, Indexing.chunk_words, len(held), MAX_PASSAGES, seed=0)
    (task,) = (task for task in made if task.name == "title")
    save_collection(task, out / "test")
    return len(train), task.queries


def is_described(document: Document) -> bool:
    """Whether its title makes a query."""
    return count_words(document.title) >= MIN_QUERY_WORDS


def write_rows(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(*command: str) -> None:
    print(f"\n$ revela {shlex.join(command)}", flush=True)
    subprocess.run([str(Path(sys.executable).with_name("revela")), *command], check=True)


def fit_models(out: Path, lm: str) -> dict[str, str]:
    """The table and the fitted model that `revela fit` makes: label -> model."""
    for flags, folder in (["--static"], "table"), ([], "fitted"):
        run("fit", f"{out}/train.jsonl", "--model", lm, *flags, "--out", f"{out}/{folder}")
    return {
        f"{label_of(lm)}, table of words": f"{out}/table",
        f"{label_of(lm)}, fitted": f"{out}/fitted",
    }


def train_models(out: Path, minutes: float, lm: str) -> dict[str, str]:
    """Make the five models of the default demo; label -> model, with MiniLM, the table first."""
    text, steps = out / "train.jsonl", str(round(STEPS * minutes))
    static = ["--static", "--steps", steps, "--out", f"{out}/table"]
    run("fit", str(text), "--model", lm, *static)
    # What `revela fit` does, without its check, which would take as long as the fit.
    save_untrained(UNTRAINED["mean, 6 layers"], text, out / "untrained", lm)
    save_untrained(UNTRAINED["mean, 6 layers, fitted"], text, out / "fitted", lm, steps=None)
    brief = f"--lm {lm} --max-minutes {minutes:g} --check-every 0".split()
    # From the fitted model, as a second fit would take minutes.
    pairs = ["--method", "contrastive-pairs", "--model", f"{out}/fitted"]
    run("train", str(text), *pairs, *brief, "--out", f"{out}/trained")
    run("train", str(text), "--model", MINILM, *brief, "--out", f"{out}/adapted")
    return {
        f"{label_of(lm)}, table of words": f"{out}/table",
        f"{label_of(lm)}, untrained": f"{out}/untrained",
        f"{label_of(lm)}, fitted": f"{out}/fitted",
        f"{label_of(lm)}, fitted and trained": f"{out}/trained",
        "MiniLM": MINILM,
        "MiniLM, adapted": f"{out}/adapted",
    }


def label_of(lm: str) -> str:
    """The name of a language model in the table."""
    return "SmolLM2-135M" if lm == SMOL else Path(lm).name


def scores_of(out: Path, models: dict[str, str], *flags: str) -> dict[str, dict[str, float]]:
    """nDCG@10 of BM25 and of each model, by label, then by suffix, such as " + BM25"."""
    file = f"{out}/scores.json"
    run("eval", *models.values(), "--on", f"{out}/test", *flags, "--json", file)
    scores = json.loads(Path(file).read_text())["test"]
    names = {"BM25": "BM25"} | {label: Path(model).name for label, model in models.items()}
    return {
        label: {
            system.removeprefix(name): found["means"]["ndcg@10"]
            for system, found in scores.items()
            if system == name or system.startswith(f"{name} + ")
        }
        for label, name in names.items()
    }


def print_table(
    question: str, columns: dict[str, str], found: dict[str, dict[str, float]], winner: str
) -> None:
    """Print the scores of ``scores_of``, a row per system, the winner in bold."""
    print(f"\n{question} (nDCG@10):\n")
    print_header(list(columns.values()))
    for label, scores in found.items():
        name = f"**{label}**" if label == winner else label
        print_cells(name, (scores.get(suffix, "") for suffix in columns))


def index_and_ask(out: Path, model: str, questions: Sequence[str], rerank: bool) -> None:
    """Index the held-out documents, and search them."""
    index, tokens = f"{out}/index", ["--keep-tokens"] * rerank
    run("index", f"{out}/held_out.jsonl", "--model", model, "--out", index, *tokens)
    for question in questions:
        run("search", index, question, "--top", "3", *["--rerank", "late-interaction"] * rerank)


def demo_of_packages(arguments: argparse.Namespace) -> None:
    """The demo on Python packages."""
    out = arguments.out
    sizes = arguments.files, arguments.held_out_files or 30, arguments.functions
    trained, held = write_packages(out, *sizes)
    packages = f"{held:,} files of {len(HELD_OUT)} packages held out"
    print(f"{trained:,} source files to train on; {packages}")
    table, *others = models = train_models(out, arguments.minutes, arguments.lm)
    # The table has no tokens to re-rank by.
    found = scores_of(out, {table: models[table]})
    flags = "--rerank", "late-interaction"
    found |= scores_of(out, {label: models[label] for label in others}, *flags)
    winner = max(others, key=lambda label: found[label][" + BM25 + late interaction"])
    index_and_ask(out, models[winner], QUESTIONS, rerank=True)
    question = "A docstring finds its function, in packages that were never trained on"
    print_table(question, COLUMNS | RERANKED, found, winner)


def demo_of_translations(arguments: argparse.Namespace, documents: Sequence[Document]) -> None:
    """The demo on a language."""
    out = arguments.out
    sizes = arguments.files, arguments.held_out_files or 100
    fitted, queries = write_pages(out, documents, *sizes)
    print(
        f"{len(documents):,} documents in {arguments.language} come with this machine: "
        f"{fitted:,} to fit to, {len(queries)} held out"
    )
    models = {"MiniLM": MINILM, **fit_models(out, arguments.lm)}
    found = scores_of(out, models)
    winner = max(models, key=lambda label: found[label][" + BM25"])
    index_and_ask(out, models[winner], queries[:3], rerank=False)
    question = "What a page is about, in a line, finds its pieces, which nothing was fitted to"
    print_table(question, COLUMNS, found, winner)


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--out", type=Path, default=Path("demo"))
    add("--language", default="en", help="as in /usr/share/man; en: Python packages")
    add("--lm", default=SMOL, help="a raw language model")
    add("--minutes", type=float, default=0.5, help="of each of the two trainings of layers")
    add("--files", type=int, default=200, help="files to train on, or to fit to")
    add("--held-out-files", type=int, help="files to index and search: 30, of a language 100")
    add("--functions", type=int, default=100, help="functions searched")
    arguments = parser.parse_args()
    out, began, language = arguments.out, time.monotonic(), arguments.language
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    found = translated(language) if language != "en" else []
    documents = [document for document in found if len(document.text) in LENGTHS]
    if (described := sum(map(is_described, documents))) >= MIN_DOCUMENTS:
        demo_of_translations(arguments, documents)
    else:
        if language != "en":
            print(
                f"{described} documents in {language} that say in a line what they are about come "
                f"with this machine, and the demo takes {MIN_DOCUMENTS}, so it goes on in English "
                "(Debian has more of many languages, in packages such as manpages-de)"
            )
        demo_of_packages(arguments)
    minutes = (time.monotonic() - began) / 60
    print(f"\n{duration(minutes)} in all. Now run this and open the page that it names:\n")
    print(f"  revela serve {out}/index")


if __name__ == "__main__":
    main()
