"""Each token of a prompt is marked with the part that it comes from."""

from __future__ import annotations

import pytest

from revela.errors import RevelaError
from revela.lm.prompts import Prompts

TEXTS = ["Ocean one is deep.", "A garden of two paths.\n", "Planet three."]


def test_candidates_and_tail_are_marked(tiny_tokenizer):
    prompts = Prompts(tiny_tokenizer, 64, 32, chat=False)
    ids, document = prompts.candidates(TEXTS)
    assert len(ids) == len(document) and set(document) == {-1, 0, 1, 2}
    for i, text in enumerate(TEXTS):
        part = [token for token, d in zip(ids, document, strict=True) if d == i]
        assert tiny_tokenizer.decode(part) == f"[{i + 1}] {text.strip()}"
    ids, role = prompts.tail("Which planet?", TEXTS[2])
    said = tiny_tokenizer.decode([t for t, r in zip(ids, role, strict=True) if r == 2])
    asked = tiny_tokenizer.decode([t for t, r in zip(ids, role, strict=True) if r == 1])
    assert said == TEXTS[2] and "Which planet?" in asked and sorted(role) == role


def test_long_parts_are_truncated(tiny_tokenizer):
    prompts = Prompts(tiny_tokenizer, 3, 4, chat=False)
    _, document = prompts.candidates(["ocean " * 50])
    assert document.count(0) <= 3 + len(tiny_tokenizer("[1] ")["input_ids"])
    _, role = prompts.tail("x " * 50, "y " * 50)
    assert role.count(2) == 3


def test_a_chat_template_goes_around(tiny_tokenizer):
    import copy

    with pytest.raises(RevelaError, match="no chat template: use --lm-prompt plain"):
        Prompts(tiny_tokenizer, 8, 8, chat=True)
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}<s>{{ m['role'] }}:{{ m['content'] }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant:{% endif %}"
    )
    prompts = Prompts(tokenizer, 64, 64, chat=True)
    ids, _ = prompts.candidates(TEXTS[:1])
    tail, role = prompts.tail("Which?", TEXTS[0])
    text = tokenizer.decode(ids + tail)
    assert text.startswith("<s>user:") and "</s><s>assistant:" in text and text.endswith(TEXTS[0])
    asked = tokenizer.decode([t for t, r in zip(tail, role, strict=True) if r == 1])
    assert "assistant:" in asked  # the rows up to the answer are question rows
