"""InfoNCE by hand; GradCache: the same gradient, memory that does not grow; negatives from every
process.
"""

from __future__ import annotations

import pytest
import torch
import torch.multiprocessing as multiprocessing

from conftest import Embed
from revela.corpus.text_queries import number_of_query
from revela.objectives.contrastive import (
    ContrastiveLoss,
    compared,
    info_nce,
    true_negatives,
)
from revela.objectives.gradcache import backward_now


def features(n: int, seed: int):
    ids = torch.randint(3, 400, (n, 6), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def allowed(target, group_size, number=None):
    """What 6 passages let a query be compared with; a group_size of 0: all are one group."""
    group = torch.arange(6) // (group_size or 6)
    return compared(target, group, torch.arange(6) if number is None else number)


def test_info_nce_by_hand():
    query, passage = (
        torch.tensor([[2.0, 0.0], [0.0, 1.0]]),
        torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 3.0]]),
    )
    scores = torch.tensor([[0.5**0.5, 1.0, 0.0], [0.5**0.5, 0.0, 1.0]]) / 0.5
    want = -(scores[0].log_softmax(0)[1] + scores[1].log_softmax(0)[0]) / 2
    torch.testing.assert_close(info_nce(query, passage, torch.tensor([1, 0]), 0.5), want)


def test_a_query_meets_its_own_group_only():
    model = Embed()
    query, passage = features(3, 0), features(6, 1)
    target = torch.tensor([0, 2, 4])
    query |= {"target": target, "allowed": allowed(target, 3)}
    loss = ContrastiveLoss(model, tau=0.1)([query, passage])
    query = {name: query[name] for name in passage}
    with torch.no_grad():
        q, p = (
            torch.nn.functional.normalize(model(f)["sentence_embedding"], dim=-1)
            for f in (query, passage)
        )
    scores = q @ p.T / 0.1
    parts = [(0, slice(0, 3), 0), (1, slice(0, 3), 2), (2, slice(3, 6), 1)]
    want = -torch.stack([scores[i, group].log_softmax(0)[t] for i, group, t in parts]).mean()
    torch.testing.assert_close(loss.detach(), want)


@pytest.mark.parametrize("group_size", [0, 3])
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
    objective = ContrastiveLoss(model, tau=0.1)
    side = {**query, "target": target}
    if group_size:
        side["allowed"] = allowed(target, group_size)
    loss = objective([{**side, "surrogate": near_q}, {**passage, "surrogate": near_p}])
    with torch.no_grad():
        q, p = (
            torch.nn.functional.normalize(model(f)["sentence_embedding"], dim=-1)
            for f in (query, passage)
        )
    want, dropped = 0.0, 0
    for i, own in enumerate(target.tolist()):
        total = 0.0
        for j in range(6):
            if group_size and j // group_size != own // group_size:
                continue
            if j != own and float(near_q[i] @ near_p[j]) >= float(near_q[i] @ near_p[own]):
                dropped += 1
                continue
            total += float((q[i] @ p[j] / 0.1).exp())
        want -= float(q[i] @ p[own] / 0.1 - torch.tensor(total).log()) / 4
    assert dropped > 0
    torch.testing.assert_close(float(loss.detach()), want, atol=1e-4, rtol=0)
    plain = ContrastiveLoss(model, tau=0.1)([side, passage])
    assert float(loss.detach()) < float(plain.detach()) - 1e-3


def test_a_copy_of_the_own_passage_is_no_negative_and_the_own_one_stays():
    near = torch.eye(3)[[0, 0, 1, 2]]
    kept = true_negatives(torch.eye(3)[[0, 1]], near, torch.tensor([0, 2]))
    assert kept.tolist() == [[True, False, True, True], [True, True, True, True]]


@pytest.mark.parametrize("group_size", [0, 3])
def test_a_passage_of_the_same_query_is_no_negative(group_size):
    """Chunks of one document, asked for by its title: the loss of each is that of a softmax without
    the others.
    """
    model, target = Embed(), torch.tensor([0, 1, 3, 4])
    queries = ["title", "title", "title", "another", "title", ""]
    number = torch.tensor([number_of_query(text) for text in queries])
    query, passage = features(4, 0), features(6, 1)
    query |= {"target": target, "allowed": allowed(target, group_size, number)}
    loss = ContrastiveLoss(model, tau=0.1)([query, passage])
    q, p = (
        torch.nn.functional.normalize(model(f)["sentence_embedding"], dim=-1)
        for f in ({k: query[k] for k in passage}, passage)
    )
    want = torch.tensor(0.0)
    for i, own in enumerate(target.tolist()):
        kept = [
            j
            for j in range(6)
            if not (group_size and j // group_size != own // group_size)
            and (j == own or queries[j] != queries[own])
        ]
        want = want - (q[i] @ p[kept].T / 0.1).log_softmax(0)[kept.index(own)] / 4
    torch.testing.assert_close(loss, want)
    loss.backward()


class Dropping(torch.nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.table, self.drop = Embed().double(), torch.nn.Dropout(dropout)

    def forward(self, features):
        return {"sentence_embedding": self.drop(self.table(features)["sentence_embedding"])}


def test_gradcache_gives_the_plain_gradient():
    found = []
    for batch in (0, 2):
        objective = ContrastiveLoss(
            Dropping(0.0), tau=0.1, learn_tau=True, retriever_batch=batch
        ).double()
        loss = objective([{**features(5, 0), "target": torch.arange(5)}, features(5, 1)])
        loss.backward()
        found.append(
            (loss.detach(), objective.model.table.table.weight.grad, objective.log_tau.grad)
        )
    for plain, cached in zip(*found, strict=True):
        assert plain.dtype == torch.float64 and plain.abs().sum() > 0
        torch.testing.assert_close(plain, cached, atol=1e-12, rtol=0)


def test_gradcache_reads_again_with_the_same_dropout():
    found = []
    for cached in (False, True):
        torch.manual_seed(7)
        model, log_tau = Dropping(0.4), torch.tensor(0.1, dtype=torch.float64).log()
        torch.manual_seed(0)
        if cached:
            loss = ContrastiveLoss(model, tau=0.1, retriever_batch=2).double()(
                [{**features(5, 0), "target": torch.arange(5)}, features(5, 1)]
            )
        else:
            parts = [
                [features(5, side)["input_ids"][i : i + 2] for i in (0, 2, 4)] for side in (0, 1)
            ]
            sides = [
                torch.cat([model({"input_ids": ids})["sentence_embedding"] for ids in part])
                for part in parts
            ]
            loss = info_nce(*sides, torch.arange(5), log_tau.exp())
        loss.backward()
        found.append((loss.detach(), model.table.table.weight.grad))
    for plain, other in zip(*found, strict=True):
        torch.testing.assert_close(plain, other, atol=1e-6, rtol=0)  # tau is kept in fp32


def test_gradcache_keeps_as_much_for_a_large_batch_as_for_a_small_one():
    """What autograd keeps of the model, in numbers, for 8 and for 64 texts read 4 at a time:
    nothing but ids and vectors.
    """

    def kept(n: int, batch: int) -> int:
        model = torch.nn.Sequential()
        model.table, model.wide = Embed(), torch.nn.Linear(8, 500)
        model.forward = lambda f: {
            "sentence_embedding": model.wide(model.table(f)["sentence_embedding"])
            .relu()
            .view(-1, 50, 10)
            .sum(1)
        }
        total = 0

        def pack(tensor):
            nonlocal total
            total += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            ContrastiveLoss(model, tau=0.1, retriever_batch=batch)(
                [{**features(n, 0), "target": torch.arange(n)}, features(n, 1)]
            )
        return total / n

    assert kept(64, 0) > 500  # read at once, each text leaves its wide layer
    assert kept(64, 4) < 250  # ids, vectors and its row of scores only


def _in_two_processes(rank: int, port: int, out) -> None:
    import os

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    model = Embed()
    query, passage = (
        {k: v[2 * rank : 2 * rank + 2] for k, v in features(4, s).items()} for s in (0, 1)
    )
    loss = ContrastiveLoss(model, tau=0.1)([{**query, "target": torch.arange(2)}, passage])
    loss.backward()
    gradient = model.table.weight.grad
    torch.distributed.all_reduce(gradient)
    out[rank] = (loss.item(), (gradient / 2).numpy())
    torch.distributed.destroy_process_group()


def test_two_processes_see_one_another_s_negatives():
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        out = manager.dict()
        processes = [
            context.Process(target=_in_two_processes, args=(rank, port, out)) for rank in range(2)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
        results = dict(out)
    model = Embed()
    loss = ContrastiveLoss(model, tau=0.1)(
        [{**features(4, 0), "target": torch.arange(4)}, features(4, 1)]
    )
    loss.backward()
    assert sum(loss for loss, _ in results.values()) / 2 == pytest.approx(loss.item(), abs=1e-6)
    for _, gradient in results.values():
        torch.testing.assert_close(
            torch.from_numpy(gradient), model.table.weight.grad, atol=1e-6, rtol=1e-5
        )


def test_a_cut_loss_has_the_same_gradient_and_no_graph_of_its_own():
    a, b = (
        torch.randn(2, 3, dtype=torch.float64, requires_grad=True),
        torch.randn(3, dtype=torch.float64),
    )
    freed = []

    def loss_of(x, y, z):
        inner = x.tanh()
        inner.register_hook(lambda g: freed.append(len(freed)))
        return (inner @ y).sin().sum() + (0 if z is None else z)

    loss = backward_now(loss_of, a * 2, b, None)
    assert freed == [0]  # taken at once
    want = torch.autograd.grad(((a * 2).tanh() @ b).sin().sum(), a)[0]
    torch.testing.assert_close(torch.autograd.grad(loss, a)[0], want)
