"""What of a chunk is its query."""

from __future__ import annotations

import random

import pytest
import torch

from revela.objectives.base import ChunkBatches, Parts
from revela.retriever.build import build_retriever
from revela.retriever.tokens import halves
from revela.settings import Recipe

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
    drawn = halves([text] * 400, tiny_tokenizer, 64, [rng] * 400)
    assert set(drawn) == runs and halves([text], tiny_tokenizer, 64)[0] in runs
    assert max(map(drawn.count, runs)) < 4 * 400 / len(runs)  # none is preferred
    assert halves(["x"], tiny_tokenizer, 64, [rng]) == ["x"]


def test_a_random_half_lies_in_what_is_left_after_truncation(tiny_tokenizer):
    text = TEXTS[0]
    cut = tiny_tokenizer(text, return_offsets_mapping=True)["offset_mapping"][5][1]
    for seed in range(20):
        (half,) = halves([text], tiny_tokenizer, 6, [random.Random(seed)])
        assert half in text[:cut] and len(tokens(tiny_tokenizer, half)) <= 3


@pytest.mark.parametrize("side", ["first-half", "random-span", "whole"])
def test_the_query_side_is_what_the_setting_says(tiny_lm_folder, tiny_tokenizer, side):
    prompts = dict(query_prompt="query: ", passage_prompt="passage: ")
    model = build_retriever(
        tiny_lm_folder, layers=2, pooling="mean", max_tokens=64, lower_case=False, **prompts
    )

    def queries(seed=0, epoch=0, order=(0, 1, 2)):
        """Of the texts in this order, by the text."""
        recipe = Recipe.of(lm_tokens=64, seed=seed, query_side=side)
        parts = Parts(recipe, model, [], [], torch.device("cpu"), False)
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
        assert list(first.values()) == [prompt + half for half in halves(TEXTS, tiny_tokenizer, 64)]
    if is_random:
        assert all(first[i].removeprefix(prompt).strip() in text for i, text in enumerate(TEXTS))
