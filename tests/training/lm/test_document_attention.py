"""Document attention: the reference against torch's own attention, and each implementation against
the reference, in fp64.
"""

from __future__ import annotations

from itertools import accumulate, pairwise, product

import pytest
import torch
import torch.nn.functional as F

from revela.training.lm import document_attention_varlen
from revela.training.lm.document_attention import (
    EPSILON,
    V_NORM_EPS,
    DocumentWeights,
    document_attention,
    select_heads,
)
from tests.naive import attention_by_sdpa, reference_attention

LENGTHS = [3, 1, 5, 2]


@pytest.fixture(autouse=True)
def flash_attention_on_a_cpu(monkeypatch):
    monkeypatch.setattr(document_attention_varlen, "attend_pairs", attention_by_sdpa)


def tensors(n_heads: int, n_groups: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(n, sum(LENGTHS), 6, dtype=torch.float64, generator=generator)
        for n in (n_heads, n_groups, n_groups)
    )
    weights = torch.rand(4, 4, dtype=torch.float64, generator=generator).fill_diagonal_(0)
    return [t.requires_grad_() for t in (query, key, value, weights / weights.sum(1, keepdim=True))]


def attend(query, key, value, weights, lengths, rows=None, epsilon=0.0, heads=None, **settings):
    documents = DocumentWeights(weights, lengths, rows, epsilon)
    inputs = query, key, value
    if heads is not None:
        inputs = select_heads(heads, *inputs)
    if settings.get("kernel") == "reference":
        norm_eps = V_NORM_EPS if settings.get("v_norm") else None
        scale = settings.get("scale") or query.shape[-1] ** -0.5
        return reference_attention(*inputs, documents, scale, norm_eps)
    return document_attention(*inputs, documents, **settings)


KERNELS = ["torch", "varlen"]


def assert_equals_the_reference(inputs, lengths, kernel, **settings):
    """Value and gradients; gives the gradients."""
    fast, slow = (attend(*inputs, lengths, kernel=k, **settings) for k in (kernel, "reference"))
    torch.testing.assert_close(fast, slow, atol=1e-12, rtol=0)
    direction = torch.randn_like(slow)
    found, want = (torch.autograd.grad((out * direction).sum(), inputs) for out in (fast, slow))
    torch.testing.assert_close(found, want, atol=1e-12, rtol=0)
    return found


@pytest.mark.parametrize("v_norm", [False, True])
def test_the_reference_is_torchs_attention_within_each_document(v_norm):
    query, key, value, weights = tensors(4, 2)
    found = attend(*(query, key, value, weights), LENGTHS, v_norm=v_norm, kernel="reference")
    bounds = list(pairwise(accumulate(LENGTHS, initial=0)))
    for head, (i, (a, b)) in product(range(4), enumerate(bounds)):
        row_RD, total_RD = query[head, a:b], 0
        for j, (c, d) in enumerate(bounds):
            value_LD = value[head // 2, c:d]
            inputs = row_RD[None], key[head // 2, c:d][None]
            output_RD = F.scaled_dot_product_attention(*inputs, value_LD[None])[0]
            if v_norm:
                norm_LD = value_LD.square().sum(1).sqrt()[:, None].expand_as(value_LD)
                norm_RD = F.scaled_dot_product_attention(*inputs, norm_LD[None])[0]
                output_RD = output_RD / (norm_RD + 1e-6)
            total_RD = total_RD + weights[i, j] * output_RD
        torch.testing.assert_close(found[head, a:b], total_RD, atol=1e-12, rtol=0)


@pytest.mark.parametrize("v_norm", [False, True])
@pytest.mark.parametrize(
    ("n_heads", "n_groups", "heads"), [(4, 4, None), (4, 2, [2, 0]), (3, 1, [2, 0])]
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_equals_the_reference(v_norm, n_heads, n_groups, heads, kernel):
    inputs = [t.detach().requires_grad_() for t in tensors(n_heads, n_groups)]
    settings = dict(heads=None if heads is None else torch.tensor(heads), scale=0.3, v_norm=v_norm)
    gradients = assert_equals_the_reference(inputs, LENGTHS, kernel, **settings)
    # The diagonal's weights are exactly 0: such pairs are skipped and get no gradient.
    assert (gradients[3].diagonal() == 0).all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("v_norm", [False, True])
def test_rows_that_are_no_documents_equal_the_reference(kernel, v_norm):
    """Three questions of 2, 0 and 3 tokens about four documents."""
    _, key, value, _ = tensors(4, 2)
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(4, 5, 6, dtype=torch.float64, generator=generator)
    weights = torch.rand(3, 4, dtype=torch.float64, generator=generator)
    inputs = [t.detach().requires_grad_() for t in (query, key, value, weights)]
    of = dict(rows=[2, 0, 3], v_norm=v_norm, heads=torch.tensor([3, 0]))
    assert_equals_the_reference(inputs, LENGTHS, kernel, **of)


def test_dropping_light_pairs_is_close_and_drops_their_gradient():
    query, key, value, _ = tensors(4, 2)
    weights = torch.tensor(
        [[0, 0.997, 0.002, 0.001], [0.5, 0, 0.5, 0], [0.2, 0.3, 0, 0.5], [1, 0, 0, 0]],
        dtype=torch.float64,
    ).requires_grad_()
    exact = attend(query, key, value, weights, LENGTHS, v_norm=True)
    assert exact.norm(dim=-1).max() <= 1 + 1e-9
    pruned = attend(query, key, value, weights, LENGTHS, v_norm=True, epsilon=0.003)
    # V-normed outputs have a norm of at most 1: the error is at most the sum of dropped weights.
    assert (exact - pruned).norm(dim=-1).max() <= 0.003
    assert not torch.equal(exact, pruned)
    settings = dict(v_norm=True, epsilon=0.003, kernel="reference")
    plain = attend(query, key, value, weights, LENGTHS, **settings)
    torch.testing.assert_close(pruned, plain, atol=1e-12, rtol=0)
    gradient = torch.autograd.grad(pruned.sum(), weights)[0]
    assert gradient[0, 2] == 0 and gradient[0, 1] != 0


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("v_norm", [False, True])
def test_documents_of_more_than_one_block_equal_the_reference(kernel, v_norm):
    """Longer than a kernel's blocks of rows and keys, with pairs of weight 0 and a document whose
    weights are all 0.
    """
    lengths = [70, 3, 33]
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(n, 106, 4, dtype=torch.float64, generator=generator) for n in (2, 1, 1)
    )
    weights = torch.tensor([[0, 0, 0.9], [0.6, 0, 0.4], [1, 0, 0]], dtype=torch.float64)
    inputs = [t.requires_grad_() for t in (query, key, value, weights)]
    assert_equals_the_reference(inputs, lengths, kernel, v_norm=v_norm)


def test_nothing_of_a_pair_is_kept_for_the_backward_pass():
    query, key, value, weights = tensors(4, 2)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t, lambda t: t
    ):
        attend(query, key, value, weights, LENGTHS)
    assert sum(kept) == query.numel() + key.numel() + value.numel() + weights.numel()


def test_the_default_epsilon_costs_less_than_a_thousandth():
    """Outputs and the gradient of Sim's scores, at a temperature that skips half of all pairs."""
    generator = torch.Generator().manual_seed(0)
    lengths = [12] * 16
    query, key, value = (
        torch.randn(n, 192, 8, dtype=torch.float64, generator=generator) for n in (4, 2, 2)
    )
    scores = torch.randn(16, 16, dtype=torch.float64, generator=generator).requires_grad_()
    direction = torch.randn(4, 192, 8, dtype=torch.float64, generator=generator)
    found = {}
    for epsilon in (0.0, EPSILON):
        weights = (scores * 6).masked_fill(torch.eye(16, dtype=torch.bool), -torch.inf).softmax(-1)
        mixed = attend(query, key, value, weights, lengths, epsilon=epsilon)
        found[epsilon] = mixed.detach(), torch.autograd.grad((mixed * direction).sum(), scores)[0]
        skipped = (weights <= epsilon).double().mean()
    assert skipped > 0.4
    for exact, pruned in zip(*found.values(), strict=True):
        assert 0 < (exact - pruned).norm() < 1e-3 * exact.norm()
