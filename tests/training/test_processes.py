"""Two processes under torchrun train as one does: the same losses and weights, the same stops."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import several
import torch
from safetensors.torch import load_file
from torch.distributed.run import parse_args

from revela import processes
from revela.cli.flags import settings_flags
from revela.errors import RevelaError
from revela.groups.corpora import build_groups
from revela.retriever.build import load_retriever
from revela.settings import Recipe, presets
from revela.training.run import train

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="two processes need two GPUs")

TINY: dict[str, Any] = dict(
    layers=2, chunk_words=12, group_size=8, groups_per_step=2, lora_rank=4, lora_alpha=8,
    lm_tokens=64, max_tokens=64, learning_rate=2e-3, max_minutes=0, max_steps=6, warmup_steps=2,
    log_every=1, check_every=0, seed=0, threads=1, precision="fp32",
)  # fmt: skip
TIMEOUT = 300.0  # seconds, on a loaded machine; the longest start takes 88 of the processor
GATED = dict(gate_heads=4, gate_first_layer=0.3)
ASKED = dict(queries="telling-sentence")
SAME_STEPS = ("paper-code", "dream-paper")  # as paper and dream, with other numbers
PRESETS = {n: {**settings, **TINY} for n, settings in presets().items() if n not in SAME_STEPS}
for name in ("gated", "paper", "gains", "cde-revela"):
    PRESETS[name] |= GATED
for name in ("dream", "attention", "infonce", "pairs", "cde"):
    PRESETS[name] |= ASKED
for name in ("dream", "attention"):
    PRESETS[name] |= dict(query_heads=3)
PRESETS["crop"] |= dict(groups_per_batch=2)
PRESETS["spans"] |= dict(model="new:tiny", lora_rank=0)
for name in ("cde", "cde-revela"):
    PRESETS[name] |= dict(context=3, context_from="corpus", context_null=0.5, context_dropout=0.2)
OPTIONS = {
    "learn-tau-and-gates": PRESETS["gated"] | dict(learn_tau=True, learn_gates=True),
    "lm-lora": PRESETS["gated"] | dict(lm_lora=True, lora_dropout=0.1),
    "matryoshka": PRESETS["gated"] | dict(matryoshka=(4, 16)),
    "matryoshka-of-crops": PRESETS["crop"] | dict(matryoshka=(16,)),
    "retriever-batch": PRESETS["gated"] | dict(retriever_batch=3),
    "several-batches": PRESETS["gated"] | dict(groups_per_step=8, groups_per_batch=2, max_steps=3),
    "iterative": PRESETS["gated"] | dict(groups="iterative", regroup_every=2),
    "negatives": PRESETS["infonce"] | dict(negatives=2, refresh_every=2, mined_from=20),
    "shared-lm": PRESETS["gated"] | dict(shard_lm=True),
}
CASES = {**PRESETS, **OPTIONS}
STOPS = PRESETS["gated"] | dict(learn_tau=True, learn_gates=True, lm_lora=True, lora_dropout=0.1)
STOPS |= dict(save_every=2)
ENDLESS = {**STOPS, "max_steps": 0}
TOKENS = {**ENDLESS, "max_tokens_read": 0.02}
EXPLODING = {**STOPS, "learning_rate": 1e30, "save_every": 1}


@pytest.fixture(scope="module")
def groups(tmp_path_factory, corpus_file):
    """Folders of groups: of chunks, of chunks with queries, and of windows to crop from."""
    folder = tmp_path_factory.mktemp("groups")
    made: dict[str, Any] = {"chunks": {}, "queries": dict(objective="infonce", **ASKED)}
    made["windows"] = dict(objective="crop", crop_window=40)
    for name, settings in made.items():
        some = {**settings, "group_size": 8, "threads": 1, "chunk_words": 30}
        build_groups(Recipe.of(**some), [corpus_file], folder / name, [], None)
    return folder


@pytest.fixture(scope="module")
def case(groups, tiny_lm_folder):
    """settings -> a case of several.py."""

    def of(out: Path, settings: dict[str, Any], **more: Any) -> dict[str, Any]:
        given = {"model": str(tiny_lm_folder), "lm": str(tiny_lm_folder), **settings}
        reads = Recipe.of(**given).objective.reads
        return {"settings": given, "groups": str(groups / reads), "out": str(out), **more}

    return of


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def torchrun(cache: Path, *command: Any, flags: Any = ()) -> subprocess.Popen[str]:
    """Two processes on this command."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    environment = {**os.environ, "REVELA_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [str(part) for part in [*launch, *flags, *command]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of torchrun, which ends its processes when it is stopped."""
    try:
        out, err = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        process.terminate()
        raise
    return process.returncode, out, err


def by_two(cache: Path, folder: Path, cases: dict[str, Any]) -> dict[str, str]:
    """Run these cases by two processes; what they print of each."""
    file = folder / "cases.json"
    file.write_text(json.dumps(cases))
    code, out, err = ended(torchrun(cache, several.__file__, file))
    assert code == 0, out + err
    parts = re.split(r"^case (.*)\n", out, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def by_one(cache: Path, cases: dict[str, Any]) -> None:
    """Run these cases by this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REVELA_CACHE", str(cache))
        for some in cases.values():
            several.run(some)


def seen(out: Any, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(f"{out}-{rank}.json").read_text())
    return found


def lines(out: Path) -> list[dict[str, Any]]:
    """Those of metrics.jsonl with a loss."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


def assert_same_run(two: Path, one: Path) -> None:
    """The same losses, to 1e-6, and trained tensors; each line of metrics.jsonl once.

    AdamW divides by the size of a gradient, so that rounding of one near 0 moves a weight by a few
    hundredths of the learning rate of 1e-4, on some processors.
    """
    for row, other in zip(lines(two), lines(one), strict=True):
        for what in ("step", "loss", "learning_rate"):
            assert row[what] == pytest.approx(other[what], rel=0, abs=1e-6), what
    trained, alone = (load_file(f"{out}-0.safetensors") for out in (two, one))
    assert trained.keys() == alone.keys() and trained
    for tensor in trained:
        assert (trained[tensor] - alone[tensor]).abs().max() <= 5e-6, tensor


@pytest.fixture(scope="module")
def by_both(groups, case, cache, tmp_path_factory):
    """The folder in which every case was run by two processes, in one start of torchrun, and what
    these printed of each.
    """
    folder = tmp_path_factory.mktemp("both")
    one = {
        "whole": case(folder / "whole", STOPS),
        "tokens": case(folder / "one-tokens", TOKENS),
        "sigint": case(folder / "one-sigint", STOPS, signal=["SIGINT", 0, 3]),
        "checked": case(folder / "one-checked", {**STOPS, "check_every": 3}, scores=[0, 9, 1, 1]),
        "nan": case(folder / "one-nan", EXPLODING),
    }
    by_one(cache, one)
    cases = {f"two-{name}": case(folder / f"two-{name}", CASES[name]) for name in CASES}
    cases |= stopping(case, folder)
    for name, begun in (("two-two", "sigterm"), ("one-two", "one-sigint")):
        more = dict(resume=True, copy=str(folder / begun))
        cases[name] = case(folder / name, STOPS, **more)
    cases |= failing(case, folder, groups)
    return folder, by_two(cache, folder, cases)


@pytest.fixture(scope="module")
def both(by_both, case, cache):
    """Every case that ends well, by two processes, and by this one."""
    folder, said = by_both
    one = {name: case(folder / f"one-{name}", settings) for name, settings in CASES.items()}
    one["shared-lm"]["settings"]["shard_lm"] = False
    by_one(cache, one)
    return folder, "".join(said[f"two-{name}"] for name in CASES)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_are_one(both, name):
    folder, _ = both
    two, one = folder / f"two-{name}", folder / f"one-{name}"
    assert_same_run(two, one)
    first, second = (load_file(f"{two}-{rank}.safetensors") for rank in (0, 1))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[tensor], second[tensor]) for tensor in first)
    moved = (tensor.abs().max() > 0 for key, tensor in first.items() if "lora_B" in key)
    assert any(moved) or CASES[name].get("lora_rank") == 0
    files = [{path.relative_to(out) for path in out.rglob("*")} for out in (two, one)]
    assert files[0] == files[1] and Path("modules.json") in files[0]


@pytest.mark.parametrize("name", CASES)
def test_every_group_is_read_once(both, name):
    folder, _ = both
    two, one = folder / f"two-{name}", folder / f"one-{name}"
    dealt: dict[int, list[int]] = {}
    for number, rows in seen(two, 0)["read"] + seen(two, 1)["read"]:
        dealt.setdefault(number, []).extend(rows)
    assert dealt == dict(seen(one, 0)["read"]) and len(seen(two, 1)["read"]) > 0
    all_rows = [row for rows in dealt.values() for row in rows]
    assert len(set(all_rows)) == len(all_rows) or name == "iterative"


def test_each_process_holds_half_of_a_shared_lm(both, tiny_lm_folder):
    folder, _ = both
    weights = load_file(tiny_lm_folder / "model.safetensors")
    in_layers = sum(tensor.numel() for name, tensor in weights.items() if ".layers." in name)
    for rank in (0, 1):
        assert seen(folder / "two-shared-lm", rank)["sharded"] == in_layers / 2
        assert seen(folder / "two-gated", rank)["sharded"] == 0


def test_the_first_process_alone_prints(both):
    _, said = both
    assert said.count("2 processes, on the CPU\n") == len(CASES)
    assert said.count("token weights and whitening fitted") == len(CASES) - 2  # not paper, spans


def stopping(case: Any, folder: Path) -> dict[str, Any]:
    """Runs that end early."""
    return {
        "sigint": case(folder / "sigint", STOPS, signal=["SIGINT", 1, 3]),
        "sigterm": case(folder / "sigterm", STOPS, signal=["SIGTERM", 0, 3]),
        "minutes": case(folder / "minutes", {**ENDLESS, "max_minutes": 0.02}),
        "tokens": case(folder / "tokens", TOKENS),
        "checked": case(folder / "checked", {**STOPS, "check_every": 3}, scores=[0, 9, 1, 1]),
        "nan": case(folder / "nan", EXPLODING),
        "later": case(folder / "later", {**EXPLODING, "log_every": 9, "save_every": 4}),
    }


@pytest.fixture(scope="module")
def stopped(by_both):
    """Where runs that end early are, by two processes and by one; and the same run as a whole."""
    return by_both[0]


@pytest.mark.parametrize("name", ["sigint", "sigterm"])
def test_a_signal_to_one_stops_all_after_the_same_step(stopped, name):
    assert [seen(stopped / name, rank)["steps"] for rank in (0, 1)] == [3, 3]
    kept = (stopped / name / "checkpoints").glob("checkpoint-*")
    assert [path.name for path in kept] == ["checkpoint-3"]
    assert seen(stopped / name, 0)["error"] == "" and (stopped / name / "modules.json").is_file()


def test_limits_stop_all_after_the_same_step(stopped):
    for name in ("minutes", "tokens"):
        steps = [seen(stopped / name, rank)["steps"] for rank in (0, 1)]
        assert steps[0] == steps[1] > 1 and seen(stopped / name, 0)["error"] == ""
    assert_same_run(stopped / "tokens", stopped / "one-tokens")


def test_a_loss_that_is_not_finite_stops_all(stopped):
    for name in ("nan", "later"):
        errors = sorted(seen(stopped / name, rank)["error"] for rank in (0, 1))
        assert errors[0] == "2" and "was not finite at step" in errors[1]
        assert seen(stopped / name, 0)["steps"] == seen(stopped / name, 1)["steps"]
    assert seen(stopped / "one-nan", 0)["error"] in [
        seen(stopped / "nan", rank)["error"] for rank in (0, 1)
    ]
    assert not list((stopped / "later").glob("checkpoints/checkpoint-*"))


def test_the_first_checks_and_the_best_state_is_kept(stopped):
    for name in ("checked", "one-checked"):
        metrics = (stopped / name / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in metrics]
        assert [row["check"]["task"] for row in rows if "check" in row] == [9, 1, 1]
        assert rows[-1]["kept"] == 0
    saved, alone = (
        load_file(stopped / name / "model.safetensors") for name in ("checked", "one-checked")
    )
    assert all(torch.equal(saved[tensor], alone[tensor]) for tensor in saved)


@pytest.fixture(scope="module")
def resumed(stopped, case, cache):
    """2 -> 2, 1 -> 2 and 2 -> 1 processes."""
    shutil.copytree(stopped / "sigint", stopped / "two-one")
    by_one(cache, {"two-one": case(stopped / "two-one", STOPS, resume=True)})
    return stopped


@pytest.mark.parametrize("name", ["two-two", "one-two", "two-one"])
def test_a_run_is_resumed_by_another_number_of_processes(resumed, name):
    assert_same_run(resumed / name, resumed / "whole")
    assert not (resumed / name / "checkpoints").exists()


FAILURES = {
    "other groups": "the processes read different groups: give a folder that all machines see",
    "indivisible": "--groups-per-step 3 cannot be dealt out to 2 processes, 1 at a time: give a",
    "batches": "--groups-per-step 2 cannot be dealt out to 2 processes, 2 at a time: give a mult",
    "crops": "--groups-per-batch 1 cannot be dealt out to 2 processes, which compare the texts",
    "context": "--context with --objective crop takes one process",
    "in the way": "exists: choose another --out",
    "trained lm": "--shard-lm is for a frozen LM",
    "corpus": "several processes train on stored groups: make them once with revela groups CORPUS",
    "crash": "process 1 ended by a ZeroDivisionError: see its traceback",
    "error": "a sentence of the second process",
    "check": "a sentence of the check",
    "weights": "the processes have different weights after 6 steps",
}


def failing(case: Any, folder: Path, groups: Path) -> dict[str, Any]:
    settings = {
        "indivisible": {**STOPS, "groups_per_step": 3},
        "batches": {**STOPS, "groups_per_batch": 2},
        "crops": PRESETS["crop"] | dict(groups_per_batch=1),
        "context": PRESETS["crop"] | dict(context=3),
        "trained lm": {**STOPS, "shard_lm": True},
    }
    cases = {
        name: case(folder / f"bad-{i}", settings.get(name, STOPS), fails=name)
        for i, name in enumerate(FAILURES)
    }
    cases["other groups"]["groups"] = [str(groups / "chunks"), str(groups / "windows")]
    cases["in the way"]["copy"] = str(folder / "whole")
    return cases


@pytest.fixture(scope="module")
def failed(by_both, case, groups):
    folder, said = by_both
    outs = {name: folder / f"bad-{i}" for i, name in enumerate(FAILURES)}
    return outs, "".join(said[name] for name in FAILURES)


@pytest.mark.parametrize("name", FAILURES)
def test_an_error_ends_all_by_one_sentence(failed, name):
    """In the other process it is SystemExit(2); a crash keeps its traceback."""
    outs, _ = failed
    errors = [seen(outs[name], rank)["error"] for rank in (0, 1)]
    assert sum(FAILURES[name] in error for error in errors) == 1, errors
    assert ("division by zero" if name == "crash" else "2") in errors


def test_the_same_processes_may_join_again(failed):
    """Each case above is a run of its own; nothing of it is left behind."""
    outs, said = failed
    assert said.count("2 processes, on the CPU\n") == len(FAILURES)
    assert not outs["indivisible"].exists()


def test_torchrun_lets_every_flag_through():
    """It reads the whole command line, and refuses what two of its own flags begin with."""
    fields = dataclasses.fields(settings_flags("revela"))
    flags = [f"--{field.name.replace('_', '-')}" for field in fields]
    parsed = parse_args(["-m", "revela", "train", "groups", "--out", "out", "--resume", *flags])
    assert parsed.training_script_args[-len(flags) :] == flags


def test_one_process_has_no_lm_to_share(tmp_path):
    with pytest.raises(RevelaError, match="--shard-lm deals the LM out to several processes"):
        train(Recipe.of(shard_lm=True), [], tmp_path / "out")


def test_each_process_takes_its_share_of_the_cores(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert (processes.cores(0), processes.cores(3)) == (8, 3)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert (processes.cores(0), processes.cores(3)) == (2, 3)


def flags_of(settings: dict[str, Any]) -> list[str]:
    """On the command line."""
    return [
        part
        for name, value in settings.items()
        for part in (f"--{name.replace('_', '-')}", *([] if value is True else [str(value)]))
    ]


def command(case: dict[str, Any], **changes: Any) -> list[str]:
    flags = flags_of({**case["settings"], **changes})
    return ["-m", "revela", "train", case["groups"], "--out", case["out"], *flags]


def until(condition: Any, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline and process.poll() is None, ended(process)
        time.sleep(0.05)


def last_checkpoint(out: Path) -> int:
    """Its step; 0 if there is none."""
    return max((int(p.name.split("-")[1]) for p in out.glob("checkpoints/checkpoint-*")), default=0)


def children_of(launcher: subprocess.Popen[str]) -> list[int]:
    """Their process ids, in the order of the processes."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    found = {}
    for child in children:
        environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        ranks = [part[5:] for part in environment if part.startswith(b"RANK=")]
        if ranks:
            found[int(ranks[0])] = int(child)
    return [found[rank] for rank in sorted(found)]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds processes in /proc")
def test_on_the_command_line(case, cache, tmp_path):
    """Stopped by signals to torchrun, killed, and begun again by it; then whole."""
    out = tmp_path / "out"
    given = case(out, STOPS)
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        begun = last_checkpoint(out)
        resume = ["--resume"] if begun else []
        process = torchrun(cache, *command(given, max_steps=3000, save_every=1), *resume)
        until(lambda before=begun: last_checkpoint(out) > before + 2, process)
        process.send_signal(signal_number)
        _, said, errors = ended(process)
        assert said.splitlines()[0] == "2 processes, on the CPU", said
        assert said.count("stopping after this step and saving") == 1, said + errors
        assert said.count(f"saved to {out}, continue with --resume") == 1, said + errors
        assert (out / "modules.json").is_file() and last_checkpoint(out) > begun
    begun = last_checkpoint(out)
    steps = begun + 60
    again = command(given, max_steps=steps, save_every=1)
    process = torchrun(cache, *again, "--resume", flags=["--max-restarts", 1])
    until(lambda: last_checkpoint(out) > begun + 2, process)
    os.kill(children_of(process)[1], signal.SIGKILL)
    code, said, errors = ended(process)
    assert code == 0, said + errors
    assert said.count("2 processes, on the CPU") == 2 and f"{steps} steps in" in said
    assert [row["step"] for row in lines(out)] == list(range(1, steps + 1))
    assert load_retriever(out) is not None and not (out / "checkpoints").exists()


def test_raw_text_on_the_command_line(case, cache, corpus_file, tmp_path):
    given = {**case(tmp_path / "out", STOPS), "groups": str(corpus_file)}
    code, said, errors = ended(torchrun(cache, *command(given)))
    assert code != 0 and said.strip() == "2 processes, on the CPU"
    assert errors.count("revela: several processes train on stored groups") == 1, errors
    assert (
        errors.count("exitcode  : 2 ") == 2
        and "Traceback (most recent" not in (errors.split("torch/distributed")[0])
    )
    assert not (tmp_path / "out").exists()
