"""Where heads are looked for."""

from __future__ import annotations

import pytest
import torch

from revela.corpus.read import read_corpus
from revela.objectives import find_heads as heads
from revela.settings import Recipe, presets


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


@pytest.mark.parametrize("drop", [False, True])
def test_outliers_are_dropped_if_the_recipe_says_so_and_either_ranking_is_kept(
    tiny_lm_folder, corpus_file, tmp_path, monkeypatch, drop
):
    asked = []

    def scoring(lm, examples, drop_outliers):
        asked.append(drop_outliers)
        scores_LH = torch.zeros(lm.n_layers, lm.n_heads)
        scores_LH[2, 3 if drop_outliers else 1] = 1
        return scores_LH

    monkeypatch.setattr(heads, "score_query_heads", scoring)
    monkeypatch.setenv("REVELA_CACHE", str(tmp_path))
    settings = presets()["dream"] | dict(
        model=str(tiny_lm_folder),
        lm=str(tiny_lm_folder),
        precision="fp32",
        queries="telling-sentence",
    )
    documents, _ = read_corpus([corpus_file])
    best = {}
    for this in (drop, not drop, drop):
        _, ranking = heads.rank_heads(Recipe.of(**settings, drop_outliers=this), documents, None)
        best[this] = ranking[0][:2]
    assert best == {False: (2, 1), True: (2, 3)} and asked == [drop, not drop]
