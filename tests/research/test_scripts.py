"""Every benchmark script imports names that exist."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

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
