"""What of a chunk is its query."""

from __future__ import annotations

import pytest

from conftest import build_context, tiny_retriever
from revela.text.spool import arrow_list
from revela.training.groups.store import Member
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
