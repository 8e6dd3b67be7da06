"""A wall clock that jumps, a year ahead or back at every reading: train, index, search.

Only `time.time` and what is made of it jump, in the process itself; `time.monotonic` goes on, as
when somebody sets the clock. The files' times, which the kernel gives, do not jump.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from research.benchmarks.hardening.fuzz import sound_inputs
from research.benchmarks.hardening.kills import FLAGS
from research.benchmarks.hardening.made import environment, fault, report

JUMPS = """
import random, sys, time
real, rng = time.time, random.Random(int(sys.argv.pop(1)))
time.time = lambda: real() + rng.choice([-1, 0, 1]) * 365 * 86400
time.time_ns = lambda: int(time.time() * 1e9)
from revela.cli import main
main()
"""


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=0.1, help="limit of the training run")


def run(a: argparse.Namespace) -> int:
    """Train, index, add and search; how many went wrong."""
    wrong, seconds = 0, 0.0
    with tempfile.TemporaryDirectory(prefix="hardening-") as home:
        place = Path(home)
        sound = sound_inputs(place)
        begun = sound.groups
        flags = [flag if flag != "40" else "0" for flag in FLAGS]
        flags[flags.index("--max-minutes") + 1] = str(a.minutes)
        models = ["--model", sound.lm, "--lm", sound.lm]
        index = [sound.corpus, "--out", place / "new", "--model", sound.retriever]
        commands: dict[str, list[object]] = {
            "train": ["train", begun, "--out", place / "run", *models, *flags],
            "index": ["index", *index],
            "append": ["index", place / "more.jsonl", "--append", "--out", place / "new"],
            "delete": ["index", "--out", place / "new", "--delete", "d3"],
            "search": ["search", place / "new", "ocean1 ocean2"],
        }
        (place / "more.jsonl").write_text(sound.corpus.read_text().replace('"d', '"e'))
        for name, command in commands.items():
            started = time.monotonic()
            done = subprocess.run(
                [sys.executable, "-c", JUMPS, str(a.seed), *map(str, command)],
                env=environment(place / "cache"),
                capture_output=True,
                text=True,
                check=False,
            )
            if name == "train":
                seconds = time.monotonic() - started
            faulty = fault(done.returncode, done.stderr)
            wrong += bool(faulty) or done.returncode != 0
            print(name, done.returncode, done.stdout.strip()[-100:], faulty)
    figures = {"commands": len(commands), "limit_minutes": a.minutes, "train_s": round(seconds, 1)}
    report("clock", seed=a.seed, **figures, wrong=wrong)
    return wrong
