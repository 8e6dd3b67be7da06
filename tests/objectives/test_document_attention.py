"""document_attention against the naive loop: outputs and every gradient, fp64."""

from __future__ import annotations

import naive
import pytest
import torch

from revela.objectives.document_attention import document_attention

LENGTHS = [3, 1, 5, 2]


def tensors(n_heads: int, n_groups: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    total = sum(LENGTHS)
    query = torch.randn(n_heads, total, 6, dtype=torch.float64, generator=generator)
    key = torch.randn(n_groups, total, 6, dtype=torch.float64, generator=generator)
    value = torch.randn(n_groups, total, 6, dtype=torch.float64, generator=generator)
    weights = torch.rand(4, 4, dtype=torch.float64, generator=generator).fill_diagonal_(0)
    return [t.requires_grad_() for t in (query, key, value, weights / weights.sum(1, keepdim=True))]


@pytest.mark.parametrize("v_norm", [False, True])
@pytest.mark.parametrize(("n_heads", "n_groups"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("heads", [None, [2, 0]])
def test_equals_the_naive_loop(v_norm, n_heads, n_groups, heads):
    inputs = tensors(n_heads, n_groups)
    inputs = [t.detach().requires_grad_() for t in inputs]
    picked = None if heads is None else torch.tensor(heads)
    fast = document_attention(*inputs, LENGTHS, heads=picked, scale=0.3, v_norm=v_norm)
    slow = naive.document_attention(*inputs, LENGTHS, 0.3, v_norm=v_norm, heads=heads)
    torch.testing.assert_close(fast, slow, atol=1e-10, rtol=0)
    direction = torch.randn_like(slow)
    for got, want in zip(
        torch.autograd.grad((fast * direction).sum(), inputs), torch.autograd.grad((slow * direction).sum(), inputs), strict=True
    ):
        mask = ~torch.eye(4, dtype=torch.bool) if got.shape == (4, 4) else torch.ones_like(got, dtype=torch.bool)
        # The diagonal has weight exactly 0, so the fast path skips it and gives it no gradient.
        torch.testing.assert_close(got[mask], want[mask], atol=1e-10, rtol=0)


def test_dropping_light_pairs_is_close_and_drops_their_gradient():
    query, key, value, _ = tensors(4, 2)
    weights = torch.tensor(
        [[0, 0.997, 0.002, 0.001], [0.5, 0, 0.5, 0], [0.2, 0.3, 0, 0.5], [1, 0, 0, 0]], dtype=torch.float64
    ).requires_grad_()
    exact = document_attention(query, key, value, weights, LENGTHS, v_norm=True)
    pruned = document_attention(query, key, value, weights, LENGTHS, v_norm=True, epsilon=0.003)
    # With V-norm each pair's output has norm <= 1, so the error is at most the sum of the dropped weights.
    assert (exact - pruned).norm(dim=-1).max() <= 0.003
    assert not torch.equal(exact, pruned)
    gradient = torch.autograd.grad(pruned.sum(), weights)[0]
    assert gradient[0, 2] == 0 and gradient[0, 1] != 0


def test_v_normalised_output_has_at_most_norm_one():
    query, key, value, weights = tensors(4, 2)
    output = document_attention(query, key, 100 * value, weights, LENGTHS, v_norm=True)
    assert output.norm(dim=-1).max() <= 1 + 1e-9
