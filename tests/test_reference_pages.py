"""docs/command-line.md and docs/methods.md are what the package says now."""

from __future__ import annotations

import re
import sys

import pytest

from research.reference_pages import pages
from revela.training.methods.registry import METHODS, PRESETS
from revela.training.recipe import settings_of

PAGES = pages()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_page_is_current(path):
    assert path.read_text(encoding="utf-8") == PAGES[path], "run make reference"


def test_every_setting_is_documented():
    rows = [line for text in PAGES.values() for line in text.splitlines() if "| `--" in line]
    assert len(rows) > 70 and all(row.rstrip("| ").endswith(".") for row in rows)


def test_every_flag_in_the_header_of_a_method_is_a_setting():
    for method in METHODS.values():
        named = set(re.findall(r"--([a-z][a-z-]*)", sys.modules[method.__module__].__doc__))
        kinds = [kind for kind in METHODS.values() if kind.__module__ == method.__module__]
        known = {name.replace("_", "-") for kind in kinds for name in settings_of(kind)}
        # Of other methods that the header names, and of other verbs.
        others = {"method", "model", "pairs", "move", "negatives", "tau", "lm-lora", "mix"}
        others |= {"out", "recipe", "context-first", "negatives-from"}
        assert named - known <= others and len(named) >= 4


def test_every_preset_has_a_command():
    everything = "".join(PAGES.values())
    assert all(f"revela train docs/ --method {name} " in everything for name in PRESETS)
