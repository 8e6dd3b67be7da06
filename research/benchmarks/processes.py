"""Tokens/s of training by several processes beside one, each with its own core or GPU.

    python -m research.benchmarks.processes --data COLLECTIONS/scifact
    python -m research.benchmarks.processes --processes 1 2 4 8 --steps 100      # on GPUs

Each process reads one group per step, so twice the processes have twice the work. The runs take
turns; the first line of a run's metrics is left out. "Waiting" is the share of the time spent
waiting for the slowest process, "sending" the share of adding up gradients.

Without --data the text is the Python source installed on this machine. Results go to
research/out/distributed.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from torch import distributed as dist

from research.benchmarks.options import parser_of, write_out
from research.benchmarks.speed import SMOL, corpus
from research.benchmarks.steps import Row, print_row
from revela.training import distributed
from revela.training.build_groups import build_groups
from revela.training.groups.store import GroupFolder
from revela.training.recipe import Recipe
from revela.training.train import train

LOG_EVERY = 2  # steps


def child(arguments: argparse.Namespace) -> None:
    """Train, and write the shares of the time beside the metrics."""
    spent = {"waiting": 0.0, "sending": 0.0}
    add_gradients = distributed.add_gradients

    def timed(parameters: list) -> None:
        began = time.perf_counter()
        if distributed.world_size() > 1:
            dist.barrier()
        waited = time.perf_counter()
        add_gradients(parameters)
        spent["waiting"] += waited - began
        spent["sending"] += time.perf_counter() - waited

    distributed.add_gradients = timed
    recipe = recipe_of(arguments).replace(
        groups_per_step=distributed.started(),
        max_steps=arguments.steps,
        log_every=LOG_EVERY,
        save_every=arguments.steps + 1,
        keep="last",
    )
    with distributed.joined():
        outcome = train(recipe, GroupFolder(arguments.child), arguments.into)
        if distributed.is_rank_zero():
            shares = {name: seconds / (60 * outcome.minutes) for name, seconds in spent.items()}
            (arguments.into / "spent.json").write_text(json.dumps(shares))


def recipe_of(arguments: argparse.Namespace) -> Recipe:
    given = dict(model=arguments.model, lm=arguments.model, threads=arguments.threads)
    return Recipe.of(arguments.method, max_minutes=0, max_steps=1, **given)


def write_groups(arguments: argparse.Namespace, out: Path) -> None:
    """Store groups of the first documents of --data."""
    texts = [{"text": d.full_text} for d in corpus(arguments.data)[: arguments.documents]]
    text = out.with_name("corpus.jsonl")
    text.write_text("".join(json.dumps(row) + "\n" for row in texts))
    build_groups(recipe_of(arguments), [text], out, [])


def measured(arguments: argparse.Namespace, number: int, groups: Path, run: Path) -> Row:
    """One run with this number of processes."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number)]
    own = ["-m", "research.benchmarks.processes", "--child", str(groups), "--into", str(run)]
    names = ("method", "model", "threads", "steps")
    flags = [f"--{name}={getattr(arguments, name)}" for name in names]
    subprocess.run([sys.executable, *launch, *own, *flags], check=True)
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    rates = [line["tokens_per_second"] for line in lines if "loss" in line]
    return {
        "tokens_per_second": statistics.median(rates[1:]),
        **json.loads((run / "spent.json").read_text()),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--data", type=Path, help="a folder with corpus.jsonl, or one file of text")
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--method", default="revela-gated")
    parser.add_argument("--model", default=SMOL, help="of the retriever, and the LM")
    parser.add_argument("--threads", type=int, default=1, help="of a process")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--documents", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments)
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        write_groups(arguments, here / "groups")
        turns = [
            {n: measured(arguments, n, here / "groups", here / f"{turn}-{n}") for n in numbers}
            for turn, numbers in enumerate([arguments.processes] * arguments.repeats)
        ]
    first = arguments.processes[0]
    rows: list[Row] = []
    for number in arguments.processes:
        of_turns = [turn[number] for turn in turns]
        row = {name: statistics.median(t[name] for t in of_turns) for name in of_turns[0]}
        rate = "tokens_per_second"
        speed_up = statistics.median(turn[number][rate] / turn[first][rate] for turn in turns)
        what = f"training, {arguments.method}, a group per process and step"
        form = f"{number} process{'es' * (number > 1)}"
        rows.append({"what": what, "form": form, **row, f"to_{first}": speed_up})
        print_row(rows[-1])
    write_out("distributed.json", rows)


if __name__ == "__main__":
    main()
