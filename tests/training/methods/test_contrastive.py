"""Pairs by hand; GradCache: the same gradient, memory that does not grow."""

from __future__ import annotations

import math

import pytest
import torch

from conftest import Embed
from revela.ranking.queries import query_hash
from revela.training.methods.base import detached_backward
from revela.training.methods.cde import FilteredLoss
from revela.training.methods.contrastive import ContrastiveLoss, comparison_mask, info_nce


def features(n: int, seed: int):
    ids = torch.randint(3, 400, (n, 6), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def unit(model, *sides):
    """Vectors of length one, side by side."""
    ids = ({"input_ids": side["input_ids"]} for side in sides)
    return [model(f) for f in ids]


def allowed(target, group_size, number=None):
    """What 6 passages let a query be compared with; a group_size of 0: all are one group."""
    group = torch.arange(6) // (group_size or 6)
    return comparison_mask(target, group, torch.arange(6) if number is None else number)


def test_info_nce_by_hand():
    query = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    passage = torch.tensor([[0.5**0.5, 0.5**0.5], [1.0, 0.0], [0.0, 1.0]])
    scores = torch.tensor([[0.5**0.5, 1.0, 0.0], [0.5**0.5, 0.0, 1.0]]) / 0.5
    want = -(scores[0].log_softmax(0)[1] + scores[1].log_softmax(0)[0]) / 2
    logged = {}
    loss = info_nce(query, passage, torch.tensor([1, 0]), 0.5, logged=logged)
    torch.testing.assert_close(loss, want)
    assert logged["accuracy"]() == 0.5  # the second query is nearest to another's passage


@pytest.mark.parametrize("group_size", [6, 3])
def test_false_negatives_leave_the_denominator(group_size):
    """Against a loop over the rule: j is out if f(q_i, d_j) >= f(q_i, d_i) and i's own never is."""
    model, target = Embed(), torch.tensor([0, 2, 4, 5])
    query, passage = features(4, 0), features(6, 1)
    generator = torch.Generator().manual_seed(5)
    near_q, near_p = (
        torch.nn.functional.normalize(torch.randn(n, 3, generator=generator), dim=-1)
        for n in (4, 6)
    )
    near_p[1] = near_p[0]  # as near to the first query as its own
    loss_module = FilteredLoss(model, tau=0.1)
    side = {**query, "target": target, "allowed": allowed(target, group_size)}
    loss = loss_module([{**side, "surrogate": near_q}, {**passage, "surrogate": near_p}]).item()
    q, p = unit(model, query, passage)
    scores = (q @ p.T / 0.1).tolist()
    nearness = (near_q @ near_p.T).tolist()
    want, dropped = 0.0, 0
    for i, own in enumerate(target.tolist()):
        total = 0.0
        for j in range(6):
            if j // group_size != own // group_size:
                continue
            if j != own and nearness[i][j] >= nearness[i][own]:
                dropped += 1
                continue
            total += math.exp(scores[i][j])
        want -= (scores[i][own] - math.log(total)) / 4
    assert dropped > 0 and loss == pytest.approx(want, abs=1e-4)
    assert loss < ContrastiveLoss(model, tau=0.1)([side, passage]).item() - 1e-3


@pytest.mark.parametrize("group_size", [0, 3])
def test_a_passage_of_the_same_query_is_no_negative(group_size):
    """Chunks of one document, asked for by its title: the loss of each is that of a softmax without
    the others.
    """
    model, target = Embed(), torch.tensor([0, 1, 3, 4])
    queries = ["title", "title", "title", "another", "title", ""]
    number = torch.tensor([query_hash(text) for text in queries])
    query, passage = features(4, 0), features(6, 1)
    side = {**query, "target": target, "allowed": allowed(target, group_size, number)}
    loss = ContrastiveLoss(model, tau=0.1)([side, passage])
    q, p = unit(model, query, passage)
    want = torch.tensor(0.0)
    for i, own in enumerate(target.tolist()):
        mine = [j for j in range(6) if not group_size or j // group_size == own // group_size]
        kept = [j for j in mine if j == own or queries[j] != queries[own]]
        want = want - (q[i] @ p[kept].T / 0.1).log_softmax(0)[kept.index(own)] / 4
    torch.testing.assert_close(loss, want)
    loss.backward()


class Dropping(Embed):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.double().drop = torch.nn.Dropout(dropout)

    def pool(self, features):
        return self.drop(super().pool(features))


def test_gradcache_reads_again_with_the_same_dropout():
    found, target = [], torch.arange(5)
    for cached in (False, True):
        torch.manual_seed(7)
        model, log_tau = Dropping(0.4), torch.tensor(0.1, dtype=torch.float64).log()
        loss_module = ContrastiveLoss(model, tau=0.1, retriever_batch=2).double()
        torch.manual_seed(0)
        if cached:
            loss = loss_module([{**features(5, 0), "target": target}, features(5, 1)])
        else:
            sides = []
            for ids in (features(5, seed)["input_ids"] for seed in (0, 1)):
                parts = [model({"input_ids": part}) for part in ids.split(2)]
                sides.append(torch.cat(parts))
            loss = info_nce(*sides, target, log_tau.exp())
        loss.backward()
        found.append((loss.detach(), model.table.weight.grad))
    for plain, other in zip(*found, strict=True):
        torch.testing.assert_close(plain, other, atol=1e-6, rtol=0)  # tau is kept in fp32


def test_gradcache_keeps_as_much_for_a_large_batch_as_for_a_small_one():
    """What autograd keeps of the model, in numbers, for 64 texts read at once and 4 at a time:
    nothing but ids and vectors.
    """

    class Wide(Embed):
        def __init__(self):
            super().__init__()
            self.wide = torch.nn.Linear(8, 500)

        def pool(self, features):
            return self.wide(super().pool(features)).relu().view(-1, 50, 10).sum(1)

    def kept(n: int, batch: int) -> float:
        sizes, loss_module = [], ContrastiveLoss(Wide(), tau=0.1, retriever_batch=batch)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: sizes.append(tensor.numel()) or tensor, lambda tensor: tensor
        ):
            loss_module([{**features(n, 0), "target": torch.arange(n)}, features(n, 1)])
        return sum(sizes) / n

    assert kept(64, 0) > 500  # read at once, each text leaves its wide layer
    assert kept(64, 4) < 250  # ids, vectors and its row of scores only


def test_a_cut_loss_has_the_same_gradient_and_no_graph_of_its_own():
    a, b = (
        torch.randn(2, 3, dtype=torch.float64, requires_grad=True),
        torch.randn(3, dtype=torch.float64),
    )
    freed = []

    def loss_of(x, y):
        inner = x.tanh()
        inner.register_hook(lambda g: freed.append(len(freed)))
        return (inner @ y).sin().sum()

    loss = detached_backward(loss_of, a * 2, b)
    assert freed == [0]  # taken at once
    want = torch.autograd.grad(((a * 2).tanh() @ b).sin().sum(), a)[0]
    torch.testing.assert_close(torch.autograd.grad(loss, a)[0], want)
