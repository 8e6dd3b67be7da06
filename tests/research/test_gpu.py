"""Flash attention on a GPU agrees with torch, and a timed step has all its numbers."""

from __future__ import annotations

import pytest
import torch

from conftest import tiny_config
from research.benchmarks import steps
from revela.training.lm import document_attention_varlen
from revela.training.lm.document_attention import DocumentWeights, document_attention
from tests.naive import attention_by_sdpa

CPU = torch.device("cpu")


@pytest.mark.parametrize("method", ["revela-gated", "revela-paper"])
def test_a_step_has_all_its_numbers_and_all_kernels_the_same_loss(monkeypatch, method):
    monkeypatch.setattr(steps, "has_fast_bf16", lambda _: False)
    monkeypatch.setattr(document_attention_varlen, "attend_pairs", attention_by_sdpa)
    models = steps.build(tiny_config("qwen2"), method, CPU)
    models.group_size = 2
    ours, varlen, bound = rows = list(
        steps.step_rows("tiny", models, steps.batch(models, 2, 6), repeats=1)
    )
    assert [r["form"] for r in rows] == steps.FORMS and not any("note" in r for r in rows)
    assert ours["loss"] == pytest.approx(varlen["loss"], abs=1e-4)
    assert bound["to_bound"] == 1 and ours["to_bound"] > 0
    assert all(r["tokens_per_second"] == pytest.approx(24 / r["seconds"]) for r in rows)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("v_norm", [False, True])
def test_on_a_gpu_flash_attention_agrees(v_norm):
    """Output and gradients of both kernels, by the norm of their difference."""
    generator, on = torch.Generator().manual_seed(0), ("cuda", torch.bfloat16)
    states = [torch.randn(n, 106, 64, generator=generator).to(*on) for n in (4, 2, 2)]
    weights = torch.tensor([[0, 0.3, 0.7], [0.6, 0, 0.4], [1, 0, 0]]).to("cuda")
    tensors, found = [t.requires_grad_() for t in (*states, weights)], []
    documents = DocumentWeights(weights, [70, 3, 33], epsilon=1e-4)
    for kernel in ("torch", "varlen"):
        mixed = document_attention(*states, documents, v_norm=v_norm, kernel=kernel)
        found.append([mixed.detach(), *torch.autograd.grad(mixed.float().square().sum(), tensors)])
    for a, b in zip(*found, strict=True):
        assert a.dtype == b.dtype
        assert (a.double() - b.double()).norm() <= 3e-2 * a.double().norm()
