"""The form that the benchmark measures against is the same step: same loss, same gradient."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

from conftest import Embed, tiny_config
from research.benchmarks.naive_step import NaiveStep
from revela.lm.language_model import LanguageModel
from revela.objectives.revela import RevelaLoss


@pytest.mark.parametrize(
    ("form", "everywhere"), [("gated", True), ("gated", False), ("paper", True)]
)
def test_the_naive_step_gives_the_same_loss_and_gradient(form, everywhere):
    ids = torch.randint(3, 400, (4, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1] * n + [0] * (6 - n) for n in (6, 3, 4, 6)])
    features = tuple({"input_ids": ids, "attention_mask": mask} for _ in range(3))
    gates = None
    if form == "gated":
        gates = torch.zeros(4, 4)
        gates[2, 1], gates[3] = 0.3, 0.5
    found = []
    for kind in ("naive", "ours"):
        torch.manual_seed(0)
        model, retriever = (
            LlamaForCausalLM(tiny_config("llama")).eval().requires_grad_(form == "paper"),
            Embed(),
        )
        if kind == "naive":
            step = NaiveStep(retriever, model, gates, 0.7, True, everywhere)
        else:
            step = RevelaLoss(
                retriever,
                LanguageModel(model),
                tau=0.7,
                gates_LH=gates,
                v_norm=gates is None,
                standardise=True,
            )
        loss = step(features)
        loss.backward()
        found.append(
            [loss.detach(), retriever.table.weight.grad]
            + [p.grad for p in model.parameters() if p.grad is not None]
        )
    assert len(found[0]) == len(found[1]) and (len(found[0]) > 2) == (form == "paper")
    for naive, ours in zip(*found, strict=True):
        torch.testing.assert_close(naive, ours, atol=1e-5, rtol=1e-3)
