"""Damaged and synthetic inputs, each through the command line in a forked process.

The parent has imported everything, so an input takes some tenths of a second. A command may succeed
or end with one sentence and exit code 2. Anything else is a failure, which is recorded with its
number:

    python -m research.benchmarks.hardening fuzz --only 1234
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from research.benchmarks.hardening import inputs
from research.benchmarks.hardening.made import (
    environment,
    fault,
    report,
    tiny_lm,
    tiny_retriever,
    write_corpus,
)

SECONDS = 60  # for an input
MEMORY = 4 * 2**30  # bytes


@dataclass(frozen=True)
class Ended:
    """How an input ended: code, seconds (scaled by the load), peak memory in bytes, stderr."""

    code: int
    seconds: float
    memory: int
    errors: str

    @property
    def fault(self) -> str:
        if self.seconds > SECONDS:
            return f"hang of over {SECONDS} s"
        if self.code < 0:
            return f"signal {signal.Signals(-self.code).name}"
        if self.memory > MEMORY:
            return f"{self.memory / 2**30:.1f} GB"
        return fault(self.code, self.errors)


def sound_inputs(folder: Path) -> inputs.Sound:
    """Make a corpus, models, an index, groups and a judged collection."""
    corpus = write_corpus(folder / "corpus.jsonl")
    made = inputs.Sound(
        corpus,
        tiny_retriever(folder / "retriever"),
        tiny_lm(folder / "lm"),
        folder / "index",
        folder / "groups",
        folder / "collection",
    )
    (made.collection / "qrels").mkdir(parents=True)
    shutil.copy(corpus, made.collection / "corpus.jsonl")
    asked = [{"_id": f"q{i}", "text": f"About {i}"} for i in range(5)]
    (made.collection / "queries.jsonl").write_text("".join(json.dumps(q) + "\n" for q in asked))
    judged = "".join(f"q{i}\td{i}\t1\n" for i in range(5))
    (made.collection / "qrels" / "test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}")
    index = ["index", corpus, "--out", made.index, "--model", made.retriever, "--metadata", "year"]
    groups = ["groups", corpus, "--out", made.groups, *inputs.SETTINGS]
    import_all()
    for command in (index, groups):
        done = run_one([str(part) for part in command], folder)
        assert done.code == 0, done.errors
    return made


def import_all() -> None:
    """Import what any input needs, without using it, as threads do not survive a fork."""
    import lancedb  # noqa: F401
    import torch
    from sentence_transformers import SentenceTransformer  # noqa: F401

    import revela.cli
    import revela.evaluation.evaluate
    import revela.searching.index
    import revela.training.build_groups
    import revela.training.retriever.module
    import revela.training.train  # noqa: F401

    torch.set_num_threads(1)


def run_one(command: list[str], folder: Path) -> Ended:
    """Run a command line in a fork, and wait for its end; longer on a loaded machine."""
    seconds = SECONDS * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    begun = time.monotonic()
    if not (child := os.fork()):
        try:
            _become(command, folder)
        finally:
            os._exit(99)
    while True:
        done, status, used = os.wait4(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() - begun > seconds:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002)
    spent = SECONDS * (time.monotonic() - begun) / seconds
    errors = (folder / "stderr").read_bytes().decode(errors="replace")
    code = os.waitstatus_to_exitcode(status)
    return Ended(code, spent, used.ru_maxrss * 1024, errors)


def _become(command: list[str], folder: Path) -> None:
    """In the fork: run this command line. It gets twice its memory limit in addresses, as libraries
    reserve more than they use.
    """
    os.setsid()
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    encoding: Any = dict(encoding="utf-8", errors="strict", write_through=True)
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "wb", closefd=False), **encoding)
    encoding["errors"] = "backslashreplace"
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "wb", closefd=False), **encoding)
    tempfile.tempdir = str(folder)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + 2 * MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    os.chdir(folder)
    sys.argv = ["revela", *command]
    code: Any = 0
    try:
        from revela.cli import main

        main()
    except SystemExit as error:
        code = error.code
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def leftovers(folder: Path, ended: Ended) -> str:
    """What a failed command has left behind."""
    if ended.code == 2 and (folder / "out" / "groups.json").exists():
        return "a refused command left groups"
    hidden = [path.name for path in folder.glob(".out-*")]
    return f"left {hidden[0]}" if hidden else ""


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=600.0, help="then no more are begun")
    parser.add_argument("--only", type=int, nargs="*", help="numbers to run again, and to show")
    parser.add_argument("--failures", type=Path, default=Path("fuzz-failures.jsonl"))


def run(a: argparse.Namespace) -> int:
    """Run the inputs; the number of failures."""
    with tempfile.TemporaryDirectory(prefix="hardening-") as home:
        place = Path(home)
        os.environ.update(environment(place / "cache"))
        sound = sound_inputs(place)
        kinds, codes, spent = Counter[str](), Counter[int](), Counter[str]()
        most, slowest, failed = 0, 0.0, 0
        begun = time.monotonic()
        numbers = a.only if a.only else range(a.first, a.first + a.inputs)
        for number in numbers:
            if time.monotonic() - begun > 60 * a.minutes:
                break
            with tempfile.TemporaryDirectory(prefix=f"{number}-", dir=place) as inside:
                folder = Path(inside)
                kind, command = inputs.made(a.seed, number, folder, sound)
                ended = run_one(command, folder)
                wrong = ended.fault or leftovers(folder, ended)
            kinds[kind] += 1
            spent[kind] += ended.seconds
            codes[ended.code] += 1
            most, slowest = max(most, ended.memory), max(slowest, ended.seconds)
            if a.only:
                print(number, command, ended.code, f"{ended.seconds:.1f} s", ended.errors, sep="\n")
            if wrong:
                failed += 1
                row = {"number": number, "kind": kind, "fault": wrong, "command": command}
                with a.failures.open("a") as handle:
                    handle.write(json.dumps({**row, "errors": ended.errors[-3000:]}) + "\n")
                print(number, kind, wrong[:160].encode(errors="replace").decode(), flush=True)
        report(
            "fuzz",
            seed=a.seed,
            inputs=kinds.total(),
            kinds=kinds,
            codes=codes,
            failures=failed,
            most_gb=round(most / 2**30, 2),
            slowest_s=round(slowest, 1),
            mean_s={kind: round(spent[kind] / kinds[kind], 2) for kind in kinds},
            minutes=round((time.monotonic() - begun) / 60, 1),
        )
        return failed
