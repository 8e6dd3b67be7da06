"""Kill training at random moments, resume it, and compare its weights with an unbroken run's.

Some runs have two processes, of which one or torchrun with both is killed. After each kill every
checkpoint and model with its final name must load; at the end no temporary name is left. Weights
are equal bit for bit to those of a run with as many processes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from research.benchmarks.hardening.inputs import SETTINGS
from research.benchmarks.hardening.made import (
    environment,
    fault,
    report,
    revela,
    tiny_lm,
    write_corpus,
)

STEPS = 40
FLAGS = [
    *("--group-size", "4", "--layers", "2", "--lora-rank", "4", "--gate-heads", "2"),
    *("--lm-tokens", "64", "--max-tokens", "64", "--threads", "1", "--precision", "fp32"),
    *("--max-steps", str(STEPS), "--max-minutes", "0", "--warmup-steps", "2", "--keep", "last"),
    *("--save-every", "3", "--log-every", "5", "--check-every", "10", "--groups-per-step", "2"),
]


class Trained:
    """Runs on stored groups, by one process or by two, in the folder ``home``."""

    def __init__(self, home: Path) -> None:
        self.home, self.cache = home, home / "cache"
        self.lm = tiny_lm(home / "lm")
        corpus = write_corpus(home / "corpus.jsonl", 200)
        done = revela("groups", corpus, "--out", home / "groups", *SETTINGS, cache=self.cache)
        assert done.returncode == 0, done.stderr

    def command(self, out: Path, processes: int, resume: bool) -> list[str]:
        launch = [sys.executable, "-m"]
        if processes > 1:
            launch += ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
            launch += ["-m"]
        models = ["--model", str(self.lm), "--lm", str(self.lm)]
        made = [*launch, "revela", "train", str(self.home / "groups"), "--out", str(out), *models]
        return [*made, *FLAGS, *(["--resume"] if resume else [])]

    def start(self, out: Path, processes: int, resume: bool) -> subprocess.Popen[str]:
        """Start it in a session of its own, so that all of it can be killed."""
        errors = out.with_name(f"{out.name}.log").open("w")
        return subprocess.Popen(
            self.command(out, processes, resume),
            env=environment(self.cache),
            stdout=errors,
            stderr=errors,
            text=True,
            start_new_session=True,
        )

    def weights(self, out: Path) -> dict[str, torch.Tensor]:
        """All tensors of the saved retriever."""
        return {
            f"{file.relative_to(out)}:{name}": tensor
            for file in sorted(out.rglob("*.safetensors"))
            for name, tensor in load_file(file).items()
        }


def workers(launcher: int) -> list[int]:
    """The processes that torchrun has started."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children")
    return [int(child) for child in children.read_text().split()] if children.exists() else []


def kill(process: subprocess.Popen[str], processes: int, rng: random.Random) -> str:
    """SIGKILL all of a run, or one of its processes; returns which."""
    pids = workers(process.pid) if processes > 1 else []
    if pids and rng.random() < 0.5:
        number = rng.randrange(len(pids))
        os.kill(pids[number], signal.SIGKILL)
        process.wait(120)  # torchrun ends the other
        return f"process {number}"
    os.killpg(process.pid, signal.SIGKILL)
    for worker in pids:  # each has its own session, and outlives torchrun
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
    process.wait()
    return "all"


def check_half(out: Path) -> None:
    """Raise if something with its final name cannot be read."""
    for name in ("run.json", "groups.json"):
        if (out / name).exists():
            json.loads((out / name).read_text())
    for checkpoint in out.glob("checkpoints/checkpoint-*"):
        json.loads((checkpoint / "clock.json").read_text())
        for name in ("trainable.safetensors", "optimizer.safetensors"):
            with safe_open(checkpoint / name, "pt") as opened:
                assert list(opened.keys()), checkpoint
    for best in out.glob("checkpoints/best-*.safetensors"):
        with safe_open(best, "pt") as opened:
            assert list(opened.keys()), best
    if (out / "modules.json").exists():
        from revela.encoders.torch_model import open_model

        assert open_model(out) is not None


def temporary(out: Path) -> list[str]:
    """Hidden names left by a run."""
    return sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.name.startswith("."))


def last_step(out: Path) -> int:
    """The step of the last checkpoint; 0 before the first."""
    steps = [path.name.split("-")[1] for path in out.glob("checkpoints/checkpoint-*")]
    return max(map(int, steps), default=0)


def finished(out: Path) -> bool:
    """Whether the result is saved."""
    run = out / "run.json"
    return run.exists() and bool(json.loads(run.read_text())["about"]["finished"])


def duplicates(out: Path) -> list[str]:
    """Steps with several losses in metrics.jsonl."""
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    counts = Counter(row["step"] for row in rows if "loss" in row)
    return [f"step {step} {count} times" for step, count in counts.items() if count > 1]


def one(trained: Trained, out: Path, processes: int, kills: int, rng: random.Random) -> list[Any]:
    """Kill a run so many times, then let it finish; what was killed, and at which step."""
    times: list[Any] = []
    for _ in range(kills):
        if finished(out):
            break
        process = trained.start(out, processes, resume=True)
        while process.poll() is None and not (out / "run.json").exists():
            time.sleep(0.02)
        # By the step, since a machine may be slow; then a moment later.
        step = rng.randrange(last_step(out), STEPS + 1)  # or while the result is saved
        while process.poll() is None and last_step(out) + 3 < step:
            time.sleep(0.002)
        time.sleep(0.5 * rng.random() ** 3)
        if process.poll() is not None:  # it was faster
            times.append("after its end")
            break
        whom = kill(process, processes, rng)
        check_half(out)
        times.append((whom, last_step(out)))
    log = out.with_name(f"{out.name}.log")
    if not finished(out):
        process = trained.start(out, processes, resume=True)
        assert process.wait() == 0, log.read_text()[-3000:]
    assert not fault(0, log.read_text()), log.read_text()[-3000:]
    return times


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=25, help="of each number of processes")
    parser.add_argument("--each", type=int, default=5, help="kills of a run")
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2])


def run(a: argparse.Namespace) -> int:
    """Kill and resume; the number of runs that differ from the unbroken one."""
    rng, wrong = random.Random(a.seed), 0
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hardening-") as home:
        trained = Trained(Path(home))
        for processes in a.processes:
            whole = Path(home) / f"whole-{processes}"
            process = trained.start(whole, processes, resume=False)
            assert process.wait() == 0, whole.with_name(f"{whole.name}.log").read_text()[-3000:]
            weights = trained.weights(whole)
            files = {p.relative_to(whole) for p in whole.rglob("*")}
            done = runs = 0
            before: Counter[str] = Counter()
            while done < a.kills:
                out = Path(home) / f"killed-{processes}-{runs}"
                times = one(trained, out, processes, min(a.each, a.kills - done), rng)
                done += sum(isinstance(kill, tuple) for kill in times)
                before.update(kill[0] for kill in times if isinstance(kill, tuple))
                runs += 1
                resumed = trained.weights(out)
                equal = resumed.keys() == weights.keys() and all(
                    torch.equal(resumed[name], weights[name]) for name in weights
                )
                same_files = {p.relative_to(out) for p in out.rglob("*")} == files
                left = temporary(out) + duplicates(out)
                print(processes, times, "equal" if equal else "NOT EQUAL", left, flush=True)
                wrong += not equal or bool(left) or not same_files
            figures = {"kills": done, "of": before, "runs": runs, "wrong": wrong}
            minutes = round((time.monotonic() - begun) / 60, 1)
            report("kills", seed=a.seed, processes=processes, **figures, minutes=minutes)
    return wrong
