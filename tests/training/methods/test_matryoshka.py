"""One width a batch: the loss and the gradient that vectors of that width have, and every width
gets its turn.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from conftest import Embed
from revela.training.methods.contrastive import ContrastiveLoss
from revela.training.methods.matryoshka import Matryoshka

WIDTHS = [2, 5, 8]


def sides():
    ids = torch.randint(3, 400, (2, 4, 6), generator=torch.Generator().manual_seed(0))
    query, passage = ({"input_ids": side, "attention_mask": torch.ones_like(side)} for side in ids)
    return [{**query, "target": torch.arange(4)}, passage]


def naive(model: Embed, width: int) -> torch.Tensor:
    """Query by query, on the first numbers of each vector."""
    query, passage = (model.pool(side)[:, :width] for side in sides())
    losses = []
    for i in range(len(query)):
        scores = torch.stack([F.cosine_similarity(query[i], p, dim=0) for p in passage]) / 0.1
        losses.append(scores.logsumexp(0) - scores[i])
    return torch.stack(losses).mean()


@pytest.mark.parametrize("retriever_batch", [0, 3])
def test_a_batch_is_what_a_loop_over_cut_vectors_gives(retriever_batch):
    torch.manual_seed(1)
    model = Embed()
    loss = ContrastiveLoss(model, tau=0.1, retriever_batch=retriever_batch)
    loss_module = Matryoshka(loss, model, WIDTHS)
    expected = {}
    for width in WIDTHS:
        plain = copy.deepcopy(model)
        loss = naive(plain, width)
        loss.backward()
        expected[width] = loss.detach(), plain.table.weight.grad
    seen = set()
    for _ in range(30):
        model.zero_grad()
        loss = loss_module(sides())
        loss.backward()
        width = int(model.table.weight.grad.abs().sum(0).gt(0).sum())
        seen.add(width)
        torch.testing.assert_close(loss.detach(), expected[width][0], atol=1e-5, rtol=0)
        torch.testing.assert_close(model.table.weight.grad, expected[width][1], atol=1e-5, rtol=0)
    assert seen == set(WIDTHS)
