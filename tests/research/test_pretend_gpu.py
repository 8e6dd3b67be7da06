"""On a pretended GPU: a step stays on one device, rarely waits, and gives the CPU's results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from torch.utils import backend_registration

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tiny_lm_folder):
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this PyTorch cannot pretend a device")
    module = ["-m", "tests.research.on_a_pretend_gpu", tiny_lm_folder]
    command = [sys.executable, "-W", "ignore", *map(str, module)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    return found["cpu"], found["pretend"]


STEPS = ["gated, 1 groups", "gated, 3 groups", "paper, 1 groups", "paper, 3 groups"]


@pytest.mark.parametrize("case", [*STEPS, "gains", "replug", "attention", "dream"])
def test_a_step_gives_the_cpus_loss_and_gradients(found, case):
    cpu, device = (side[case] for side in found)
    assert device["loss"] == pytest.approx(cpu["loss"], rel=1e-6)
    greatest = max(abs(g) for part in cpu["gradients"] for g in part)
    assert greatest > 0 or case.startswith(
        "paper"
    )  # at its temperature a row's weights may all be 0 or 1
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


@pytest.mark.parametrize(
    ("name", "count"), {"gains": 1, "replug": 0, "attention": 0, "dream": 2}.items()
)
def test_other_objectives_wait_only_for_which_weights_count(found, name, count):
    """``dream`` once for each of two groups."""
    assert sum(found[1][name]["waits"].values()) == count


def test_both_searches_for_heads_take_place_on_the_device(found):
    for one, other in zip(*(side["probes"] for side in found), strict=True):
        np.testing.assert_allclose(other, one, atol=1e-6)


def test_the_fit_stays_on_the_device(found):
    cpu, device = (side["fit"] for side in found)
    assert (cpu["devices"], device["devices"]) == (["cpu"], ["pretend"])
    np.testing.assert_allclose(device["cosines"], cpu["cosines"], atol=1e-5)


def test_the_gpus_part_of_the_benchmark_gets_through(found):
    cpu, device = (side["bench"] for side in found)
    assert device == cpu and {"ours", "bound", "all logits at once"} <= set(device)
    assert not any("Error" in form for form in device)
