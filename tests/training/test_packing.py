"""Packed rows equal padded batches: attention, hidden states of models, gradients."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModel, BertConfig, BertModel, RobertaConfig, RobertaModel

from conftest import tiny_config
from revela.training import packing as p

LENGTHS = (3, 7, 1, 4)


def one_by_one(query, key, value, lengths, causal, scale):
    """Attention text by text and head by head."""
    repeats, out, start = len(query) // len(key), [], 0
    for length in lengths:
        rows = slice(start, start + length)
        start += length
        heads = []
        for head in range(len(query)):
            scores = query[head, rows] @ key[head // repeats, rows].T * scale
            if causal:
                scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
            heads.append(scores.softmax(-1) @ value[head // repeats, rows])
        out.append(torch.stack(heads, 1))
    return torch.cat(out)


@pytest.mark.parametrize("lengths", [LENGTHS, (5, 5)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("explicit_scores", "side_by_side"), [(0, 256), (4, 256), (512, 256), (0, 0), (512, 0)]
)
@pytest.mark.parametrize("groups", [4, 2])
def test_attention_is_per_text(lengths, causal, explicit_scores, side_by_side, groups, monkeypatch):
    monkeypatch.setattr(p, "EXPLICIT_SCORES", explicit_scores)
    monkeypatch.setattr(p, "SIDE_BY_SIDE", side_by_side)
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(n, sum(lengths), 6, dtype=torch.float64, generator=generator).requires_grad_()
        for n in (4, groups, groups)
    ]
    fast = p.attention(*inputs, p.Layout(lengths, torch.device("cpu")), causal=causal, scale=0.3)
    slow = one_by_one(*inputs, lengths, causal, 0.3)
    torch.testing.assert_close(fast, slow, atol=1e-10, rtol=0)
    direction = torch.randn_like(slow)
    found = (torch.autograd.grad((out * direction).sum(), inputs) for out in (fast, slow))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, atol=1e-10, rtol=0)


def test_a_fused_kernel_gets_no_mask_together_with_shared_keys(monkeypatch):
    """On a GPU that would take the plain kernel, which keeps all scores."""
    monkeypatch.setattr(p, "EXPLICIT_SCORES", 0)
    given, plain = [], torch.nn.functional.scaled_dot_product_attention

    def noted(query, key, value, mask, *more, **settings):
        given.append((mask is not None, query.shape[1] != key.shape[1]))
        return plain(query, key, value, mask, *more, **settings)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    query, key = torch.randn(4, sum(LENGTHS), 6), torch.randn(2, sum(LENGTHS), 6)
    for causal in (True, False):
        p.attention(query, key, key, p.Layout(LENGTHS, torch.device("cpu")), causal=causal)
    assert given == [(False, True), (True, False)]


SIZE = dict(vocab_size=400, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
SIZE |= dict(num_attention_heads=4)


def build(kind: str):
    torch.manual_seed(0)
    if kind == "bert":
        return BertModel(BertConfig(**SIZE)).eval()
    return AutoModel.from_config(tiny_config(kind)).eval()


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt_neox", "bert"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_packed_model_equals_the_padded_one(kind, side):
    model = build(kind)
    ids = torch.randint(3, 400, (4, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1] * n + [0] * (7 - n) for n in LENGTHS])
    if side == "left":
        mask = mask.flip(1)
    features = dict(input_ids=ids, attention_mask=mask)
    if side == "left":  # transformers would count from the padding
        features["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    outputs, gradients = [], []
    weight = next(q for n, q in model.named_parameters() if "layer" in n and q.dim() == 2)
    for pack in (False, True):
        if pack:
            features.pop("position_ids", None)
            with p.packed(model):
                assert model.config._attn_implementation == p.PACKED
                out = model(**features).last_hidden_state
        else:
            out = model(**features).last_hidden_state
        outputs.append(out[mask.bool()])
        gradients.append(torch.autograd.grad(outputs[-1].pow(2).sum(), weight)[0])
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-3)
    assert "forward" not in model.__dict__ and model.config._attn_implementation != p.PACKED


def test_a_model_with_windows_is_not_packed():
    model = build("gemma3")
    with p.packed(model):
        assert model.config._attn_implementation != p.PACKED
        assert model(input_ids=torch.full((2, 3), 5)).last_hidden_state.shape == (2, 3, 32)


def test_a_model_that_counts_positions_in_another_way_is_not_packed():
    torch.manual_seed(0)
    model = RobertaModel(RobertaConfig(**SIZE)).eval()
    # As in a trained model, positions make a difference.
    torch.nn.init.normal_(model.embeddings.position_embeddings.weight)
    with p.packed(model):
        assert model.config._attn_implementation != p.PACKED
