"""Two processes under torchrun train as one does: the same losses and weights, the same stops."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import several
import torch
from safetensors.torch import load_file

from revela.groups.corpora import build_groups
from revela.settings import Recipe, presets

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="two processes need two GPUs")

TINY: dict[str, Any] = dict(
    layers=2, chunk_words=12, group_size=8, groups_per_step=2, lora_rank=4, lora_alpha=8,
    lm_tokens=64, max_tokens=64, learning_rate=2e-3, max_minutes=0, max_steps=6, warmup_steps=2,
    log_every=1, check_every=0, seed=0, threads=1, precision="fp32",
)  # fmt: skip
TIMEOUT = 150.0  # seconds; the longest start of two processes takes 45 on two idle cores
GATED = dict(gate_heads=4, gate_first_layer=0.3)
ASKED = dict(queries="telling-sentence")
PRESETS = {name: {**settings, **TINY} for name, settings in presets().items()}
for name in ("gated", "paper", "gains", "cde-revela"):
    PRESETS[name] |= GATED
for name in ("dream", "attention", "infonce", "pairs", "cde"):
    PRESETS[name] |= ASKED
for name in ("dream", "attention"):
    PRESETS[name] |= dict(query_heads=3)
PRESETS["crop"] |= dict(groups_per_batch=2)
for name in ("cde", "cde-revela"):
    PRESETS[name] |= dict(context=3, context_from="corpus", context_null=0.5, context_dropout=0.2)
GATED_PRESET = PRESETS["gated"]
OPTIONS = {
    "learn tau and gates": GATED_PRESET | dict(learn_tau=True, learn_gates=True),
    "lm lora": GATED_PRESET | dict(lm_lora=True, lora_dropout=0.1),
    "matryoshka": GATED_PRESET | dict(matryoshka=(4, 16)),
    "matryoshka of crops": PRESETS["crop"] | dict(matryoshka=(16,)),
    "retriever batch": GATED_PRESET | dict(retriever_batch=3),
    "several batches": GATED_PRESET | dict(groups_per_step=8, groups_per_batch=2),
    "iterative": GATED_PRESET | dict(groups="iterative", regroup_every=2),
}
CASES = {**PRESETS, **OPTIONS}


@pytest.fixture(scope="module")
def groups(tmp_path_factory, corpus_file):
    """Folders of groups: of chunks, of chunks with queries, and of windows to crop from."""
    folder = tmp_path_factory.mktemp("groups")
    made = {"chunks": {}, "queries": dict(objective="infonce", **ASKED)}
    made["windows"] = dict(objective="crop", crop_window=40)
    for name, settings in made.items():
        some = {**settings, "group_size": 8, "threads": 1, "chunk_words": 30}
        build_groups(Recipe.of(**some), [corpus_file], folder / name, [], None)
    return folder


@pytest.fixture(scope="module")
def case(groups, tiny_lm_folder):
    """settings -> a case of several.py."""

    def of(out: Path, settings: dict[str, Any], **more: Any) -> dict[str, Any]:
        given = {**settings, "model": str(tiny_lm_folder), "lm": str(tiny_lm_folder)}
        reads = Recipe.of(**given).objective.reads
        return {"settings": given, "groups": str(groups / reads), "out": str(out), **more}

    return of


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def torchrun(
    folder: Path, *command: Any, cache: Path, flags: Any = (), timeout: float = TIMEOUT
) -> Any:
    """Two processes on this command."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    environment = {**os.environ, "REVELA_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [str(part) for part in [*launch, *flags, *command]],
        capture_output=True, text=True, cwd=folder, env=environment, timeout=timeout, check=False,
    )  # fmt: skip


def by_two(folder: Path, cases: dict[str, Any], cache: Path) -> Any:
    file = folder / "cases.json"
    file.write_text(json.dumps(cases))
    return torchrun(folder, several.__file__, file, cache=cache)


def seen(out: Any, rank: int) -> dict[str, Any]:
    return json.loads(Path(f"{out}-{rank}.json").read_text())


def lines(out: Any) -> list[dict[str, Any]]:
    """Those of metrics.jsonl with a loss."""
    rows = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


@pytest.fixture(scope="module")
def both(case, cache, tmp_path_factory):
    """Every case, by two processes in one start of torchrun, and by this one."""
    folder = tmp_path_factory.mktemp("exact")
    two, one = (
        {name: case(folder / f"{by}-{name.replace(' ', '-')}", s) for name, s in CASES.items()}
        for by in ("two", "one")
    )
    done = by_two(folder, two, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REVELA_CACHE", str(cache))
        for some in one.values():
            several.run(some)
    return folder, done


@pytest.mark.parametrize("name", CASES)
def test_two_processes_are_one(both, name):
    folder, _ = both
    two, one = (folder / f"{by}-{name.replace(' ', '-')}" for by in ("two", "one"))
    for row, other in zip(lines(two), lines(one), strict=True):
        for what in ("step", "loss", "learning_rate"):
            assert row[what] == pytest.approx(other[what], rel=0, abs=1e-6), what
    assert len(lines(one)) == 6
    first, second, alone = (
        load_file(f"{out}-{rank}.safetensors") for out, rank in ((two, 0), (two, 1), (one, 0))
    )
    assert first.keys() == second.keys() == alone.keys() and first
    for tensor in first:
        assert torch.equal(first[tensor], second[tensor]), tensor
        assert (first[tensor] - alone[tensor]).abs().max() <= 1e-6, tensor
    assert any(tensor.abs().max() > 0 for key, tensor in first.items() if "lora_B" in key)


@pytest.mark.parametrize("name", CASES)
def test_every_group_is_read_once(both, name):
    folder, _ = both
    two, one = (folder / f"{by}-{name.replace(' ', '-')}" for by in ("two", "one"))
    read = sorted(seen(two, 0)["read"] + seen(two, 1)["read"], key=lambda b: b[0])
    dealt = {}
    for number, rows in read:
        dealt.setdefault(number, []).extend(rows)
    assert dealt == dict(seen(one, 0)["read"])
