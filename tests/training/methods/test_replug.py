"""REPLUG: likelihoods against one pair at a time, loss by hand, gradient to the retriever."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from conftest import Embed, build_context, frozen_llama, tiny_retriever, train_by_sgd
from revela.training.lm.language_model import LanguageModel
from revela.training.methods.replug import ReplugLoss, likelihoods, ranking_divergence
from revela.training.models import open_causal_lm
from revela.training.recipe import Recipe
from revela.training.retriever.module import RetrieverModule
from revela.training.step import sides

LENGTHS = [5, 1, 3, 4]


@pytest.fixture(scope="module")
def model():
    return frozen_llama()


def chunks():
    ids = torch.randint(3, 400, (4, 5), generator=torch.Generator().manual_seed(1))
    return ids, torch.tensor([[1] * n + [0] * (5 - n) for n in LENGTHS])


@pytest.mark.parametrize("lead", [0, 1])
def test_likelihoods_equal_one_pair_at_a_time(model, lead):
    ids, mask = chunks()
    if lead:
        ids[:, 0] = 1
        mask[1, 1] = 1  # a chunk must have a token beyond its lead
    lengths = mask.sum(1).tolist()
    model.set_attn_implementation("eager")
    want = torch.zeros(4, 4)
    for i in range(4):
        for j in range(4):
            if i != j:
                whole = torch.cat([ids[j, : lengths[j]], ids[i, lead : lengths[i]]])[None]
                logs = model(input_ids=whole).logits[0].log_softmax(-1)
                tokens = [logs[t - 1, whole[0, t]] for t in range(lengths[j], whole.shape[1])]
                want[i, j] = torch.stack(tokens).mean()
    got = likelihoods(LanguageModel(model), lead, ids, mask)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


def test_the_divergence_by_hand_leaves_the_diagonal_out():
    teacher, student = torch.randn(
        2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    want = 0.0
    for i in range(3):
        others = [j for j in range(3) if j != i]
        p, q = teacher[i, others].softmax(0), student[i, others].softmax(0)
        want += sum(float(a * (a.log() - b.log())) for a, b in zip(p, q, strict=True)) / 3
    assert ranking_divergence(teacher, student).item() == pytest.approx(want)
    changed = student.clone().fill_diagonal_(9.0)
    assert ranking_divergence(teacher, changed) == ranking_divergence(teacher, student)


def test_the_loss_moves_the_retriever_towards_the_lm_and_groups_stay_apart(model):
    ids, mask = chunks()
    features = {"input_ids": ids, "attention_mask": mask}
    lm = LanguageModel(model)
    loss_module = ReplugLoss(Embed(), lm, tau=0.1, tau_lm=0.1, group_size=2)
    loss = loss_module([features] * 3)
    assert loss.item() == pytest.approx(0.0)  # two chunks leave one choice
    loss_module = ReplugLoss(Embed(), lm, tau=0.1, tau_lm=0.1)
    losses = train_by_sgd(loss_module, [features] * 3, steps=20, rate=0.5)
    assert losses[-1] < 0.5 * losses[0]


def test_questions_rank_candidates_by_the_likelihood_of_the_answer(tiny_lm_folder, tiny_tokenizer):
    """By a stock pass for each candidate and question; the second group has no question."""
    texts = ["ocean1 engine2 garden3", "planet4 market5", "violin0 enzyme1 castle2", "glacier3"] * 2
    questions = {1: "which market", 3: "where is the glacier"}
    settings = dict(lm=str(tiny_lm_folder), group_size=4, tau=0.5, tau_lm=0.05)
    recipe = Recipe.of("replug-questions", **settings)
    model = RetrieverModule(tiny_retriever(tiny_lm_folder))
    parts = build_context(recipe, model, [], [], False)
    loss_module, collate = recipe.method.build(parts)
    members = enumerate(texts)
    rows = [{"text": text, "query": questions.get(i, ""), "document": i} for i, text in members]
    found = loss_module(sides(collate(rows)))
    stock = open_causal_lm(tiny_lm_folder, torch.float32)
    answers = tiny_tokenizer(texts)["input_ids"]
    passages, losses = model(model.tokenize(texts[:4], "passage")), []
    for i, question in questions.items():
        asked, means = tiny_tokenizer(f"\n{question}\n")["input_ids"], []
        n = len(answers[i])
        for candidate in answers[:4]:
            ids = torch.tensor([candidate + asked + answers[i]])
            means.append(-F.cross_entropy(stock(ids).logits[0, -n - 1 : -1], ids[0, -n:]))
        cosines = model(model.tokenize([question], "query")) @ passages.T
        p, q = torch.stack(means) / 0.05, cosines[0] / 0.5
        losses.append(p.softmax(0) @ (p.log_softmax(0) - q.log_softmax(0)))
    torch.testing.assert_close(found, torch.stack(losses).mean(), rtol=1e-4, atol=0)
    assert found.requires_grad
