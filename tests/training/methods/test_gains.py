"""Gain distillation: gains against finite differences, loss and gradients against a loop over rows,
and that it learns.
"""

from __future__ import annotations

import pytest
import torch

from conftest import Embed, frozen_llama, moved_since_it_began, train_by_sgd
from revela.training.lm.document_attention import InBatchAttention
from revela.training.lm.language_model import LanguageModel
from revela.training.methods.gains import GainsLoss, InitialRetriever
from revela.training.methods.revela import gates_in_upper_layers

SIZE = 4  # of each of two groups


@pytest.fixture(scope="module")
def lm():
    return LanguageModel(frozen_llama())


def sides():
    """Queries, passages, and chunks of unequal length."""
    generator = torch.Generator().manual_seed(5)
    query, passage, chunk = (
        torch.randint(3, 400, (2 * SIZE, n), generator=generator) for n in (3, 4, 6)
    )
    mask = torch.ones_like(chunk)
    mask[1, 4:] = mask[5, 3:] = 0
    return [
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in (query, passage)
    ] + [{"input_ids": chunk, "attention_mask": mask}]


def build(lm, model=None, **changes):
    settings = dict(tau=0.2, gates_LH=gates_in_upper_layers(lm, 0.5, 2), group_size=SIZE)
    model = model or Embed().double()
    return GainsLoss(model, lm, initial=InitialRetriever(), **(settings | changes))


def test_gains_are_finite_differences_of_the_loss_at_equal_weights(lm):
    loss_module, chunk = build(lm), sides()[2]
    packed = lm.pack(chunk["input_ids"], chunk["attention_mask"])
    gains = loss_module.gains(packed)

    def loss(scores):
        weights = torch.zeros(2 * SIZE, 2 * SIZE).double()
        for i in range(2 * SIZE):
            others = [j for j in range(2 * SIZE) if j != i and j // SIZE == i // SIZE]
            for j in others:
                weights[i, j] = scores[i, j].exp() / sum(scores[i, k].exp() for k in others)
        mix = InBatchAttention(weights, packed.lengths, loss_module.gates_LH, v_norm=False)
        memory = lm.prefill(packed, range(2, 4))
        losses = lm.token_losses(packed, packed.layout.with_next_R, memory, mix)
        counts = [sum(lengths) - SIZE for lengths in (packed.lengths[:SIZE], packed.lengths[SIZE:])]
        return float(sum(part.mean() for part in losses.split(counts)) / 2)

    step = 1e-2  # the loss is summed in fp32
    for i in range(2 * SIZE):
        for j in range(2 * SIZE):
            up, down = torch.zeros(2, 2 * SIZE, 2 * SIZE).double()
            up[i, j], down[i, j] = step, -step
            want = 0.0 if i == j else (loss(down) - loss(up)) / (2 * step)
            assert float(gains[i, j]) == pytest.approx(want, rel=1e-3, abs=1e-5)
    assert (gains.abs() > 1e-7).sum() == 2 * SIZE * (SIZE - 1)
    assert gains[:SIZE, SIZE:].abs().max() == gains[SIZE:, :SIZE].abs().max() == 0


@pytest.mark.parametrize("retriever_batch", [0, 2])
def test_loss_and_gradient_equal_the_naive_loop(lm, retriever_batch):
    query, passage, chunk = sides()
    model, began = moved_since_it_began()
    loss_module = build(lm, model, retriever_batch=retriever_batch)
    loss = loss_module([query, passage, chunk])
    fast = torch.autograd.grad(loss, model.table.weight)[0]
    gains = loss_module.gains(lm.pack(chunk["input_ids"], chunk["attention_mask"])).double()

    def cosines(encoder, i, others):
        vectors, passages = (encoder.pool(side) for side in (query, passage))
        found = [torch.cosine_similarity(vectors[i], passages[j], dim=0) for j in others]
        return torch.stack(found)

    def z(x):
        return (x - x.mean()) / x.std(correction=0)

    found = []
    for i in range(2 * SIZE):
        others = [j for j in range(2 * SIZE) if j != i and j // SIZE == i // SIZE]
        target = z(torch.stack([gains[i, j] + gains[j, i] for j in others]))
        target = (2.0 * z(target + z(cosines(began, i, others).detach()))).softmax(0)
        predicted = (cosines(model, i, others) / 0.2).softmax(0)
        found.append(sum(t * (t / p).log() for t, p in zip(target, predicted, strict=True)))
    naive = torch.stack(found).mean()
    torch.testing.assert_close(loss, naive, atol=1e-6, rtol=0)
    slow = torch.autograd.grad(naive, model.table.weight)[0]
    torch.testing.assert_close(fast, slow, atol=1e-6, rtol=0)
    assert fast.abs().max() > 1e-3


def test_it_learns_what_the_gains_say(lm):
    losses = train_by_sgd(build(lm, Embed()), sides(), steps=30, rate=1.0)
    assert losses[-1] < 0.5 * losses[0]
