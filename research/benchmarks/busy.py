"""Seconds of a training step on an idle and on a busy machine, by how long OpenMP's threads spin.

    python -m research.benchmarks.busy --data COLLECTIONS/scifact
    python -m research.benchmarks.busy --data COLLECTIONS/scifact --steps 4 --pairs 1    # a try

A thread that waits for the others of its process spins before it sleeps: 300,000 rounds by default
of libgomp, 1,000 as revela sets it (GOMP_SPINCOUNT). On the busy machine, --others more processes
compute all the time. The two settings take turns, so both runs of a pair are on the same machine in
the same minutes. Rows have the seconds of a step by setting (the mean of a run without its first
steps, the median of all pairs), and the median ratio of a pair with its range.

Results go to research/out/busy.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from research.benchmarks.options import parser_of, print_cells, print_header, write_out
from research.benchmarks.processes import LOG_EVERY, write_groups
from research.benchmarks.speed import SMOL
from revela.distributed import available_cores

SPINS = {"libgomp": "300000", "revela": "1000"}


@contextmanager
def beside(others: int) -> Iterator[None]:
    """Keep this many other processes busy while open."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(others)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def seconds_of_a_step(arguments: argparse.Namespace, spins: str, groups: Path, run: Path) -> float:
    """The mean over a run's steps, without those before the first logged line."""
    command = [sys.executable, "-m", "research.benchmarks.processes", f"--child={groups}"]
    names = ("preset", "model", "threads", "steps")
    flags = [f"--{name}={getattr(arguments, name)}" for name in names]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"GOMP_SPINCOUNT": spins}
    subprocess.run([*command, f"--into={run}", *flags], check=True, env=environment)
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    first, *_, last = (row for row in rows if "loss" in row)
    return 60 * (last["minutes"] - first["minutes"]) / (last["step"] - first["step"])


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--data", type=Path, help="a folder with corpus.jsonl, or one file of text")
    add("--others", type=int, default=1, help="busy processes beside the run")
    add("--preset", default="gated")
    add("--model", default=SMOL, help="of the retriever, and the LM")
    add("--threads", type=int, default=available_cores())
    add("--steps", type=int, default=10)
    add("--pairs", type=int, default=3)
    add("--documents", type=int, default=200)
    arguments = parser.parse_args()
    if arguments.steps < 2 * LOG_EVERY:
        parser.error(
            f"--steps {arguments.steps}: give {2 * LOG_EVERY} or more, for two logged lines"
        )
    if "OMP_WAIT_POLICY" in os.environ:
        parser.error("OMP_WAIT_POLICY is set, by which threads wait: unset it")
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        write_groups(arguments, here / "groups")
        for name, others in {"idle": 0, "busy": arguments.others}.items():
            with beside(others):
                found[name] = [
                    {
                        setting: seconds_of_a_step(
                            arguments, spins, here / "groups", here / f"{name}-{turn}-{setting}"
                        )
                        for setting, spins in SPINS.items()
                    }
                    for turn in range(arguments.pairs)
                ]
    print_header([*(f"{setting}: {spins} rounds" for setting, spins in SPINS.items()), "ratio"])
    for name, pairs in found.items():
        seconds = [statistics.median(pair[setting] for pair in pairs) for setting in SPINS]
        ratios = [pair["libgomp"] / pair["revela"] for pair in pairs]
        between = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print_cells(f"{name}, s a step", [*seconds, between], 2)
    write_out("busy.json", {"threads": arguments.threads, "seconds": found})


if __name__ == "__main__":
    main()
