"""On a pretended GPU: a step stays on one device, rarely waits, and gives the CPU's results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from torch.utils import backend_registration

import test_records
from test_records import FILE, OF_THE_LARGEST, RELATIVE

ROOT = Path(__file__).parents[2]
WAITS = 2  # of a step of the default, after the first
# On a device these do what another run does: other queries, temperatures and prompts.
LIKE_OTHERS = {"pairs", "paper without dropout", "paper-code", "dream-paper", "cde-revela"}
RUNS = [name for name in test_records.RUNS if name not in LIKE_OTHERS]
HALF = "gated in bf16"


@pytest.fixture(scope="module")
def found(tiny_lm_folder):
    found = printed_by("on_a_pretend_gpu", tiny_lm_folder)
    return found["cpu"], found["pretend"]


@pytest.fixture(scope="module")
def runs(tiny_lm_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    return printed_by("train_on_a_pretend_gpu", tiny_lm_folder, out, *RUNS, HALF)


def printed_by(script, *arguments):
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this PyTorch cannot pretend a device")
    command = [sys.executable, "-W", "ignore", "-m", f"tests.research.{script}", *arguments]
    paths = os.pathsep.join(map(str, [ROOT / "src", ROOT / "tests"]))
    given = dict(capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths})
    run = subprocess.run(list(map(str, command)), **given)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


STEPS = ["gated, 1 groups", "gated, 3 groups", "paper, 1 groups", "paper, 3 groups"]


@pytest.mark.parametrize("case", [*STEPS, "gains", "replug", "dream"])
def test_a_step_gives_the_cpus_loss_and_gradients(found, case):
    cpu, device = (side[case] for side in found)
    assert device["loss"] == pytest.approx(cpu["loss"], rel=1e-6)
    greatest = max(abs(g) for part in cpu["gradients"] for g in part)
    # At the temperature of paper a row's weights may all be 0 or 1.
    assert greatest > 0 or case.startswith("paper")
    for one, other in zip(cpu["gradients"], device["gradients"], strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-4 * greatest + 1e-12)


@pytest.mark.parametrize("preset", ["gated", "paper"])
def test_in_bf16_autocast_as_on_cuda_gives_nearly_the_same(found, preset):
    cpu, device = (side[f"{preset}, bf16"] for side in found)
    assert device["loss"] == pytest.approx(cpu["loss"], rel=2e-2)
    for gradient in device["gradients"]:
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("preset", ["gated", "paper"])
def test_a_step_waits_once_for_which_weights_count(found, preset, groups):
    cpu, device = (side[f"{preset}, {groups} groups"]["waits"] for side in found)
    assert list(device.values()) == [1] and cpu == {}


@pytest.mark.parametrize(("name", "count"), {"gains": 1, "replug": 0, "dream": 2}.items())
def test_other_objectives_wait_only_for_which_weights_count(found, name, count):
    """``dream`` once for each of two groups."""
    assert sum(found[1][name]["waits"].values()) == count


def test_both_searches_for_heads_take_place_on_the_device(found):
    for one, other in zip(*(side["probes"] for side in found), strict=True):
        np.testing.assert_allclose(other, one, atol=1e-6)


def test_the_fit_stays_on_the_device(found):
    """It waits for sums, their square and the pooled vectors once each, not for each batch."""
    cpu, device = (side["fit"] for side in found)
    assert (cpu["devices"], device["devices"]) == (["cpu"], ["pretend"])
    np.testing.assert_allclose(device["cosines"], cpu["cosines"], atol=1e-5)
    assert sum(n for place, n in device["waits"].items() if "retriever/fit.py" in place) == 3


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_stops_and_resumes_there_is_the_recorded_one(runs, name):
    """Groups, probes of heads, the fit, steps, checks, checkpoints and the saved best state."""
    assert "error" not in runs[name], runs[name]["error"]
    recorded = json.loads(FILE.read_text())[name]
    for what in ("loss", "grad_norm"):
        found, values = runs[name][what], recorded[what][:3]
        least = OF_THE_LARGEST * max(values)
        assert found == pytest.approx(values, rel=RELATIVE, abs=least), what


def test_a_run_in_bf16_is_nearly_the_recorded_one(runs):
    half, recorded = runs[HALF], json.loads(FILE.read_text())["gated"]
    assert "error" not in half, half["error"]
    assert half["loss"] == pytest.approx(recorded["loss"][:3], rel=2e-3)
    assert half["loss"] != runs["gated"]["loss"]


def test_a_step_of_the_default_waits_for_the_device_this_often(runs):
    """After the first; of the loop itself only the line of metrics.jsonl waits, and once."""
    for step in runs["gated"]["waits"][1:]:
        assert sum(step.values()) <= WAITS, step
        assert sum(n for place, n in step.items() if "training/" in place) == 1, step
        assert not any("retriever/" in place for place in step), step


def test_an_index_and_an_evaluation_there_find_the_same(runs):
    cpu, device = runs["cpu"], runs["pretend"]
    assert (cpu["devices"], device["devices"]) == (["cpu"], ["pretend"])
    assert device["scores"] == cpu["scores"]
    for (one, score), (other, same) in zip(cpu["hits"], device["hits"], strict=True):
        assert one == other and same == pytest.approx(score, abs=1e-6)
