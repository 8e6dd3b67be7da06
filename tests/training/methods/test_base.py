"""What of a chunk is its query; what a retriever was before training."""

from __future__ import annotations

import random

import pytest
import torch

from conftest import Embed, build_context, tiny_retriever
from revela.text.spool import arrow_list
from revela.training.groups.store import Member
from revela.training.methods import gains
from revela.training.methods.base import RetrieverLoss
from revela.training.methods.gains import InitialRetriever
from revela.training.methods.revela import ChunkBatches, split_in_half
from revela.training.recipe import Recipe
from revela.training.retriever.module import RetrieverModule

TEXTS = [
    "ocean1 engine2 garden3 planet4 market5 violin0 enzyme1 castle2",
    "glacier3 circuit4 recipe5 harbour0",
    "x",
]


def tokens(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_random_half_is_any_run_of_half_of_the_tokens(tiny_tokenizer):
    text, rng = TEXTS[0], random.Random(0)
    offsets = tiny_tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    length = len(tokens(tiny_tokenizer, text)) // 2
    runs = {
        text[offsets[i][0] : offsets[i + length - 1][1]] for i in range(len(offsets) - length + 1)
    }  # a plain loop over all of them
    drawn = split_in_half([text] * 400, tiny_tokenizer, 64, [rng] * 400)
    short, first = split_in_half(["x", text], tiny_tokenizer, 64)
    assert set(drawn) == runs and first in runs and text.startswith(first) and short == "x"
    assert max(map(drawn.count, runs)) < 4 * 400 / len(runs)  # none is preferred
    assert split_in_half(["x"], tiny_tokenizer, 64, [rng]) == ["x"]


def test_a_random_half_lies_in_what_is_left_after_truncation(tiny_tokenizer):
    text = TEXTS[0]
    cut = tiny_tokenizer(text, return_offsets_mapping=True)["offset_mapping"][5][1]
    for seed in range(20):
        (half,) = split_in_half([text], tiny_tokenizer, 6, [random.Random(seed)])
        assert half in text[:cut] and len(tokens(tiny_tokenizer, half)) <= 3


@pytest.mark.parametrize("side", ["first-half", "random-span", "whole"])
def test_the_query_side_is_what_the_setting_says(tiny_lm_folder, tiny_tokenizer, side):
    model = tiny_retriever(tiny_lm_folder)

    def queries(seed=0, epoch=0, order=(0, 1, 2)):
        """Of the texts in this order, by the text."""
        recipe = Recipe.of(lm_tokens=64, seed=seed, query_side=side)
        parts = build_context(recipe, RetrieverModule(model), [], [], False)
        rows = [{"text": TEXTS[i], "document": 0, "row": i, "epoch": epoch} for i in order]
        batch = ChunkBatches(parts, tiny_tokenizer, side)(rows)
        masked = zip(batch["query_input_ids"], batch["query_attention_mask"], strict=True)
        found = [model.tokenizer.decode(ids[mask.bool()]) for ids, mask in masked]
        return dict(zip(order, found, strict=True))

    first, is_random = queries(), side == "random-span"
    # The same row in the same epoch, whatever shares its batch; another epoch and seed, another
    # half.
    assert first == queries() == queries(order=(2, 0, 1))
    assert queries(order=(0,))[0] == first[0]
    assert any(first != queries(seed=seed) for seed in range(1, 5)) == is_random
    assert (len({queries(epoch=epoch)[0] for epoch in range(12)}) > 3) == is_random
    prompt = model.prompts["query"]
    if side == "whole":
        assert list(first.values()) == [prompt + text for text in TEXTS]
    if side == "first-half":
        halves = split_in_half(TEXTS, tiny_tokenizer, 64)
        assert list(first.values()) == [prompt + half for half in halves]
    if is_random:
        assert all(first[i].removeprefix(prompt).strip() in text for i, text in enumerate(TEXTS))


@pytest.mark.parametrize(("sources", "whole"), [(("2",), {1, 2}), (("posts", "3"), {1, 3})])
def test_chunks_of_some_sources_are_whole_queries(tiny_lm_folder, tiny_tokenizer, sources, whole):
    model, names = RetrieverModule(tiny_retriever(tiny_lm_folder)), ("a:1", "posts:1", "b:2", "c:1")
    members = (Member(i, TEXTS[0], name=name) for i, name in enumerate(names))
    rows = arrow_list(Member, members)
    parts = build_context(Recipe.of(), model, [], rows, False, corpora=[1, 3])
    asked = [{"text": TEXTS[0], "document": i, "row": i, "epoch": 0} for i in range(4)]
    batches = (ChunkBatches(parts, tiny_tokenizer, "first-half", s) for s in ((), sources))
    plain, mixed = (batch(asked)["query_attention_mask"].sum(dim=1) for batch in batches)
    assert set((mixed > plain).nonzero().flatten().tolist()) == whole


class Noisy(Embed):
    """With dropout, and a list of whether each pass had it."""

    def __init__(self):
        super().__init__()
        self.noisy = []

    def pool(self, features):
        self.noisy.append(self.training)
        return torch.nn.functional.dropout(super().pool(features), 0.5, self.training)


def tokenized(*texts):
    """Tokenized texts, padded on the right."""
    longest = max(map(len, texts))
    ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def test_the_start_has_no_dropout_and_training_goes_on_with_it():
    loss_module, texts = RetrieverLoss(Noisy(), tau=1.0), tokenized([5, 6], [7, 8])
    start = InitialRetriever()
    found = [start.embed(loss_module, texts) for _ in range(2)]
    want = Embed()(texts)
    assert torch.equal(found[0], want) and torch.equal(found[1], want)
    assert loss_module.model.noisy == [False, False] and loss_module.model.training
    assert not found[0].requires_grad


@pytest.mark.parametrize("keep", [True, False])
def test_a_text_is_read_once_for_the_start_whatever_is_beside_it(keep):
    loss_module, start = RetrieverLoss(Embed(), tau=1.0), InitialRetriever(keep)
    first = start.embed(loss_module, tokenized([5, 6], [7, 8], [9, 10]))
    loss_module.model.table.weight.data.neg_()  # so that reading again shows
    again = start.embed(loss_module, tokenized([9, 10], [5, 6]))
    assert torch.equal(again, (1 if keep else -1) * first[[2, 0]])
    new = start.embed(loss_module, tokenized([9, 10], [9, 10, 11]))
    assert torch.equal(start.embed(loss_module, tokenized([9, 10, 11])), new[1:])


def test_no_more_vectors_of_the_start_are_kept_than_there_is_room_for(monkeypatch):
    monkeypatch.setattr(gains, "MAX_CACHED", 8 * 2)
    loss_module, start = RetrieverLoss(Embed(), tau=1.0), InitialRetriever(cache=True)
    for i in range(3, 9):
        start.embed(loss_module, tokenized([i, i + 1]))
    assert len(start.cached) == 2
