"""The presets with -paper in their name have the papers' settings: published_settings.csv has each
that a paper states, ours beside it, and why where the two differ.
"""

from __future__ import annotations

import csv
import re
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest

from revela.training.methods.registry import PRESETS
from revela.training.recipe import Recipe

with Path(__file__).with_suffix("").with_name("published_settings.csv").open() as file:
    ROWS = list(csv.DictReader(file))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['paper']}: {row['setting']}")
def test_a_preset_has_what_its_paper_states(row):
    ours = tomllib.loads(re.sub(r" (?=\w+=)", "\n", row["ours"]))
    assert bool(ours) == bool(row["presets"]) and (ours or row["differs, why"])
    for preset in row["presets"].split():
        settings = Recipe.of(preset).to_dict()
        assert {name: settings[name] for name in ours} == ours
    with suppress(ValueError):
        published = float(row["value"])
        assert published == next(iter(ours.values()), None) or row["differs, why"]


def test_every_preset_of_a_paper_is_held():
    held = {preset for row in ROWS for preset in row["presets"].split()}
    assert held == {name for name in PRESETS if "-paper" in name or name.endswith("-contriever")}
