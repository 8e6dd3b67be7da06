"""examples/nano_replug.py against the package: the loss and all gradients."""

from __future__ import annotations

import pytest

from conftest import tiny_retriever
from revela.training.lm.language_model import LanguageModel
from revela.training.methods.replug import ReplugLoss
from revela.training.methods.revela import split_in_half
from revela.training.retriever.module import RetrieverModule
from tests.nano_example import (
    TEXTS,
    assert_same_gradients,
    example,
    gradients,
    run_on_a_folder,
    tiny_lm,
)


@pytest.fixture
def nano():
    with example("nano_replug") as module:
        yield module


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt_neox"])
@pytest.mark.parametrize("tau", [0.1, 1e-3])
def test_loss_and_gradients_are_the_packages(nano, tiny_lm_folder, kind, tau):
    nano.TAU = nano.TAU_LM = tau
    retriever, lm = nano.Retriever(str(tiny_lm_folder)), tiny_lm(kind)
    logprob_BB = nano.log_likelihoods(lm, retriever.tokenizer, TEXTS)
    loss = nano.divergence(logprob_BB, nano.cosines(retriever, TEXTS))
    loss.backward()

    prompts = {"query_prompt": nano.QUERY, "passage_prompt": nano.PASSAGE}
    model = tiny_retriever(tiny_lm_folder, max_tokens=nano.MAX_TOKENS, **prompts).requires_grad_()
    objective = ReplugLoss(RetrieverModule(model), LanguageModel(lm), tau=tau, tau_lm=tau)
    queries = split_in_half(TEXTS, model.tokenizer, nano.MAX_TOKENS)
    sides = [
        model.preprocess(texts, prompt=prompt)
        for texts, prompt in ((queries, nano.QUERY), (TEXTS, nano.PASSAGE))
    ]
    expected = objective([*sides, dict(model.tokenizer(TEXTS, padding=True, return_tensors="pt"))])
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert max(gradient.abs().max() for gradient in gradients(model).values()) > 1e-4
    assert_same_gradients(retriever.model, model[0].model)


def test_a_folder_is_trained_on_and_searched(nano, tiny_lm_folder, tmp_path, capsys):
    models = ["--lm", str(tiny_lm_folder), "--retriever", str(tiny_lm_folder)]
    run_on_a_folder(nano, tmp_path, capsys, *models)
    nano.LEARNING_RATE = 0.0
    before, after = run_on_a_folder(nano, tmp_path / "frozen", capsys, *models)
    assert before == after
