"""A context around a method: gradients of both stages by plain autograd over equations written
out, null contexts, and which documents a batch reads.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from conftest import build_context, make_rows, tiny_retriever
from revela.encoders.torch_model import slot_ids
from revela.text.spool import arrow_list
from revela.training.methods import base
from revela.training.methods.cde import ContextBatches, Contextual, in_context
from revela.training.methods.contrastive import ContrastiveLoss
from revela.training.recipe import Recipe
from revela.training.retriever.context import add_context
from revela.training.retriever.module import RetrieverModule
from revela.training.settings import Context
from revela.types import Chunk

TEXTS = [row["text"] for row in make_rows(12, sentences=1)]
SLOTS, TAU = 3, 0.2


def parts_of(folder, double=True, dropout=0.0, **changes):
    """A contextual retriever and its first stage, in training mode, all of it trained."""
    torch.manual_seed(0)
    model = tiny_retriever(folder, max_tokens=48)
    first = add_context(Context(SLOTS, **changes), model, TEXTS[0], 0)
    with torch.no_grad():
        first.model[4].linear.weight.normal_(std=0.3)
        first.null_D.normal_(std=0.1)
    for part in (model, first):
        part.requires_grad_(True)
        part.double() if double else part
        part.train()
    model[1].requires_grad_(False)  # the weights of tokens in the mean
    for module in [*model.modules(), *first.modules()]:
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = dropout
    return model, first


def sides_of(model, first, texts=6, documents=SLOTS):
    def read(role, some):
        features = model.preprocess(some, prompt=model.prompts[role])
        return {k: v for k, v in features.items() if isinstance(v, torch.Tensor)}

    query = {**read("query", TEXTS[:texts]), "target": torch.arange(texts)}
    passage = read("document", [f"{text} more" for text in TEXTS[:texts]])
    read = first.stage.tokenize(TEXTS[-documents:], "passage")
    return [query, passage, {k: v for k, v in read.items() if isinstance(v, torch.Tensor)}]


def wrapped(model, first, batch=0, dropout=0.0, null=0.0):
    model, first = copy.deepcopy((model, first))
    retriever = RetrieverModule(model)
    loss = ContrastiveLoss(retriever, tau=TAU, retriever_batch=batch)
    probabilities = dict(context_dropout=dropout, context_null=null)
    recipe = Recipe.of(context=SLOTS, retriever_batch=batch, **probabilities)
    parts = build_context(recipe, retriever, [], [], False)
    return in_context(loss, None, parts, first)[0], model, first


def gradients(*modules):
    found = {}
    for i, module in enumerate(modules):
        for name, p in module.named_parameters():
            # Rows of the table in which no token is but slots: they are read nowhere.
            found[f"{i}/{name}"] = torch.zeros_like(p) if p.grad is None else p.grad
    return found


def by_hand(model, first, sides):
    """The loss with all inputs put together row by row."""
    *texts, documents = sides
    rows = []
    pairs = zip(documents["input_ids"], documents["attention_mask"], strict=True)
    for j, (ids, mask) in enumerate(pairs):
        state = first.model[0].model(input_ids=ids[mask.bool()][None]).last_hidden_state[0].mean(0)
        x = first.model[2].norm(state)
        x = first.model[4].linear(F.gelu(first.model[3].linear(x)))
        rows.append(first.anchors_AD[j] + x)
    table = model[0].model.get_input_embeddings().weight
    vectors = []
    for side in texts:
        found = []
        for ids, mask in zip(side["input_ids"], side["attention_mask"], strict=True):
            ids = ids[mask.bool()].tolist()
            slots = slot_ids(model)
            inputs = torch.stack([rows[i - slots.start] if i in slots else table[i] for i in ids])
            states = model[0].model(inputs_embeds=inputs[None]).last_hidden_state[0]
            kept = [t for t, i in enumerate(ids) if i not in slots]
            found.append(F.normalize(states[kept].mean(0), dim=0))
        vectors.append(torch.stack(found))
    cosines = vectors[0] @ vectors[1].T
    return -(cosines / TAU).log_softmax(1).diagonal().mean()


@pytest.mark.parametrize("batch", [0, 3, 4])
def test_both_stages_have_the_gradient_of_plain_autograd(tiny_lm_folder, batch):
    model, first = parts_of(tiny_lm_folder)
    contextual, own, own_first = wrapped(model, first, batch)
    sides = sides_of(model, first)
    loss = contextual(sides)
    expected = by_hand(model, first, sides)
    assert abs(loss - expected) < 1e-12
    loss.backward()  # after the forward pass has returned: no hook is left from it
    expected.backward()
    found, plain = gradients(own, own_first), gradients(model, first)
    assert found.keys() == plain.keys()
    for name in found:
        torch.testing.assert_close(found[name], plain[name], atol=1e-12, rtol=0, msg=name)
    layer = "stage.model.0.model.layers.0.mlp.up_proj.weight"
    for name in ("anchors_AD", "stage.model.4.linear.weight", layer):
        assert found[f"1/{name}"].abs().max() > 1e-6, name


def test_what_is_computed_again_has_the_same_dropout(tiny_lm_folder, monkeypatch):
    """Of the model, and of the slots."""
    model, first = parts_of(tiny_lm_folder, dropout=0.1)
    sides = sides_of(model, first)
    results = []
    for again in (True, False):
        if not again:
            monkeypatch.setattr(base, "checkpoint", lambda f, part, use_reentrant: f(part))
        contextual, own, own_first = wrapped(model, first, batch=4, dropout=0.5)
        torch.manual_seed(7)
        loss = contextual(sides)
        loss.backward()
        results.append((loss.detach(), gradients(own, own_first)))
    (loss, found), (other, expected) = results
    assert loss == other
    for name in found:
        torch.testing.assert_close(found[name], expected[name], atol=1e-12, rtol=0, msg=name)


def test_null_contexts(tiny_lm_folder):
    """All slots dropped, and a batch without documents, are the null context, which teaches the
    first stage nothing but its null row; where that and the head are 0, it is the anchors alone."""
    model, first = parts_of(tiny_lm_folder)
    sides = sides_of(model, first)
    losses = []
    for settings in ({"dropout": 1.0}, {"null": 1.0}):
        contextual, _, own_first = wrapped(model, first, **settings)
        loss = contextual(sides)
        loss.backward()
        losses.append(loss.item())
        grad = {k: 0.0 if p.grad is None else p.grad.abs().max() for k, p in
                own_first.named_parameters()}  # fmt: skip
        assert grad.pop("null_D") > 1e-6 and grad.pop("anchors_AD") > 1e-6
        assert not any(grad.values())
        contextual.eval()  # no slot is dropped when a retriever is used
        assert contextual(sides).item() != pytest.approx(losses[-1], abs=1e-9)
    with torch.no_grad():
        retriever = RetrieverModule(model)
        retriever.context = first.null_JD, first.null_JD
        expected = ContrastiveLoss(retriever, tau=TAU)(sides[:2]).item()
    assert losses == pytest.approx([expected] * 2, abs=1e-12)
    with torch.no_grad():
        first.null_D.zero_()
        first.model[4].linear.weight.zero_()
    contextual, _, own_first = wrapped(model, first, null=0.5)
    constant, _, registers = wrapped(model, first)
    registers.constant = True
    assert contextual(sides).item() == pytest.approx(constant(sides[:2]).item(), abs=1e-12)


def test_some_slots_of_some_texts_are_dropped(tiny_lm_folder):
    model, first = parts_of(tiny_lm_folder)
    rows_JD, null_JD = first.of_texts(TEXTS).double(), torch.zeros(SLOTS, 32).double()
    table, retriever, found = model[0].model.get_input_embeddings(), RetrieverModule(model), []
    retriever.context, retriever.slot_dropout = (rows_JD, null_JD), 0.25
    ids_BJ = torch.tensor(retriever.slots).expand(400, -1)
    layer = model[0].model.layers[0]
    layer.register_forward_pre_hook(lambda *_: found.append(table(ids_BJ)))
    retriever.states(retriever.tokenize(TEXTS[:1], "query"))
    found = found[-1]
    is_null = (found == 0).all(-1)
    assert 0.2 < is_null.double().mean() < 0.3 and is_null.any(1).sum() < 300
    torch.testing.assert_close(found[~is_null], rows_JD.expand(400, -1, -1)[~is_null])


def test_only_the_first_stages_transformer_is_under_bf16_autocast(tiny_lm_folder):
    model, first = parts_of(tiny_lm_folder, double=False)
    retriever, seen = RetrieverModule(model), {}
    parts = build_context(Recipe.of(context=SLOTS, context_null=0.0), retriever, [], [], True)
    contextual = Contextual(ContrastiveLoss(retriever, tau=TAU), first, parts)
    for name, part in (("layer", first.model[0].model.layers[0]), ("dense", first.model[3])):
        part.register_forward_hook(
            lambda *_, name=name: seen.update({name: torch.is_autocast_enabled("cpu")})
        )
    contextual(sides_of(model, first))
    assert seen == {"layer": True, "dense": False}
    first.of_texts(TEXTS)  # as it is used and saved
    assert seen == {"layer": False, "dense": False}


ROWS = [Chunk(i // 4, f"text {i}") for i in range(40)]  # of ten documents


def batches(first, source, corpora=()):
    recipe = Recipe.of(context=SLOTS, context_from=source, groups="cluster")
    counted, rows = [], arrow_list(Chunk, iter(ROWS))
    parts = build_context(recipe, None, [], rows, False, counted.append, first, corpora)
    return ContextBatches(parts, lambda rows: {"query_x": torch.zeros(1)}, first), counted


def group(*indices, epoch=0):
    return [{"row": i, "document": ROWS[i].document, "epoch": epoch} for i in indices]


def test_which_documents_a_batch_reads(tiny_lm_folder):
    _, first = parts_of(tiny_lm_folder, double=False)
    own = [8, 9, 10, 11]
    batch, counted = batches(first, "batch")
    chosen = batch.choose(group(*own))
    assert len(set(chosen)) == SLOTS and set(chosen) < set(own)
    assert batch.choose(group(*own)) == chosen
    draws = [tuple(batch.choose(group(*own, epoch=epoch))) for epoch in range(9)]
    assert len(set(draws)) > 3
    assert sorted(batch.choose(group(8, 9))) == [8, 9]  # the third slot is null

    corpus, _ = batches(first, "corpus", corpora=[3, 7])  # documents 0-2, 3-6, 7-9
    for first_row, low, high in ((0, 0, 12), (12, 12, 28), (30, 28, 40)):
        members = range(first_row, first_row + 4)
        drawn = {i for epoch in range(30) for i in corpus.choose(group(*members, epoch=epoch))}
        assert drawn <= set(range(low, high)) - set(members) and len(drawn) > 5

    made = batch(group(*own))
    tensors = "input_ids", "attention_mask", "prompt_length"
    assert set(made) == {"query_x", *(f"context_{name}" for name in tensors)}
    assert len(made["context_input_ids"]) == SLOTS
    assert counted == [int(made["context_attention_mask"].sum())]
