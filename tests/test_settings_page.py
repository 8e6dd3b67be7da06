"""docs/settings.md is what the settings are now."""

from __future__ import annotations

from research.settings_page import PAGE, page


def test_the_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == page(), "run make settings"


def test_every_setting_is_documented():
    rows = [line for line in page().splitlines() if line.startswith("| `--")]
    assert len(rows) > 90 and all(row.rstrip("| ").endswith(".") for row in rows)
