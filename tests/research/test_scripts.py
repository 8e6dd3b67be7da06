"""Every benchmark script imports names that exist."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "research" / "benchmarks"
SCRIPTS = sorted(p.relative_to(BENCHMARKS).as_posix() for p in BENCHMARKS.rglob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_opens_and_every_name_that_it_imports_from_revela_exists(script):
    importlib.import_module(".".join(["research.benchmarks", *Path(script).with_suffix("").parts]))
    for node in ast.walk(ast.parse((BENCHMARKS / script).read_text())):  # in functions, too
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("revela"):
            module = importlib.import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
