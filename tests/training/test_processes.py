"""Two processes under torchrun train as one does: the same losses and weights, the same stops."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import run_cases
import torch
from safetensors.torch import load_file
from torch.distributed.run import parse_args

from conftest import TINY, logged, make_rows
from revela.cli.recipe_flags import settings_flags
from revela.errors import RevelaError
from revela.training import distributed
from revela.training.build_groups import build_groups
from revela.training.check_settings import check_recipe
from revela.training.methods.registry import METHODS
from revela.training.recipe import Recipe
from tests.collection_folder import write_judged

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="two processes need two GPUs")

RUN = TINY | dict(groups_per_step=2, learning_rate=2e-3, max_steps=4)
TIMEOUT = 300.0  # seconds, on a loaded machine
ASKED = dict(queries="telling-sentence")
GATED = RUN | dict(method="revela-gated", gate_heads=4)
# Processes that share a batch draw other numbers for dropout than one process does.
CONTEXT = dict(context=3, context_from="corpus", context_dropout=0.0, groups="document")
CASES = {
    "all that can be trained": GATED | dict(lm_lora=True, lora_dropout=0.1),
    "several batches": GATED | dict(groups_per_step=8, groups_per_batch=2, max_steps=3),
    "dream": RUN | {"method": "dream"} | ASKED | dict(query_heads=3),
    "negatives": RUN | {"method": "dream-infonce"} | ASKED | dict(negatives=2, refresh_every=2),
    # Shared: each process embeds a part of the texts of every batch.
    "crop": RUN | dict(method="contrastive-crop", groups_per_batch=2),
    "pairs": RUN | {"method": "contrastive-pairs"} | ASKED | dict(groups_per_step=3),
    "cde": RUN | {"method": "cde"} | ASKED | CONTEXT | dict(groups_per_step=1, retriever_batch=3),
    "cde, dealt": RUN | {"method": "cde"} | ASKED | CONTEXT | dict(filter=""),
    "judged": RUN
    | dict(method="contrastive-pairs", pairs="judged", negatives=2, refresh_every=2, held_out=0.0)
    | dict(groups_per_step=1, groups="cluster", near_duplicates=0.0)
    | dict(surrogate="embedded:minilm-l6"),
    "spans": RUN | dict(method="dwell-spans", model="new:tiny", lora_rank=0),
}
SHARED = {"crop", "pairs", "cde", "judged"}
STOPS = CASES["all that can be trained"] | dict(save_every=2)
QUICK = CASES["crop"] | dict(save_every=2)
LONG = {**QUICK, "max_steps": 12}
ENDLESS = {**QUICK, "max_steps": 0}
TOKENS = {**ENDLESS, "max_tokens_read": 0.008}
EXPLODING = {**QUICK, "learning_rate": 1e30, "save_every": 1}
FAILURES = {  # what both say, then what only one does
    "other groups": "the processes read different groups or settings: start all by the",
    "in the way": "exists: choose another --out",
    "weights": "the processes have different weights after 4 steps",
    "crash": "division by zero",
    "error": "a sentence of the second process",
    "check": "a sentence of the check",
}
OF_ONE = ("crash", "error", "check")


@pytest.fixture(scope="module")
def groups(tmp_path_factory, corpus_file):
    """Folders of groups: of chunks, of chunks with queries, and of windows to crop from."""
    folder = tmp_path_factory.mktemp("groups")
    made: dict[str, Any] = {"chunks": {}, "queries": dict(method="dream-infonce", **ASKED)}
    made["windows"] = dict(method="contrastive-crop", crop_window=40)
    for name, settings in made.items():
        some = {**settings, "group_size": 8, "threads": 1, "chunk_words": 30}
        build_groups(Recipe.of(**some), [corpus_file], folder / name, [])
    write_judged(folder / "judged", make_rows(40), "train")
    return folder


@pytest.fixture(scope="module")
def case(groups, tiny_lm_folder):
    """settings -> a case of run_cases.py."""

    def of(out: Path, settings: dict[str, Any], **more: Any) -> dict[str, Any]:
        given = {"model": str(tiny_lm_folder), **settings}
        if "lm" not in Recipe.of(**given).without_effect:
            given["lm"] = str(tiny_lm_folder)
        place = groups / Recipe.of(**given).method.reads
        if "pairs" in given:
            given["pairs"], place = str(groups / "judged"), groups / "judged/corpus.jsonl"
        return {"settings": given, "groups": str(place), "out": str(out), **more}

    return of


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def begin(cache: Path, *command: Any, **more: str) -> subprocess.Popen[str]:
    """Python on this command, with these variables of its environment."""
    environment = {**os.environ, "REVELA_CACHE": str(cache), "OMP_NUM_THREADS": "1", **more}
    whole, pipe = [sys.executable, *map(str, command)], subprocess.PIPE
    return subprocess.Popen(whole, stdout=pipe, stderr=pipe, text=True, env=environment)


def torchrun(cache: Path, *command: Any) -> subprocess.Popen[str]:
    """Two processes on this command."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return begin(cache, *launch, *command)


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
    code, out, err = ended(torchrun(cache, run_cases.__file__, file))
    assert code == 0, out + err
    parts = re.split(r"^case (.*)\n", out, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def by_one(cache: Path, cases: dict[str, Any]) -> None:
    """Run these cases by this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REVELA_CACHE", str(cache))
        for some in cases.values():
            run_cases.run(some)


def seen(out: Any, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(f"{out}-{rank}.json").read_text())
    return found


def of_both(out: Any, what: str) -> list[Any]:
    return [seen(out, rank)[what] for rank in (0, 1)]


def assert_same_run(two: Path, one: Path) -> None:
    """The same losses, to 1e-6, and trained tensors; each line of metrics.jsonl once.

    AdamW divides by the size of a gradient, so that rounding of one near 0 moves a weight by a few
    hundredths of the learning rate of 1e-4, on some processors.
    """
    for row, other in zip(logged(two), logged(one), strict=True):
        for what in ("step", "loss", "learning_rate"):
            assert row[what] == pytest.approx(other[what], rel=0, abs=1e-6), what
    trained, alone = (load_file(f"{out}-0.safetensors") for out in (two, one))
    assert trained.keys() == alone.keys() and trained
    for tensor in trained:
        assert (trained[tensor] - alone[tensor]).abs().max() <= 5e-6, tensor


@pytest.fixture(scope="module")
def both(groups, case, cache, tmp_path_factory):
    """The folder in which every case was run by two processes, in one start of torchrun, and by
    one; and what the two printed of each.
    """
    folder = tmp_path_factory.mktemp("both")
    checked = {**QUICK, "check_every": 2}
    one = {f"one-{name}": case(folder / f"one-{name}", CASES[name]) for name in CASES}
    one |= {
        "tokens": case(folder / "one-tokens", TOKENS),
        "sigint": case(folder / "one-sigint", STOPS, signal=["SIGINT", 0, 3]),
        "checked": case(folder / "one-checked", checked, scores=[0, 9, 1, 1]),
        "nan": case(folder / "one-nan", EXPLODING),
    }
    by_one(cache, one)
    two = {f"two-{name}": case(folder / f"two-{name}", CASES[name]) for name in CASES}
    two |= {
        "sigint": case(folder / "sigint", STOPS, signal=["SIGINT", 1, 3]),
        "sigterm": case(folder / "sigterm", QUICK, signal=["SIGTERM", 0, 3]),
        "minutes": case(folder / "minutes", {**ENDLESS, "max_minutes": 0.01}),
        "tokens": case(folder / "tokens", TOKENS),
        "checked": case(folder / "checked", checked, scores=[0, 9, 1, 1]),
        "nan": case(folder / "nan", EXPLODING),
        "later": case(folder / "later", EXPLODING | dict(log_every=9, save_every=4, max_steps=6)),
    }
    two["long"] = case(folder / "long", LONG)
    two["one-two"] = case(folder / "one-two", STOPS, resume=True, copy=str(folder / "one-sigint"))
    for name in FAILURES:
        two[name] = case(folder / f"bad {name}", QUICK, fails=name)
    two["other groups"]["groups"] = [str(groups / "chunks"), str(groups / "windows")]
    two["in the way"]["copy"] = str(folder / "one-crop")
    said = by_two(cache, folder, two)
    shutil.copytree(folder / "sigint", folder / "two-one")
    by_one(cache, {"two-one": case(folder / "two-one", STOPS, resume=True)})
    return folder, said


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

    first, second = map(dict, of_both(two, "read"))
    dealt = first | second
    assert dealt == dict(seen(one, 0)["read"]) and second
    assert first == second if name in SHARED else first.keys().isdisjoint(second)
    all_rows = [row for rows in dealt.values() for row in rows]
    assert len(set(all_rows)) == len(all_rows)


def test_the_first_process_alone_prints(both):
    _, printed = both
    said = "".join(printed[f"two-{name}"] for name in CASES)
    assert said.count("2 processes, on the CPU\n") == len(CASES)
    assert said.count("token weights and whitening fitted") == len(CASES) - 1  # not dwell-spans


@pytest.mark.parametrize("name", ["sigint", "sigterm"])
def test_a_signal_to_one_stops_all_after_the_same_step(both, name):
    out = both[0] / name
    assert of_both(out, "steps") == [3, 3]
    assert [path.name for path in (out / "checkpoints").glob("checkpoint-*")] == ["checkpoint-3"]
    assert seen(out, 0)["error"] == "" and (out / "modules.json").is_file()


def test_limits_stop_all_after_the_same_step(both):
    folder, _ = both
    for name in ("minutes", "tokens"):
        steps = of_both(folder / name, "steps")
        assert steps[0] == steps[1] > 0 and seen(folder / name, 0)["error"] == ""
    assert_same_run(folder / "tokens", folder / "one-tokens")


def test_a_loss_that_is_not_finite_stops_all(both):
    folder, _ = both
    alone = seen(folder / "one-nan", 0)["error"]
    assert "was not finite at step" in alone and of_both(folder / "nan", "error") == [alone] * 2
    assert "was not finite at step 4" in seen(folder / "later", 0)["error"]
    assert not list((folder / "later").glob("checkpoints/checkpoint-*"))


def test_the_first_checks_and_the_best_state_is_kept(both):
    folders = [both[0] / name for name in ("checked", "one-checked")]
    for folder in folders:
        assert [row["check"]["task"] for row in logged(folder, "check")] == [9, 1, 1]
        assert logged(folder, "kept")[-1]["kept"] == 0
    saved, alone = (load_file(folder / "model.safetensors") for folder in folders)
    assert all(torch.equal(saved[tensor], alone[tensor]) for tensor in saved)


@pytest.mark.parametrize("name", ["one-two", "two-one"])
def test_a_run_is_resumed_by_another_number_of_processes(both, name):
    folder, _ = both
    assert_same_run(folder / name, folder / "one-all that can be trained")


@pytest.mark.parametrize("name", FAILURES)
def test_an_error_ends_all_by_a_sentence(both, name):
    """Each case is a run of the same processes; nothing of the one before is left behind."""
    folder, said = both
    errors = of_both(folder / f"bad {name}", "error")
    told = [FAILURES[name] in error for error in errors]
    ended = ["another process has ended" in error for error in errors]
    assert told == [not other for other in ended] and sum(ended) == (name in OF_ONE), errors
    assert said[name].count("2 processes, on the CPU\n") == 1


REFUSALS: dict[str, dict[str, Any]] = {
    "--groups-per-step 3 cannot be divided among 2 processes, 1 at a t": dict(groups_per_step=3),
    "--groups-per-step 2 cannot be divided among 2 processes, 2 at a t": dict(groups_per_batch=2),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_settings_that_two_processes_cannot_have(tmp_path, monkeypatch, message):
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    recipe = Recipe.of(**{"groups_per_step": 2, **REFUSALS[message]})
    with pytest.raises(RevelaError, match=message):
        check_recipe(recipe, tmp_path / "out", resume=False)


def test_torchrun_lets_every_flag_through():
    """It reads the whole command line, and refuses what two of its own flags begin with."""
    fields = dataclasses.fields(settings_flags(METHODS["revela"], {}))
    flags = [f"--{field.name.replace('_', '-')}" for field in fields]
    parsed = parse_args(["-m", "revela", "train", "groups", "--out", "out", "--resume", *flags])
    assert parsed.training_script_args[-len(flags) :] == flags


def test_each_process_takes_its_share_of_the_cores(monkeypatch):
    monkeypatch.setattr(distributed, "available_cores", lambda: 8)
    assert (distributed.cores(0), distributed.cores(3)) == (8, 3)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert (distributed.cores(0), distributed.cores(3)) == (2, 3)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "9")
    assert distributed.cores(0) == 1


QUOTAS = [
    ("", {}, 8),
    ("0::/box/mine\n", {"box/mine/cpu.max": "200000 100000\n"}, 2),
    ("0::/box/mine\n", {"box/cpu.max": "300000 100000", "box/mine/cpu.max": "max 100000"}, 3),
    ("0::/docker/1234\n", {"cpu.max": "50000 100000\n"}, 1),  # the container's own mount
    ("0::/\n", {"cpu.max": "250000 100000\n"}, 3),  # rounded up
    ("0::/\n", {"cpu.max": "6400000 100000\n"}, 8),  # more than the affinity
]


@pytest.mark.parametrize(("cgroup", "files", "expected"), QUOTAS)
def test_cores_are_those_of_affinity_and_quotas(tmp_path, monkeypatch, cgroup, files, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    files = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in (files | ({"proc/self/cgroup": cgroup} if cgroup else {})).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert distributed.available_cores(tmp_path) == expected


@pytest.mark.parametrize(
    ("given", "expected"), [({}, "10000"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")]
)
def test_waiting_threads_of_torch_do_not_spin(given, expected):
    code = (
        "import subprocess, sys, revela.training.distributed; show = 'import os; "
        'print(os.environ.get("GOMP_SPINCOUNT"))\'; exec(show); sys.stdout.flush(); '
        "subprocess.run([sys.executable, '-c', show], check=True)"
    )
    inherited = {k: v for k, v in os.environ.items() if "GOMP" not in k and "OMP_WAIT" not in k}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=inherited | given, capture_output=True, text=True)
    assert done.stdout.split() == [expected, expected], done.stderr


def command(case: dict[str, Any], **changes: Any) -> list[str]:
    """On the command line."""
    flags = [
        part
        for name, value in {**case["settings"], **changes}.items()
        if name != "chunk_words"  # with which the groups were stored
        for part in (f"--{name.replace('_', '-')}", *([] if value is True else [str(value)]))
    ]
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
        with suppress(OSError):  # it has ended
            environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            found |= {int(p[5:]): int(child) for p in environment if p.startswith(b"RANK=")}
    return [found[rank] for rank in sorted(found)]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds processes in /proc")
def test_a_run_killed_at_any_moment_has_an_unbroken_one_s_weights(both, case, cache, tmp_path):
    """By torchrun, which begins all processes again with --resume."""
    out, killed = tmp_path / "out", set[int]()

    def begun(step):
        reached = (out / "run.json").exists() if step else out.exists()
        fresh = set(children_of(process)) - killed
        return reached and last_checkpoint(out) >= step - 1 and len(fresh) == 2

    resumed = (*command(case(out, LONG)), "--resume")
    process = torchrun(cache, "--max-restarts", 2, *resumed)
    for kill, step in enumerate((0, 7)):  # 0: before run.json
        until(lambda step=step: begun(step), process)
        killed |= set(pids := children_of(process))
        os.kill(pids[kill % 2], signal.SIGKILL)
    code, said, errors = ended(process)
    assert code == 0, said + errors
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (out, both[0] / "long"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert [row["step"] for row in logged(out)] == list(range(1, 13))


def test_a_signal_to_one_process_is_the_exit_code_of_all(case, cache, tmp_path):
    """As torchrun starts them. The run goes on with --resume."""
    out = tmp_path / "out"
    flags = command(case(out, QUICK), max_steps=3000)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    common = dict(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=port)
    processes = [begin(cache, *flags, **common, RANK=rank, LOCAL_RANK=rank) for rank in "01"]
    until(lambda: last_checkpoint(out) > 2, processes[0])
    processes[1].send_signal(signal.SIGTERM)
    codes = [ended(process) for process in processes]
    assert [code for code, _, _ in codes] == [128 + signal.SIGTERM] * 2, codes
    assert json.loads((out / "run.json").read_text())["about"]["finished"] is False


def test_raw_text_is_refused(doing, case, corpus_file, tmp_path, monkeypatch):
    monkeypatch.setattr("revela.training.training_set.world_size", lambda: 2)
    given = {**case(tmp_path / "out", STOPS), "groups": str(corpus_file)}
    code, _, errors = doing(*command(given)[2:])
    assert code == 2 and errors.count("\n") == 1
    assert "revela: several processes need stored groups: make them with revela groups" in errors
    assert not (tmp_path / "out").exists()
