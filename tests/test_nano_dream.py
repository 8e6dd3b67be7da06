"""examples/nano_dream.py against the package: prompts, heads, the loss and all gradients."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoTokenizer

from conftest import tiny_retriever
from revela.training.lm.language_model import LanguageModel
from revela.training.lm.prompts import PromptMaker
from revela.training.methods.dream import DreamLoss, score_query_heads
from revela.training.methods.heads import ranked_heads
from revela.training.retriever.module import RetrieverModule
from revela.types import Chunk
from tests.nano_example import (
    TEXTS,
    assert_close,
    assert_same_gradients,
    example,
    gradients,
    tiny_lm,
    train_and_stay,
)

QUESTIONS, ANSWERS = ["Where is ocean4?", "What is the violin2 of the castle about?"], [1, 4]
HEADS = [(1, 2), (1, 0), (3, 1)]


@pytest.fixture(scope="module")
def nano():
    with example("nano_dream") as module:
        yield module


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt_neox"])
def test_loss_and_gradients_are_the_packages(nano, tiny_lm_folder, kind):
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm_folder, padding_side="right")
    retriever = nano.Retriever(str(tiny_lm_folder), tokenizer)
    group = nano.Group(TEXTS, QUESTIONS, ANSWERS)
    loss = nano.answer_loss(tiny_lm(kind), retriever, group, HEADS)
    loss.backward()

    prompts = {"query_prompt": nano.QUERY, "passage_prompt": nano.PASSAGE}
    options = dict(max_tokens=nano.MAX_TOKENS)
    model = tiny_retriever(tiny_lm_folder, **options, **prompts).requires_grad_()
    lm, made = LanguageModel(tiny_lm(kind)), PromptMaker(tokenizer, nano.MAX_TOKENS, len(TEXTS))
    steered = dict(tau=nano.TAU, gate=nano.GATE, group_size=len(TEXTS))
    loss_module = DreamLoss(RetrieverModule(model), lm, HEADS, **steered)
    sides = (QUESTIONS, nano.QUERY), (TEXTS, nano.PASSAGE)
    questions = list(zip(QUESTIONS, ANSWERS, strict=True))
    features = [
        *(model.preprocess(texts, prompt=prompt) for texts, prompt in sides),
        *made.with_answers(TEXTS, questions),
    ]
    expected = loss_module(features)
    expected.backward()

    prompt = nano.make_prompt(tokenizer, TEXTS, QUESTIONS, [TEXTS[i] for i in ANSWERS])
    assert prompt.ids_P.tolist() == features[2]["input_ids"][0].tolist()
    assert prompt.role_QL.tolist() == features[3]["role"].tolist()
    assert len({len(row[row > 0]) for row in prompt.role_QL}) == len(QUESTIONS)
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=0)
    steering = [retriever.log_tau, retriever.gate_logit]
    wanted = [loss_module.log_tau, loss_module.gate_logit]
    assert_close([p.grad for p in steering], [p.grad for p in wanted])
    assert max(gradient.abs().max() for gradient in gradients(model).values()) > 1e-4
    assert_same_gradients(retriever.model, model[0].model)


def test_heads_are_ranked_as_by_the_package(nano, tiny_lm_folder):
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm_folder, padding_side="right")
    groups = [nano.Group(TEXTS, QUESTIONS, ANSWERS), nano.Group(TEXTS[::-1], QUESTIONS, [3, 0])]
    nano.HEADS = 5
    found = nano.find_heads(tiny_lm("llama"), tokenizer, groups)

    prompts = PromptMaker(tokenizer, nano.MAX_TOKENS, len(TEXTS))
    asked = [dict(zip(group.answers, group.questions, strict=True)) for group in groups]
    members = [
        [Chunk(0, text, query=queries.get(i, "")) for i, text in enumerate(group.texts)]
        for group, queries in zip(groups, asked, strict=True)
    ]
    scores_LH = score_query_heads(
        LanguageModel(tiny_lm("llama")), map(prompts.head_example, members)
    )
    ranked = [(layer, head) for layer, head, _ in ranked_heads(scores_LH)[:5]]
    by_score = [float(scores_LH[head]) for head in found]
    assert len(found) == 5 and by_score == pytest.approx([float(scores_LH[h]) for h in ranked])


def test_a_folder_is_asked_about_trained_on_and_searched(nano, tiny_lm_folder, tmp_path, capsys):
    (before, after), stayed = train_and_stay(nano, tmp_path, tiny_lm_folder, capsys)
    assert before != after and stayed == [before, before]


def test_a_step_makes_the_loss_of_its_group_smaller(nano, tiny_lm_folder):
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm_folder, padding_side="right")
    retriever, lm = nano.Retriever(str(tiny_lm_folder), tokenizer), tiny_lm("llama")
    group = nano.Group(TEXTS, QUESTIONS, ANSWERS)
    before = nano.answer_loss(lm, retriever, group, HEADS)
    nano.train(retriever, lm, [group] * 10, HEADS)
    assert nano.answer_loss(lm, retriever, group, HEADS) < before - 1e-4
