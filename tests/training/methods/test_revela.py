"""Sim, gates and the head probe."""

from __future__ import annotations

import math

import pytest
import torch

from conftest import Embed, frozen_llama
from revela.training.lm.document_attention import InBatchAttention
from revela.training.lm.language_model import LanguageModel
from revela.training.methods.heads import ranked_heads
from revela.training.methods.revela import (
    BASE_GATE,
    RevelaLoss,
    gates_on_heads,
    hard_rows,
    in_batch_weights,
    mean_entropy,
    probe_heads,
)


def test_sim_by_hand_and_asymmetric():
    half = 0.5**0.5
    query = torch.tensor([[1.0, 0], [0, 1], [half, half]])
    passage = torch.tensor([[1.0, 0], [half, half], [0, 1]])
    weights = in_batch_weights(query, passage, 0.5)
    want = (torch.tensor([0.5**0.5, 0.0]) / 0.5).softmax(0)  # row 0 against passages 1 and 2
    torch.testing.assert_close(weights[0, 1:], want)
    assert weights[0, 1] != weights[1, 0] and torch.equal(weights.diagonal(), torch.zeros(3))
    torch.testing.assert_close(weights.sum(1), torch.ones(3))
    sim = torch.tensor([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]])
    assert mean_entropy(sim) == pytest.approx(0.5 * math.log(2)) and hard_rows(sim) == 0.5


def test_standardised_weights_by_hand_and_with_equal_cosines():
    query = torch.tensor([[1.0, 0.0]] * 3, requires_grad=True)
    passage = torch.tensor([[0.0, 1.0], [0.6, 0.8], [1.0, 0.0]])
    weights = in_batch_weights(query, passage, 2.0, standardise=True)
    torch.testing.assert_close(weights[0, 1:], (torch.tensor([0.6, 1.0]) / 0.2 / 2.0).softmax(0))
    same = in_batch_weights(query, query, 2.0, standardise=True)
    same[0, 1].backward()
    assert same[0, 1] == same[0, 2] == 0.5 and query.grad.isfinite().all()


def test_bf16_ties_soften_a_saturated_row():
    query = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    passage = torch.tensor([[1.0, 0.0], [0.9999, 0.0141], [0.9998, 0.02]])
    sharp = in_batch_weights(query, passage, 1e-4)[0]
    tied = in_batch_weights(query.bfloat16(), passage.bfloat16(), 1e-4)[0]
    assert sharp[1] > 0.6 and tied[1] == tied[2] == 0.5


@pytest.fixture(scope="module")
def lm():
    return LanguageModel(frozen_llama())


def test_gates_choose_heads(lm):
    gates = gates_on_heads(lm, 0.3, [(1, 2), (3, 0)])
    assert gates.nonzero().tolist() == [[1, 2], [3, 0]] and gates[3, 0] == pytest.approx(0.3)


@pytest.mark.parametrize("gates", [None, torch.full((4, 4), 0.3)], ids=["sum", "gated"])
def test_v_norm_is_on_with_the_sum_alone_unless_it_is_set(lm, gates):
    ids = torch.randint(3, 400, (3, 5), generator=torch.Generator().manual_seed(0))
    side, form = {"input_ids": ids, "attention_mask": ids**0}, dict(gates_LH=gates, tau=0.1)
    forms = {
        v_norm: RevelaLoss(Embed(), lm, v_norm=v_norm, **form) for v_norm in (None, True, False)
    }
    losses = {v_norm: loss([side] * 3).item() for v_norm, loss in forms.items()}
    assert losses[None] == losses[gates is None] != losses[gates is not None]
    packed, weights = lm.pack(*side.values()), forms[None].weights(*[Embed()(side).detach()] * 2)
    mix = InBatchAttention(weights, packed.lengths, gates, v_norm=True)
    assert losses[True] == pytest.approx(lm.loss(packed, lm.prefill(packed, range(4)), mix).item())


def test_the_probe_is_the_derivative_of_the_loss_to_each_gate(lm):
    generator = torch.Generator().manual_seed(0)
    packed = lm.pack(torch.randint(3, 400, (4, 5), generator=generator), torch.ones(4, 5))
    documents = torch.tensor([0, 0, 1, 1])
    scores = probe_heads(lm, [(packed, documents)])
    same = (documents[:, None] == documents[None, :]).double().fill_diagonal_(0)
    other = (documents[:, None] != documents[None, :]).double()

    def loss(weights, gates):
        unit = weights / weights.sum(1, keepdim=True)
        mix = InBatchAttention(unit, packed.lengths, gates, v_norm=False)
        return float(lm.loss(packed, lm.prefill(packed, range(4)), mix))

    step = 1e-4
    for layer, head in [(0, 0), (2, 3)]:
        up, down = (torch.full((4, 4), BASE_GATE, dtype=torch.float64) for _ in range(2))
        up[layer, head] += step
        down[layer, head] -= step
        slopes = [(loss(w, up) - loss(w, down)) / (2 * step) for w in (other, same)]
        slope = pytest.approx(slopes[0] - slopes[1], rel=2e-2, abs=1e-5)
        assert scores[layer, head].item() == slope
    ranking = ranked_heads(scores)
    assert len(ranking) == 16 and ranking[0][2] == pytest.approx(scores.max().item())
    assert [s for *_, s in ranking] == sorted((s for *_, s in ranking), reverse=True)
