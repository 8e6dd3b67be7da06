"""Where heads are looked for."""

from __future__ import annotations

import dataclasses

import torch

from revela.config import Recipe
from revela.data.text import read_corpus
from revela.train import heads


def test_heads_are_probed_on_the_device_that_there_is(tiny_lm_folder, corpus_file, monkeypatch):
    """The device is one that holds no numbers, so nothing is computed: the model has to get there."""
    found = []

    def probing(_recipe, lm, *_):
        found.append({parameter.device.type for parameter in lm.parameters()})
        return [(0, 0, 1.0)]

    monkeypatch.setattr(heads, "compute_device", lambda: torch.device("meta"))
    monkeypatch.setattr(heads, "sibling_heads", probing)
    recipe = dataclasses.replace(Recipe(), model=str(tiny_lm_folder), lm=str(tiny_lm_folder), precision="fp32")
    _, ranking = heads.rank_heads(recipe, read_corpus([corpus_file])[0], None, print)
    assert found == [{"meta"}] and ranking == [(0, 0, 1.0)]
