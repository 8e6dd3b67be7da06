"""On a pretended GPU: a run stays on one device, rarely waits, and gives the CPU's results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

import test_records
from test_records import FILE, OF_THE_LARGEST, RELATIVE

ROOT = Path(__file__).parents[2]
# Of a step after the first; a step of paper has two passes.
WAITS = {"revela-gated": 2, "revela-paper": 3, "replug": 1, "dream": 2}
# On a device these do what another run does: other queries, temperatures and prompts.
LIKE_OTHERS = {"contrastive-pairs", "paper without dropout", "revela-paper-code", "replug-paper"}
LIKE_OTHERS |= {"dream-paper", "cde-revela", "cde-paper", "cde-paper-small", "dwell-crop-paper"}
LIKE_OTHERS |= {"contrastive-contriever", "dwell-spans-paper"}
LIKE_OTHERS |= {"dream-infonce", "options"}  # crops are compared by the same loss
RUNS = [name for name in test_records.RUNS if name not in LIKE_OTHERS]
HALF = "revela-gated in bf16"


@pytest.fixture(scope="module")
def runs(tiny_lm_folder, tmp_path_factory):
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this PyTorch cannot pretend a device")
    command = [sys.executable, "-W", "ignore", "-m", "tests.research.train_on_a_pretend_gpu"]
    command += [tiny_lm_folder, tmp_path_factory.mktemp("runs"), *RUNS, HALF]
    paths = os.pathsep.join(map(str, [ROOT / "src", ROOT / "tests"]))
    given = dict(capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths})
    run = subprocess.run(list(map(str, command)), **given)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


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
    half, recorded = runs[HALF], json.loads(FILE.read_text())["revela-gated"]
    assert "error" not in half, half["error"]
    assert half["loss"] == pytest.approx(recorded["loss"][:3], rel=2e-3)
    assert half["loss"] != runs["revela-gated"]["loss"]


@pytest.mark.parametrize("name", WAITS)
def test_a_step_waits_for_the_line_of_metrics_and_for_which_weights_count(runs, name):
    for step in runs[name]["waits"][1:]:
        if any("packing" in place for place in step):
            continue  # the first of a resumed run, which tries whether the model can be packed
        assert sum(step.values()) == WAITS[name], step
        assert sum(n for place, n in step.items() if "training/step" in place) == 1, step


def test_an_index_and_an_evaluation_there_find_the_same(runs):
    cpu, device = runs["cpu"], runs["pretend"]
    assert (cpu["devices"], device["devices"]) == (["cpu"], ["pretend"])
    assert device["scores"] == cpu["scores"]
    for (one, score), (other, same) in zip(cpu["hits"], device["hits"], strict=True):
        assert one == other and same == pytest.approx(score, abs=1e-6)
