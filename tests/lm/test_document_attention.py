"""document_attention against the naive loop: outputs and every gradient, fp64."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from revela.lm.document_attention import document_attention
from revela.settings import Recipe
from tests.objectives import naive

LENGTHS = [3, 1, 5, 2]


def tensors(n_heads: int, n_groups: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    total = sum(LENGTHS)
    query = torch.randn(n_heads, total, 6, dtype=torch.float64, generator=generator)
    key = torch.randn(n_groups, total, 6, dtype=torch.float64, generator=generator)
    value = torch.randn(n_groups, total, 6, dtype=torch.float64, generator=generator)
    weights = torch.rand(4, 4, dtype=torch.float64, generator=generator).fill_diagonal_(0)
    return [t.requires_grad_() for t in (query, key, value, weights / weights.sum(1, keepdim=True))]


NO_INTERPRETER = (
    find_spec("triton") is None or torch.cuda.is_available()
)  # compiled kernels: tests/research/test_gpu.py
KERNELS = [
    "torch",
    pytest.param(
        "triton", marks=pytest.mark.skipif(NO_INTERPRETER, reason="Triton does not interpret here")
    ),
]


@pytest.mark.parametrize("v_norm", [False, True])
@pytest.mark.parametrize(("n_heads", "n_groups"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("heads", [None, [2, 0]])
@pytest.mark.parametrize("kernel", KERNELS)
def test_equals_the_naive_loop(v_norm, n_heads, n_groups, heads, kernel):
    inputs = tensors(n_heads, n_groups)
    inputs = [t.detach().requires_grad_() for t in inputs]
    picked = None if heads is None else torch.tensor(heads)
    fast = document_attention(
        *inputs, LENGTHS, heads=picked, scale=0.3, v_norm=v_norm, kernel=kernel
    )
    slow = naive.document_attention(*inputs, LENGTHS, 0.3, v_norm=v_norm, heads=heads)
    torch.testing.assert_close(fast, slow, atol=1e-10, rtol=0)
    direction = torch.randn_like(slow)
    for got, want in zip(
        torch.autograd.grad((fast * direction).sum(), inputs),
        torch.autograd.grad((slow * direction).sum(), inputs),
        strict=True,
    ):
        mask = (
            ~torch.eye(4, dtype=torch.bool)
            if got.shape == (4, 4)
            else torch.ones_like(got, dtype=torch.bool)
        )
        # The diagonal has weight exactly 0, so the fast path skips it and gives it no gradient.
        torch.testing.assert_close(got[mask], want[mask], atol=1e-10, rtol=0)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("v_norm", [False, True])
def test_rows_that_are_no_documents_equal_the_naive_loop(kernel, v_norm):
    """Three questions of 2, 0 and 3 tokens about four documents."""
    _, key, value, _ = tensors(4, 2)
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(4, 5, 6, dtype=torch.float64, generator=generator)
    weights = torch.rand(3, 4, dtype=torch.float64, generator=generator)
    inputs = [t.detach().requires_grad_() for t in (query, key, value, weights)]
    fast = document_attention(
        *inputs, LENGTHS, rows=[2, 0, 3], heads=torch.tensor([3, 0]), v_norm=v_norm, kernel=kernel
    )
    slow = naive.document_attention(
        *inputs, LENGTHS, 6**-0.5, v_norm=v_norm, heads=[3, 0], rows=[2, 0, 3]
    )
    torch.testing.assert_close(fast, slow, atol=1e-10, rtol=0)
    direction = torch.randn(slow.shape, dtype=torch.float64, generator=generator)
    found = (torch.autograd.grad((out * direction).sum(), inputs) for out in (fast, slow))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, atol=1e-10, rtol=0)


def test_dropping_light_pairs_is_close_and_drops_their_gradient():
    query, key, value, _ = tensors(4, 2)
    weights = torch.tensor(
        [[0, 0.997, 0.002, 0.001], [0.5, 0, 0.5, 0], [0.2, 0.3, 0, 0.5], [1, 0, 0, 0]],
        dtype=torch.float64,
    ).requires_grad_()
    exact = document_attention(query, key, value, weights, LENGTHS, v_norm=True)
    pruned = document_attention(query, key, value, weights, LENGTHS, v_norm=True, epsilon=0.003)
    # With V-norm each pair's output has norm <= 1, so the error is at most the sum of the dropped
    # weights.
    assert (exact - pruned).norm(dim=-1).max() <= 0.003
    assert not torch.equal(exact, pruned)
    gradient = torch.autograd.grad(pruned.sum(), weights)[0]
    assert gradient[0, 2] == 0 and gradient[0, 1] != 0


def test_v_normalised_output_has_at_most_norm_one():
    query, key, value, weights = tensors(4, 2)
    output = document_attention(query, key, 100 * value, weights, LENGTHS, v_norm=True)
    assert output.norm(dim=-1).max() <= 1 + 1e-9


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("v_norm", [False, True])
def test_documents_of_more_than_one_block(kernel, v_norm):
    """Longer than a kernel's blocks of rows and keys, with a pair left out and one document that
    nobody reads.
    """
    lengths = [70, 3, 33]
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(n, 106, 4, dtype=torch.float64, generator=generator) for n in (2, 1, 1)
    )
    weights = torch.tensor([[0, 0, 0.9], [0.6, 0, 0.4], [1, 0, 0]], dtype=torch.float64)
    inputs = [t.requires_grad_() for t in (query, key, value, weights)]
    fast = document_attention(*inputs, lengths, v_norm=v_norm, kernel=kernel)
    direction = torch.randn(fast.shape, dtype=torch.float64, generator=generator)
    slow = all_pairs(*inputs, lengths, v_norm)
    torch.testing.assert_close(fast, slow, atol=1e-10, rtol=0)
    pairs = weights.detach() > 0
    got, want = (torch.autograd.grad((out * direction).sum(), inputs) for out in (fast, slow))
    for a, b in zip(got[:3], want[:3], strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=0)
    torch.testing.assert_close(got[3][pairs], want[3][pairs], atol=1e-10, rtol=0)


def all_pairs(query, key, value, weights, lengths, v_norm):
    """The same by one large product; held to the row-by-row loop by the test above."""
    bounds = [sum(lengths[:j]) for j in range(len(lengths) + 1)]
    owners = torch.repeat_interleave(torch.tensor(lengths))
    total = 0.0
    for j in range(len(lengths)):
        keys, values = key[:, bounds[j] : bounds[j + 1]], value[:, bounds[j] : bounds[j + 1]]
        attention = (query @ keys.transpose(1, 2) * query.shape[-1] ** -0.5).softmax(-1)
        output = attention @ values
        if v_norm:
            output = output / (attention @ values.norm(dim=-1, keepdim=True) + 1e-6)
        total = total + weights[owners, j][:, None] * output
    return total


def test_nothing_of_a_pair_is_kept_for_the_backward_pass():
    query, key, value, weights = tensors(4, 2)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t, lambda t: t
    ):
        document_attention(query, key, value, weights, LENGTHS)
    assert sum(kept) == query.numel() + key.numel() + value.numel() + weights.numel()


def test_the_default_epsilon_costs_less_than_a_thousandth():
    """Outputs, and the gradient to the scores under Sim, at a temperature so low that half of all
    pairs are skipped.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = [12] * 16
    query, key, value = (
        torch.randn(n, 192, 8, dtype=torch.float64, generator=generator) for n in (4, 2, 2)
    )
    scores = torch.randn(16, 16, dtype=torch.float64, generator=generator).requires_grad_()
    direction = torch.randn(4, 192, 8, dtype=torch.float64, generator=generator)
    found = {}
    for epsilon in (0.0, Recipe().epsilon):
        weights = (scores * 6).masked_fill(torch.eye(16, dtype=torch.bool), -torch.inf).softmax(-1)
        mixed = document_attention(query, key, value, weights, lengths, epsilon=epsilon)
        found[epsilon] = mixed.detach(), torch.autograd.grad((mixed * direction).sum(), scores)[0]
        skipped = (weights <= epsilon).double().mean()
    assert skipped > 0.4
    for exact, pruned in zip(*found.values(), strict=True):
        assert 0 < (exact - pruned).norm() < 1e-3 * exact.norm()
