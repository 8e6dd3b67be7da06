"""Attention distillation against the LM's whole attention matrices and a loop over questions; no
layer above the heads runs.
"""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

from conftest import Embed, moved_since_it_began, tiny_config, train_by_sgd
from revela.lm.heads import candidate_scores
from revela.lm.language_model import LanguageModel
from revela.lm.prompts import QUESTION
from revela.objectives.attention_distillation import AttentionLoss
from revela.objectives.distillation import InitialRetriever, zscore

DOCUMENTS = [-1, 0, 0, 0, -1, 1, 1, -1, 2, 2, 2, 2, -1]  # of each group's text
HEADS = [(2, 3), (0, 1), (2, 0)]


def first(side, count):
    """The first rows of a side."""
    return {name: values[:count] for name, values in side.items()}


def build_loss(model, **changes):
    settings = dict(tau=0.2, group_size=3) | changes
    return AttentionLoss(model, LanguageModel(build("sdpa")), HEADS, InitialRetriever(), **settings)


def build(attention: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config("llama")).double().eval().requires_grad_(False)
    model.set_attn_implementation(attention)
    return model


def texts():
    """Two groups of three candidates: two questions and one, each group's last one "N/A"; rows
    without a role before and after.
    """
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 400, (2, len(DOCUMENTS)), generator=generator)
    prompt = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "document": torch.tensor([DOCUMENTS] * 2),
    }
    lengths = [6, 4, 5, 6, 3]
    mask = torch.tensor([[1] * n + [0] * (6 - n) for n in lengths])
    role = torch.tensor([[0, *[QUESTION] * (n - 1), *[0] * (6 - n)] for n in lengths])
    tail = {
        "input_ids": torch.randint(3, 400, (5, 6), generator=generator),
        "attention_mask": mask,
        "role": role,
    }
    return prompt, {**tail, "group": torch.tensor([0, 0, 0, 1, 1])}


def naive_scores(prompt, tail, group, question):
    """(K, B): from whole matrices of one text at a time, the question's less those of the group's
    last.
    """
    last = max(i for i, g in enumerate(tail["group"].tolist()) if g == group)
    candidates = [[m for m, d in enumerate(DOCUMENTS) if d == j] for j in range(3)]
    found = []
    for i in (question, last):
        n = int(tail["attention_mask"][i].sum())
        ids = torch.cat([prompt["input_ids"][group], tail["input_ids"][i, :n]])[None]
        matrices = build("eager")(input_ids=ids, output_attentions=True).attentions
        rows = [len(DOCUMENTS) + t for t in range(n) if tail["role"][i, t] == QUESTION]
        heads = [matrices[layer][0, head, rows] for layer, head in HEADS]
        found.append([[rows_RN[:, c].sum() / len(rows) for c in candidates] for rows_RN in heads])
    return torch.tensor(found[0]).double() - torch.tensor(found[1]).double()


def test_scores_of_candidates_equal_those_of_whole_attention_matrices():
    prompt, tail = texts()
    got = candidate_scores(LanguageModel(build("sdpa")), first(prompt, 1), first(tail, 3), HEADS)
    want = torch.stack([naive_scores(prompt, tail, 0, i) for i in range(2)], dim=1)
    assert want.abs().min() > 1e-6
    torch.testing.assert_close(got.double(), want, atol=1e-7, rtol=0)  # both round to fp32


def test_nothing_runs_above_the_last_of_the_heads():
    prompt, tail = texts()
    lm, ran = LanguageModel(build("sdpa")), []
    for i, layer in enumerate(lm.model.model.layers):
        layer.register_forward_hook(lambda *_, i=i: ran.append(i))
    candidate_scores(lm, first(prompt, 1), first(tail, 3), [(1, 0)])
    assert set(ran) == {0}  # layer 1 ends with its attention


def sides():
    ids = torch.randint(3, 400, (9, 4), generator=torch.Generator().manual_seed(5))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return {k: v[:3] for k, v in batch.items()}, {k: v[3:] for k, v in batch.items()}


@pytest.mark.parametrize("retriever_batch", [0, 2])
def test_loss_and_gradient_equal_the_naive_loop(retriever_batch):
    prompt, tail = texts()
    question, passage = sides()
    model, began = moved_since_it_began()
    objective = build_loss(model, retriever_batch=retriever_batch)
    loss = objective([question, passage, prompt, tail])
    fast = torch.autograd.grad(loss, model.table.weight)[0]

    def cosines(encoder, q, group):
        vector = encoder.pool(question)[q]
        others = encoder.pool(passage)[3 * group : 3 * group + 3]
        return torch.stack([torch.cosine_similarity(vector, other, dim=0) for other in others])

    def z(x):
        return (x - x.mean()) / x.std(correction=0)

    by_group = []
    for group, questions in ((0, [(0, 0), (1, 1)]), (1, [(2, 3)])):
        found = []
        for q, row in questions:
            head_scores = sum(z(scores) for scores in naive_scores(prompt, tail, group, row))
            target = (2.0 * z(z(head_scores) + z(cosines(began, q, group).detach()))).softmax(0)
            predicted = (cosines(model, q, group) / 0.2).softmax(0)
            found.append(sum(t * (t / p).log() for t, p in zip(target, predicted, strict=True)))
        by_group.append(torch.stack(found).mean())
    naive = torch.stack(by_group).mean()
    torch.testing.assert_close(loss, naive, atol=1e-5, rtol=0)  # the attention's fp32, standardised
    slow = torch.autograd.grad(naive, model.table.weight)[0]
    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=0)
    assert fast.abs().max() > 1e-3


def test_it_learns_what_the_heads_say():
    prompt, tail = texts()
    objective = build_loss(Embed())
    found = train_by_sgd(objective, [*sides(), prompt, tail], steps=30, rate=1.0)
    assert found[-1] < 0.5 * found[0]


def test_standard_scores():
    scores = zscore(torch.tensor([[1.0, 2.0, 3.0], [5.0, 5.0, 5.0]]))
    want = torch.tensor([[-(1.5**0.5), 0.0, 1.5**0.5], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(scores, want)


def test_a_group_that_asks_nothing_is_left_out():
    prompt, tail = texts()
    question, passage = sides()
    question, model = first(question, 2), Embed().double()
    loss = build_loss(model)([question, passage, prompt, first(tail, 3)])
    gradient = torch.autograd.grad(loss, model.table.weight)[0]
    ids = passage["input_ids"]
    asked = {*ids[:3].flatten().tolist(), *question["input_ids"].flatten().tolist()}
    alone = sorted(set(ids[3:].flatten().tolist()) - asked)
    assert alone and gradient[alone].abs().sum() == 0 and gradient[ids[:3]].abs().sum() > 0
