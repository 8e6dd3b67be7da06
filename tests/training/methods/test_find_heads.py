"""Where heads are looked for."""

from __future__ import annotations

import pytest
import torch

from revela.errors import RevelaError
from revela.text.load import read_corpus
from revela.training import rank_heads as heads
from revela.training.methods import dream, revela
from revela.training.recipe import Recipe


def test_a_ranking_is_kept_for_its_text(tiny_lm_folder, corpus_file, tmp_path, monkeypatch):
    monkeypatch.setenv("REVELA_CACHE", str(tmp_path))
    documents, folder = read_corpus([corpus_file])[0], str(tiny_lm_folder)
    probed = []
    for method, probe in ((revela, "probe_heads"), (dream, "score_query_heads")):
        original = getattr(method, probe)
        monkeypatch.setattr(
            method, probe, lambda *given, original=original: probed.append(0) or original(*given)
        )
    asked = dict(queries="telling-sentence", chunk_words=20)
    for settings in ({}, {"method": "dream"} | asked):
        recipe = Recipe.of(**settings, model=folder, lm=folder, precision="fp32", group_size=4)
        found = [
            heads.rank_heads(recipe, some, None)[1]
            for some in (documents[:40], documents[40:], documents[:40])
        ]
        assert len(probed) == 2 and found[0] == found[2] != found[1]
        probed.clear()


def test_a_method_without_heads_is_refused():
    with pytest.raises(RevelaError, match="contrastive-crop reads no heads: give --method revela"):
        heads.rank_heads(Recipe.of("contrastive-crop"), [], None)


def test_heads_are_probed_on_the_device_that_there_is(tiny_lm_folder, corpus_file, monkeypatch):
    """The device holds no numbers, so nothing is computed: the model has to get there."""
    found = []

    def probing(lm, *_):
        found.append({parameter.device.type for parameter in lm.parameters()})
        return [(0, 0, 1.0)]

    monkeypatch.setattr(heads, "compute_device", lambda: torch.device("meta"))
    monkeypatch.setattr(heads, "sibling_heads", probing)
    folder = str(tiny_lm_folder)
    recipe = Recipe.of(model=folder, lm=folder, precision="fp32")
    _, ranking = heads.rank_heads(recipe, read_corpus([corpus_file])[0], None)
    assert found == [{"meta"}] and ranking == [(0, 0, 1.0)]
