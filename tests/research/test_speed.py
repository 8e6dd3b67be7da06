"""Which sizes and forms of a step are timed on the CPU, with tiny models in place of SmolLM2."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from conftest import Embed, tiny_config
from research.benchmarks import forms, speed
from revela.lm.language_model import LanguageModel
from revela.settings import Recipe, presets

CPU = torch.device("cpu")


class Retriever(torch.nn.Sequential):
    """One table, which ``packed`` leaves as it is."""

    def __init__(self):
        super().__init__(Embed())
        self[0].model = torch.nn.Module()
        self[0].model.__dict__["_packs"] = False


def tiny_models(preset, layers, lm_layers):
    lm = LlamaForCausalLM(tiny_config("llama")).eval().requires_grad_(preset == "paper")
    models = forms.Models(
        Recipe.of(**presets()[preset]), Retriever(), LanguageModel(lm), CPU, False
    )
    return models, lambda text, **_: {"input_ids": [3 + ord(c) % 90 for c in text]}


@pytest.fixture
def measure(monkeypatch):
    """Rows of steps, and what memory was asked for; ``too_big`` says which form does not fit from
    how many chunks on.
    """

    def run(too_big=(), **changes):
        asked = []

        def peak(preset, form, chunks, lm_layers, arguments):
            asked.append((form, chunks))
            return None if (form, chunks) in too_big else 0.1

        monkeypatch.setattr(speed, "peak", peak)
        monkeypatch.setattr(speed, "smollm", tiny_models)
        settings = dict(
            preset=["gated"],
            lm_layers=[0],
            layers=2,
            chunks=[4, 2],
            tokens=6,
            forms=speed.FORMS,
            naive_up_to=2,
            repeats=1,
            limit=60.0,
        )
        arguments = argparse.Namespace(**{**settings, "no_memory": False, **changes})
        return speed.steps(arguments, ["some words of a text"] * 40), asked

    return run


def test_naive_forms_are_timed_up_to_their_limit_and_ours_beyond(measure):
    rows, asked = measure()
    timed = {(r["form"], r["chunks"]) for r in rows if "seconds" in r}
    assert (
        timed
        == {(f, n) for f in speed.FORMS for n in (2, 4) if n == 2 or "naive" not in f}
        == set(asked)
    )
    left_out = [r for r in rows if "note" in r]
    assert {r["form"] for r in left_out} == {forms.NAIVE, forms.LEAN} and all(
        "--naive-up-to" in r["note"] for r in left_out
    )
    assert [r["chunks"] for r in rows] == sorted(r["chunks"] for r in rows)
    assert all(r["to_ours"] == 1 for r in rows if r["form"] == forms.OURS)
    assert json.loads(json.dumps(rows)) == rows


def test_a_form_that_did_not_fit_is_not_tried_with_more_chunks(measure):
    rows, asked = measure(
        too_big=[(forms.PLAIN, 2)], chunks=[2, 3, 4], forms=[forms.OURS, forms.PLAIN]
    )
    assert [chunks for form, chunks in asked if form == forms.PLAIN] == [2]
    plain = [r for r in rows if r["form"] == forms.PLAIN]
    assert len(plain) == 3 and all(
        r["note"] == "more memory than this machine has free" for r in plain
    )


def test_the_paper_has_no_open_layers_and_time_is_limited(measure):
    rows, _ = measure(preset=["paper"], chunks=[2], repeats=9, limit=0.0)
    assert {r["form"] for r in rows} == set(speed.FORMS) - {forms.LEAN}
    assert {r["turns"] for r in rows} == {1}


def test_a_text_too_short_for_the_largest_group_is_refused_at_once(measure):
    with pytest.raises(SystemExit, match="give a larger --data"):
        measure(chunks=[2, 4000])


def test_memory_that_is_not_free_is_not_taken():
    take = "torch.ones(2**26); print('some', flush=True); torch.ones(2**29); print('more')"
    code = f"import torch; from research.benchmarks.speed import *; limit_memory(1.0); {take}"
    root = Path(speed.__file__).parents[2]
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert run.stdout == "some\n" and run.returncode != 0
