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
def test_examples_in_docstrings(saved_retriever, tiny_lm_folder, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    embedded = {"embedded:smollm2-135m": tiny_lm_folder}
    monkeypatch.setattr(
        "revela.encoders.model_files.embedded_folder",
        lambda name: embedded.get(name, saved_retriever),
    )
    (tmp_path / "my-retriever").symlink_to(saved_retriever)  # what the examples call a retriever
    module = importlib.import_module(name)
    assert any(test.examples for test in doctest.DocTestFinder().find(module))  # they are found
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0


def test_the_main_functions_have_examples():
    assert {"revela", "revela.api", "revela.text.load", "revela.searching.index"} <= set(MODULES)
