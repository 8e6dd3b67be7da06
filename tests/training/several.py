"""Runs by as many processes as were started: what test_processes.py has torchrun run.

    torchrun --nproc-per-node 2 several.py CASES.json

CASES.json maps a name to a case: "settings" of the recipe, "groups" and "out" (folders), and maybe
"resume" (of a "copy" of a run), "scores" of checks, "signal" (its name, process and step), or how
it "fails". Each process writes what it saw of a case to OUT-RANK.json, and what it has trained to
OUT-RANK.safetensors. The first prints the name of each case before it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from revela import processes
from revela.cli.printing import print_log
from revela.errors import RevelaError
from revela.groups.folder import GroupFolder
from revela.settings import Recipe
from revela.training.checkpoint import trainable_state
from revela.training.loop import Loop
from revela.training.progress import Progress
from revela.training.run import Run, train

FIRST = os.environ.get("RANK", "0") == "0"


class Watched:
    """What a process reads, how far it gets, and what it has trained at the end."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case, self.read, self.steps, self.sharded = case, [], 0, 0
        self.tensors: dict[str, torch.Tensor] = {}
        self.my_batches, self.advance, self.finish = Loop._my_batches, Progress.advance, Run.finish

    def __enter__(self) -> Watched:
        def my_batches(loop, step):
            for number, rows, share in self.my_batches(loop, step):
                self.read.append([number, [row for _, row in rows]])
                yield number, rows, share

        def advance(progress):
            self.steps += 1
            name, rank, step = self.case.get("signal") or (None, None, None)
            if (processes.index(), self.steps) == (rank, step):
                signal.raise_signal(getattr(signal, name))
            if (processes.index(), self.steps) == (1, 2):
                self.fail()
            self.advance(progress)

        def finish(run):
            self.tensors = trainable_state(run.loop.objective)
            parameters = run.loop.objective.parameters()
            shards = [p.to_local().numel() for p in parameters if isinstance(p, DTensor)]
            self.sharded = sum(shards)
            if self.case.get("fails") == "weights" and processes.index() == 1:
                with torch.no_grad():
                    run.loop.parameters[0].flatten()[0] += 1e-3
            return self.finish(run)

        Loop._my_batches, Progress.advance, Run.finish = my_batches, advance, finish
        return self

    def fail(self) -> None:
        """What befalls the second process after two steps."""
        if self.case.get("fails") == "crash":
            raise ZeroDivisionError("division by zero")
        if self.case.get("fails") == "error":
            raise RevelaError("a sentence of the second process")

    def __exit__(self, *_: object) -> None:
        Loop._my_batches, Progress.advance, Run.finish = self.my_batches, self.advance, self.finish


def checked(case: dict[str, Any]) -> Any:
    """A label-free check that gives the scores of a case, or fails."""
    scores = iter(case.get("scores") or [])

    def check(encoder: Any) -> dict[str, float]:
        if case.get("fails") == "check":
            raise RevelaError("a sentence of the check")
        return {"task": next(scores)}

    return check if "scores" in case or case.get("fails") == "check" else None


def run(case: dict[str, Any]) -> None:
    """Train, and write down how it went."""
    rank, out, said = 0, Path(case["out"]), ""
    if "copy" in case and FIRST:  # the other waits until it has joined
        shutil.copytree(case["copy"], out)
    with Watched(case) as watched:
        try:
            with processes.joined():
                rank = processes.index()
                groups = case["groups"]
                source = GroupFolder(Path(groups[rank] if isinstance(groups, list) else groups))
                recipe, resume = Recipe.of(**case["settings"]), case.get("resume", False)
                given = source.documents if case.get("fails") == "corpus" else source
                train(recipe, given, out, check=checked(case), resume=resume)
        except (RevelaError, SystemExit, ZeroDivisionError) as error:
            said = str(error)
    seen = {"read": watched.read, "steps": watched.steps, "sharded": watched.sharded, "error": said}
    out.with_name(f"{out.name}-{rank}.json").write_text(json.dumps(seen))
    save_file(watched.tensors, out.with_name(f"{out.name}-{rank}.safetensors"))


def main() -> None:
    print_log("stdout")
    for name, case in json.loads(Path(sys.argv[1]).read_text()).items():
        if FIRST:
            logging.getLogger("revela").info(f"case {name}")
        run(case)


if __name__ == "__main__":
    main()
