"""Every benchmark script imports names that exist."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from conftest import make_rows

BENCHMARKS = Path(__file__).parents[2] / "research" / "benchmarks"


@pytest.mark.parametrize("script", sorted(p.name for p in BENCHMARKS.glob("*.py")))
def test_every_name_that_a_script_imports_from_revela_exists(script):
    for node in ast.walk(
        ast.parse((BENCHMARKS / script).read_text())
    ):  # imports inside functions, too
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("revela"):
            module = importlib.import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")


@pytest.mark.parametrize("script", sorted(p.stem for p in BENCHMARKS.glob("*.py")))
def test_it_opens(script):
    assert importlib.import_module(f"research.benchmarks.{script}")


def test_appends_are_timed_in_two_sizes(tmp_path):
    rows = make_rows(400, sentences=4)
    (tmp_path / "text.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    vectors = np.random.default_rng(0).normal(size=(400, 8)).astype(np.float32)
    np.save(tmp_path / "chunks.npy", vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
    (tmp_path / "chunks.json").write_text(json.dumps([row["text"] for row in rows]))
    sizes = ["--chunks", "300", "--replaced", "25"]
    command = [sys.executable, "-m", "research.benchmarks.search", "appends", *sizes]
    command += ["--text", tmp_path / "text.jsonl", "--cache", tmp_path, "--out", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [facts["replaced"] for facts in found] == [25, 25]
    assert 30 <= found[0]["chunks"] < 300 <= found[1]["chunks"]
    for facts in found:
        assert facts["commit_s"] > facts["table_s"] > 0
        assert facts["score"]["wall_p99_ms"] >= facts["score"]["wall_p50_ms"] > 0
        assert facts["score, not packed"].keys() == facts["rank"].keys() == facts["score"].keys()
