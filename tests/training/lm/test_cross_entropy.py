"""The loss by blocks equals F.cross_entropy(F.linear(...)), value and gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from revela.training.lm import cross_entropy as lce


def tensors(bias: bool):
    generator = torch.Generator().manual_seed(0)
    hidden = (3 * torch.randn(11, 6, dtype=torch.float64, generator=generator)).requires_grad_()
    weight = torch.randn(50, 6, dtype=torch.float64, generator=generator)
    targets = torch.randint(50, (11,), generator=generator)
    offset = torch.randn(50, dtype=torch.float64, generator=generator) if bias else None
    return hidden, weight, targets, offset


@pytest.mark.parametrize("rows", [1, 4, 100])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("trained", [False, True], ids=["frozen head", "trained head"])
def test_equals_the_plain_form(rows, bias, trained, monkeypatch):
    monkeypatch.setattr(lce, "LOGITS_PER_BLOCK", rows * 50)
    hidden, weight, targets, offset = tensors(bias)
    head = [t.requires_grad_() for t in (weight, offset) if trained and t is not None]
    got = lce.linear_cross_entropy(hidden, weight, targets, offset)
    want = F.cross_entropy(F.linear(hidden, weight, offset), targets, reduction="none")
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)
    slopes = torch.linspace(-1, 2, 11, dtype=torch.float64)
    gradients = [torch.autograd.grad(losses @ slopes, [hidden, *head]) for losses in (got, want)]
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("device", "blocks"), [("cpu", 6), ("meta", 1)])
def test_a_gpu_computes_a_step_in_one_block(device, blocks, monkeypatch):
    """The 875 rows and 49,152 words of the module's docstring."""
    blocks_made, subtract = [], torch.Tensor.__isub__
    noted = lambda a, b: blocks_made.append(len(a)) or subtract(a, b)  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "__isub__", noted)
    hidden, weight = torch.empty(875, 2, device=device), torch.empty(49_152, 2, device=device)
    lce.linear_cross_entropy(hidden, weight, torch.zeros(875, dtype=torch.long, device=device))
    assert len(blocks_made) == blocks and sum(blocks_made) == 875


@pytest.mark.parametrize("trained", [False, True], ids=["frozen head", "trained head"])
def test_keeps_no_logits(trained):
    hidden, weight, targets, offset = tensors(trained)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        lce.linear_cross_entropy(hidden, weight.requires_grad_(trained), targets, offset)
    assert (11, 50) not in kept and (trained or kept == [hidden.shape])


def test_without_a_gradient_and_with_scores_out_of_range():
    hidden, weight, targets, _ = tensors(False)
    assert lce.linear_cross_entropy(1e4 * hidden.detach(), weight, targets).isfinite().all()


def test_exact_logits_are_not_rounded_to_the_weights_precision():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = ((4 * torch.randn(n, 64, generator=generator)).bfloat16() for n in (200, 300))
    targets = torch.randint(300, (200,), generator=generator)
    want = F.cross_entropy(hidden.float() @ weight.float().T, targets, reduction="none")
    exact, rounded = (
        lce.linear_cross_entropy(hidden, weight, targets, exact=exact) for exact in (True, False)
    )
    torch.testing.assert_close(exact, want, atol=1e-3, rtol=1e-5)
    assert (rounded - want).abs().median() > 10 * (exact - want).abs().max()
