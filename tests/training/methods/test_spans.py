"""Spans are hidden by the rule and can be put back; the loss says how well they are written."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from conftest import build_context, make_rows, tiny_retriever
from revela.errors import RevelaError
from revela.training.lm.encoder_decoder import new_encoder_decoder
from revela.training.methods.dwell import IGNORED, corrupt, num_noise_spans, random_parts
from revela.training.recipe import Recipe
from revela.training.retriever.build import add_lora
from revela.training.retriever.module import RetrieverModule
from revela.training.step import sides

SENTINELS = [-k for k in range(1, 200)]


def put_back(read, target):
    """The text: each sentinel of the input replaced by what stands after it in the target."""
    spans, own = {}, []
    for i in target:
        if i < 0:
            spans[i] = own = []
        else:
            own.append(i)
    return [i for token in read for i in (spans[token] if token < 0 else [token])], spans


@given(st.integers(0, 300), st.floats(0.01, 0.5), st.floats(1, 9), st.integers(0, 99))
def test_spans_put_back_give_the_text(n, share, mean, seed):
    ids = list(range(n))
    read, target = corrupt(ids, share, mean, SENTINELS, random.Random(seed))
    text, spans = put_back(read, target)
    assert text == ids
    assert all(spans.values())
    assert list(spans) == [i for i in read if i < 0] == SENTINELS[: len(spans)]
    assert not any(a < 0 and b < 0 for a, b in pairwise(read))  # none touch
    assert len(spans) == (num_noise_spans(n, share, mean) if n > 1 else 0)


def test_share_and_mean_length_over_many_draws():
    draw, hidden, tokens, spans = random.Random(0), 0, 0, 0
    ends = Counter()
    for _ in range(10_000):
        ids = list(range(draw.randint(60, 500)))
        read, target = corrupt(ids, 0.15, 3.0, SENTINELS, draw)
        n_spans = sum(i < 0 for i in target)
        hidden, spans, tokens = hidden + len(target) - n_spans, spans + n_spans, tokens + len(ids)
        ends["first"] += read[0] < 0
        ends["last"] += read[-1] < 0
    assert hidden / tokens == pytest.approx(0.15, abs=5e-4)
    assert hidden / spans == pytest.approx(3.0, abs=0.05)
    assert ends["first"] == pytest.approx(ends["last"], rel=0.15) and ends["first"] > 100


def test_all_compositions_are_as_likely():
    draw = random.Random(0)
    found = Counter(tuple(random_parts(6, 3, draw)) for _ in range(20_000))
    assert len(found) == 10 and all(sum(parts) == 6 and min(parts) > 0 for parts in found)
    assert max(found.values()) < 1.15 * min(found.values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("spans") / "new"
    new_encoder_decoder("new:tiny", (row["text"] for row in make_rows(80)), made, seed=0)
    return made


def built(folder, **changes):
    """A retriever, and the method's loss and batches for it."""
    recipe = Recipe.of("dwell-spans", **{"model": "new:tiny", "lm_tokens": 48, **changes})
    model = tiny_retriever(folder, layers=0, query_prompt="", passage_prompt="")
    add_lora(model, 0, 1, 0.0)
    read, retriever = [], RetrieverModule(model)
    parts = build_context(recipe, retriever, [], [], False, read.append, folder=folder)
    loss, batches = recipe.method.build(parts)
    return SimpleNamespace(retriever=retriever, loss=loss, batches=batches, read=read)


def row(text, number=0, epoch=0):
    return {"text": text, "row": number, "epoch": epoch, "document": 0, "query": ""}


def test_a_batch_is_a_run_of_each_row_and_the_same_for_the_same_epoch(folder):
    made = built(folder)
    rows = [row(make_rows(20)[i]["text"], i) for i in (3, 9)] + [row("ocean1.", 5)]
    batch = made.batches(rows)
    lm, tokenizer = made.loss.lm, made.loss.lm.tokenizer
    sentinels = {i: -1 - k for k, i in enumerate(lm.sentinels)}
    names = ("text_input_ids", "target_ids", "text_attention_mask")
    for given_row, ids, target, mask in zip(rows, *(batch[n] for n in names), strict=True):
        read = ids[mask.bool()].tolist()
        wanted = target[target != IGNORED].tolist()
        assert read.pop() == wanted.pop() == tokenizer.eos_token_id
        signed = ([sentinels.get(i, i) for i in some] for some in (read, wanted))
        run, _ = put_back(*signed)
        assert len(run) <= 48 and tokenizer.decode(run) in given_row["text"]
    assert made.read == [int(batch["text_attention_mask"].sum())]
    alone = made.batches(rows[:1])
    length = int(batch["text_attention_mask"][0].sum())
    assert torch.equal(alone["text_input_ids"][0, :length], batch["text_input_ids"][0, :length])
    other = made.batches([row(rows[0]["text"], 3, epoch=1)])
    assert other["target_ids"].tolist() != alone["target_ids"].tolist()


def test_the_loss_is_that_of_the_stock_model(folder):
    """Of encoder and decoder read as one, text by text; without padding and with it."""
    from transformers import AutoModelForSeq2SeqLM

    made = built(folder)
    batch = made.batches([row(r["text"][: 80 * (i + 1)], i) for i, r in enumerate(make_rows(3))])
    stock = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    total, count = 0.0, 0
    names = ("text_input_ids", "text_attention_mask", "target_ids")
    for ids, mask, target in zip(*(batch[name] for name in names), strict=True):
        target = target[target != IGNORED][None]
        logits = stock(input_ids=ids[mask.bool()][None], labels=target).logits
        total += F.cross_entropy(logits[0], target[0], reduction="sum").item()
        count += target.numel()
    made.retriever.packs = False
    assert made.loss(sides(batch)).item() == pytest.approx(total / count, rel=1e-5)
    made.retriever.packs = True
    loss = made.loss(sides(batch))
    assert loss.item() == pytest.approx(total / count, rel=1e-5)
    loss.backward()
    assert all(p.grad is not None for p in made.loss.parameters())


UNSUITED = [
    ({"lora_rank": 4}, "trains all weights: give --lora-rank 0"),
    ({"context": 2}, "--context has no effect on --method dwell-spans"),
]


@pytest.mark.parametrize(("change", "message"), UNSUITED)
def test_settings_that_do_not_suit(folder, change, message):
    recipe = Recipe.of("dwell-spans", **change)
    with pytest.raises(RevelaError, match=message):
        recipe.method.refuse(recipe.retriever, recipe.context)
    with pytest.raises(RevelaError, match="--lm-tokens 4096 makes 205 spans and the tokenizer has"):
        built(folder, lm_tokens=4096)
