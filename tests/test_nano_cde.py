"""examples/nano_cde.py against the package: false negatives, vectors, the loss and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer

from conftest import build_context, tiny_retriever
from revela.training.methods.cde import Contextual, FilteredLoss, true_negative_mask
from revela.training.methods.contrastive import info_nce
from revela.training.recipe import Recipe
from revela.training.retriever.context import add_context
from revela.training.retriever.module import RetrieverModule
from revela.training.settings import Context
from tests.nano_example import TEXTS, assert_close, example, train_and_stay

QUERIES = [text[: len(text) // 2] for text in TEXTS]
SLOTS = 3


@pytest.fixture(scope="module")
def nano():
    with example("nano_cde") as module:
        module.SLOTS = SLOTS
        yield module


@pytest.fixture
def encoder(nano, tiny_lm_folder):
    """Not as at the start, where the head gives 0."""
    torch.manual_seed(4)
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm_folder, padding_side="right")
    encoder = nano.ContextualEncoder(str(tiny_lm_folder), tokenizer, TEXTS[1])
    for weight in (encoder.head[3].weight, encoder.head[3].bias, encoder.null_W):
        torch.nn.init.normal_(weight, std=0.3)
    return encoder


def similarities(seed: int = 0):
    """f's vectors of queries and documents, of which some are alike."""
    torch.manual_seed(seed)
    query_BS, document_BS = (F.normalize(torch.randn(len(TEXTS), 4), dim=1) for _ in range(2))
    document_BS[3] = document_BS[1]
    return query_BS, document_BS


def package(encoder, nano, tiny_lm_folder, slot_dropout: float):
    """Contextual around ContrastiveLoss, with the weights of the nano's encoder; gives its
    parameters by the names that they have there, too.
    """
    own = dict(max_tokens=nano.MAX_TOKENS, query_prompt="", passage_prompt="")
    model = tiny_retriever(tiny_lm_folder, **own)
    settings = Context(context=SLOTS, context_tokens=nano.MAX_TOKENS)
    first = add_context(settings, model, TEXTS[1], 0)
    torch.testing.assert_close(first.anchors_AD, encoder.anchors_JW, atol=0, rtol=0)
    stages = {
        "first.": first.model[0].model,
        "head.0.": first.model[2].norm,
        "head.1.": first.model[3].linear,
        "head.3.": first.model[4].linear,
        "second.": model[0].model,
    }
    parameters = {f"{at}{name}": p for at, m in stages.items() for name, p in m.named_parameters()}
    parameters |= {"anchors_JW": first.anchors_AD, "null_W": first.null_D}
    with torch.no_grad():
        for name, p in encoder.named_parameters():
            parameters[name][: len(p)].copy_(p)  # the package's table also has rows of slots
            parameters[name].requires_grad_(True)
    retriever = RetrieverModule(model.train())
    retriever.slot_dropout = slot_dropout
    parts = build_context(Recipe.of(context=SLOTS, context_null=0.0), retriever, [], [], False)
    return Contextual(FilteredLoss(retriever, tau=nano.TAU), first, parts), parameters


@pytest.mark.parametrize("null", [0.0, 1.0])
@pytest.mark.parametrize("documents", [SLOTS, SLOTS - 1])
def test_all_numbers_are_the_packages(nano, encoder, tiny_lm_folder, monkeypatch, null, documents):
    query_BS, document_BS = similarities()
    monkeypatch.setattr(nano, "NULL", null)
    context_JW = encoder.train().context(TEXTS[-documents:])
    vectors = encoder(context_JW, QUERIES), encoder(context_JW, TEXTS)
    loss = nano.contrastive_loss(*vectors, nano.true_negatives(query_BS, document_BS))
    loss.backward()

    objective, parameters = package(encoder, nano, tiny_lm_folder, null)
    retriever, first = objective.retriever, objective.context_encoder
    query, passage = retriever.tokenize(QUERIES, "query"), retriever.tokenize(TEXTS, "passage")
    allowed = torch.ones(len(QUERIES), len(TEXTS), dtype=torch.bool)
    target = {"target": torch.arange(len(TEXTS)), "surrogate": query_BS, "allowed": allowed}
    context = first.stage.tokenize(TEXTS[-documents:], "passage")
    sides = [query | target, passage | {"surrogate": document_BS}, context]
    expected = objective([{k: v for k, v in s.items() if torch.is_tensor(v)} for s in sides])
    expected.backward()

    for found, features in zip(vectors, (query, passage), strict=True):
        torch.testing.assert_close(found, retriever(features), atol=1e-5, rtol=0)
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=0)
    own = {name: p.grad for name, p in encoder.named_parameters() if p.grad is not None}
    wanted = {name: parameters[name].grad for name in own}
    teaches = {
        "head.1.weight": not null,
        "null_W": null or documents < SLOTS,
        "second.embed_tokens.weight": True,
    }
    for name, does in teaches.items():
        assert (name in own and own[name].abs().max() > 1e-4) == does, name
    assert_close(list(own.values()), [g[: len(own[name])] for name, g in wanted.items()])


def test_false_negatives_are_left_out_as_by_the_package(nano):
    query_BS, document_BS = similarities()
    allowed_BB = nano.true_negatives(query_BS, document_BS)
    target_B = torch.arange(len(TEXTS))
    assert torch.equal(allowed_BB, true_negative_mask(query_BS, document_BS, target_B))
    assert not allowed_BB[1, 3] and len(TEXTS) < allowed_BB.sum() < allowed_BB.numel() - 2
    query_BW, document_BW = similarities(1)
    expected = info_nce(query_BW, document_BW, target_B, nano.TAU, allowed_BB)
    found = nano.contrastive_loss(query_BW, document_BW, allowed_BB)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_batches_are_of_similar_pairs(nano, tiny_lm_folder, monkeypatch):
    monkeypatch.setattr(nano, "BATCH", 4)
    topics = ["ocean ship wave", "violin castle bow", "enzyme cell acid"]
    texts = [f"{topic} {i}" for i in range(4) for topic in topics]
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm_folder)
    query_NS, document_NS = nano.surrogate(tokenizer, texts * 2).chunk(2)
    torch.manual_seed(1)
    drawn = nano.batches(nano.cluster(query_NS, document_NS))
    for _ in range(2):
        epoch = [next(drawn) for _ in range(3)]
        assert sorted(place for places in epoch for place in places) == list(range(12))
        assert all(len({place % 3 for place in places}) == 1 for places in epoch)


def test_a_folder_is_trained_on_and_searched(nano, tiny_lm_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(nano, "LEARNING_RATE", 3e-3)
    (before, own, null), stayed = train_and_stay(nano, tmp_path, tiny_lm_folder, capsys)
    assert before != own != null and stayed == [before] * 3
