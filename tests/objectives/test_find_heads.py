"""Where heads are looked for."""

from __future__ import annotations

import torch

from revela.corpus.load import read_corpus
from revela.objectives import find_heads as heads
from revela.settings import Recipe


def test_heads_are_probed_on_the_device_that_there_is(tiny_lm_folder, corpus_file, monkeypatch):
    """The device holds no numbers, so nothing is computed: the model has to get there."""
    found = []

    def probing(_recipe, lm, *_):
        found.append({parameter.device.type for parameter in lm.parameters()})
        return [(0, 0, 1.0)]

    monkeypatch.setattr(heads, "compute_device", lambda: torch.device("meta"))
    monkeypatch.setattr(heads, "sibling_heads", probing)
    folder = str(tiny_lm_folder)
    recipe = Recipe.of(model=folder, lm=folder, precision="fp32")
    _, ranking = heads.rank_heads(recipe, read_corpus([corpus_file])[0], None)
    assert found == [{"meta"}] and ranking == [(0, 0, 1.0)]
