"""What of a chunk is its query."""

from __future__ import annotations

import random

import pytest

from revela.objectives.collate import ChunkCollator, first_half, random_half
from revela.retriever.build import build_retriever

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
    drawn = [random_half(text, tiny_tokenizer, 64, rng) for _ in range(400)]
    assert set(drawn) == runs and first_half(text, tiny_tokenizer, 64) in runs
    assert max(map(drawn.count, runs)) < 4 * 400 / len(runs)  # none is preferred
    assert random_half("x", tiny_tokenizer, 64, rng) == "x"


def test_a_random_half_lies_in_what_is_left_after_truncation(tiny_tokenizer):
    text = TEXTS[0]
    cut = tiny_tokenizer(text, return_offsets_mapping=True)["offset_mapping"][5][1]
    for seed in range(20):
        half = random_half(text, tiny_tokenizer, 6, random.Random(seed))
        assert half in text[:cut] and len(tokens(tiny_tokenizer, half)) <= 3


@pytest.mark.parametrize("side", ["first-half", "random-span", "whole"])
def test_the_query_side_is_what_the_setting_says(tiny_lm_folder, tiny_tokenizer, side):
    prompts = dict(query_prompt="query: ", passage_prompt="passage: ")
    model = build_retriever(
        tiny_lm_folder, layers=2, pooling="mean", max_tokens=64, lower_case=False, **prompts
    )
    rows = [{"text": text, "document": 0} for text in TEXTS]

    def queries(seed, rows=rows):
        batch = ChunkCollator(model, lambda _: None, tiny_tokenizer, 64, side, seed)(rows)
        return [
            model.tokenizer.decode(ids[mask.bool()])
            for ids, mask in zip(
                batch["query_input_ids"], batch["query_attention_mask"], strict=True
            )
        ]

    first = queries(0)
    assert first == queries(0)  # a resumed run sees the same
    assert any(first != queries(seed) for seed in range(1, 5)) == (side == "random-span")
    prompt = model.prompts["query"]
    if side == "whole":
        assert first == [prompt + text for text in TEXTS]
    if side == "first-half":
        assert first == [prompt + first_half(text, tiny_tokenizer, 64) for text in TEXTS]
    if side == "random-span":
        assert all(
            query.removeprefix(prompt).strip() in text
            for query, text in zip(first, TEXTS, strict=True)
        )
        spans = {
            tuple(
                queries(
                    0, [{"text": TEXTS[0], "document": 0}, {"text": str(other), "document": 1}]
                )[:1]
            )
            for other in range(12)
        }
        assert (
            len(spans) > 3
        )  # the chunk in another batch, as in another epoch, is asked for otherwise
