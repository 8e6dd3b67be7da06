"""The examples in the docstrings run and give what they show."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import revela

PACKAGE = Path(revela.__file__).parent
MODULES = [
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(PACKAGE.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    module = importlib.import_module(name)
    assert any(test.examples for test in doctest.DocTestFinder().find(module))  # they are found
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0


def test_the_functions_that_begin_a_pipeline_have_examples():
    assert {"revela.corpus.read", "revela.corpus.chunk"} <= set(MODULES)
