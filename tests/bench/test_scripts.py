"""The scripts of bench/ find all that they use."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.parametrize("script", sorted(p.name for p in BENCH.glob("*.py")))
def test_every_name_that_a_script_imports_from_revela_exists(script):
    for node in ast.walk(ast.parse((BENCH / script).read_text())):  # imports inside functions, too
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("revela"):
            module = importlib.import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")


def test_the_benchmark_opens(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    assert importlib.import_module("speed").FORMS and sys.modules["speed"]
