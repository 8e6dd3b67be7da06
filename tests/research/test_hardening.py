"""Short forms of the benchmark of faults: kills in training, and fuzzed inputs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs Linux")


def figures(*command: str) -> dict:
    """The last line of a part that found nothing wrong."""
    part = [sys.executable, "-W", "ignore", "-m", "research.benchmarks.hardening", *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        part, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_killed_run_resumes_and_ends_as_an_unbroken_one():
    found = figures("kills", "--kills", "1", "--each", "1", "--processes", "1", "--seed", "1")
    assert found["kills"] == 1 and found["wrong"] == 0


def test_fuzzed_inputs_are_read_or_refused_in_one_sentence(tmp_path):
    failures = tmp_path / "failures.jsonl"
    found = figures("fuzz", "--inputs", "20", "--seed", "1", "--failures", str(failures))
    assert found["inputs"] == 20 and found["failures"] == 0 and not failures.exists()
    assert found["codes"].keys() == {"0", "2"} and min(found["codes"].values()) > 1
    assert len(found["kinds"]) == 5
