"""docs/command-line.md and docs/methods.md are what the package says now."""

from __future__ import annotations

import pytest

from research.reference_pages import pages

PAGES = pages()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_page_is_current(path):
    assert path.read_text(encoding="utf-8") == PAGES[path], "run make reference"


def test_every_setting_is_documented():
    rows = [line for text in PAGES.values() for line in text.splitlines() if "| `--" in line]
    assert len(rows) > 70 and all(row.rstrip("| ").endswith(".") for row in rows)


def test_every_preset_has_a_command():
    from revela.training.methods.registry import PRESETS

    everything = "".join(PAGES.values())
    assert all(f"revela train docs/ --method {name} " in everything for name in PRESETS)
