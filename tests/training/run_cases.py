"""Runs by as many processes as were started: what test_processes.py has torchrun run.

    torchrun --nproc-per-node 2 run_cases.py CASES.json

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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file

import revela.training.train as training
from revela.cli.main import print_log
from revela.errors import RevelaError
from revela.training import distributed
from revela.training.checkpoint import trainable_state
from revela.training.checks import CheckPlan
from revela.training.groups.store import GroupFolder
from revela.training.recipe import Recipe
from revela.training.step import BatchReader, Progress
from revela.training.training_set import TrainingSet

FIRST = os.environ.get("RANK", "0") == "0"


@contextmanager
def watched(case: dict[str, Any], seen: dict[str, Any]) -> Iterator[None]:
    """While open, ``seen`` gets what a process reads, how far it gets, and what it has trained."""
    rows, advance, check = BatchReader.my_rows, Progress.advance, training.check_same_weights
    failing = {"crash": ZeroDivisionError("division by zero")}
    failing["error"] = RevelaError("a sentence of the second process")

    def my_rows(reader, step):
        for number, some, share in rows(reader, step):
            seen["read"].append([number, [row for _, row in some]])
            yield number, some, share

    def advancing(progress):
        seen["steps"] += 1
        name, rank, step = case.get("signal") or (None, None, None)
        if (distributed.rank(), seen["steps"]) == (rank, step):
            signal.raise_signal(getattr(signal, name))
        if (distributed.rank(), seen["steps"]) == (1, 2) and case.get("fails") in failing:
            raise failing[case["fails"]]
        advance(progress)

    def checking(loss_module, step):
        seen["tensors"] = trainable_state(loss_module)
        if case.get("fails") == "weights" and distributed.rank() == 1 and step:
            with torch.no_grad():
                next(p for p in loss_module.parameters() if p.requires_grad).add_(1e-3)
        check(loss_module, step)

    with (
        mock.patch.object(BatchReader, "my_rows", my_rows),
        mock.patch.object(Progress, "advance", advancing),
        mock.patch.object(training, "check_same_weights", checking),
    ):
        yield


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
    rank, out = 0, Path(case["out"])
    seen: dict[str, Any] = {"read": [], "steps": 0, "error": "", "tensors": {}}
    if "copy" in case and FIRST:  # the other waits until it has joined
        shutil.copytree(case["copy"], out)
    with watched(case, seen):
        try:
            with distributed.joined():
                rank = distributed.rank()
                recipe, resume = Recipe.of(**case["settings"]), case.get("resume", False)
                groups = case["groups"]
                place = Path(groups[rank] if isinstance(groups, list) else groups)
                source = TrainingSet.read(recipe, [place]) if recipe.pairs else GroupFolder(place)
                plan = CheckPlan(checked(case))
                training.train(recipe, source, out, plan=plan, resume=resume)
        except (RevelaError, ZeroDivisionError) as error:
            seen["error"] = str(error)
    save_file(seen.pop("tensors"), out.with_name(f"{out.name}-{rank}.safetensors"))
    out.with_name(f"{out.name}-{rank}.json").write_text(json.dumps(seen))


def main() -> None:
    print_log("stdout")
    for name, case in json.loads(Path(sys.argv[1]).read_text()).items():
        if FIRST:
            logging.getLogger("revela").info(f"case {name}")
        run(case)


if __name__ == "__main__":
    main()
