"""What of a chunk is its query; what a retriever was before training."""

from __future__ import annotations

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


def test_half_of_the_tokens_after_truncation(tiny_tokenizer):
    text = TEXTS[0]
    offsets = tiny_tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    for limit in (6, 64):
        half = text[: offsets[min(len(offsets), limit) // 2 - 1][1]]
        assert split_in_half(["x", text], tiny_tokenizer, limit) == ["x", half]


@pytest.mark.parametrize("side", ["first-half", "whole"])
def test_the_query_side_is_what_the_setting_says(tiny_lm_folder, tiny_tokenizer, side):
    model = tiny_retriever(tiny_lm_folder)
    recipe = Recipe.of(lm_tokens=64, query_side=side)
    parts = build_context(recipe, RetrieverModule(model), [], [], False)
    rows = [{"text": text, "document": 0, "row": i, "epoch": 0} for i, text in enumerate(TEXTS)]
    batch = ChunkBatches(parts, tiny_tokenizer, side)(rows)
    masked = zip(batch["query_input_ids"], batch["query_attention_mask"], strict=True)
    found = [model.tokenizer.decode(ids[mask.bool()]) for ids, mask in masked]
    sides = TEXTS if side == "whole" else split_in_half(TEXTS, tiny_tokenizer, 64)
    assert found == [model.prompts["query"] + text for text in sides]


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
