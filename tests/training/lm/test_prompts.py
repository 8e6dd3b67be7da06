"""Each token of a prompt is marked with the part that it comes from."""

from __future__ import annotations

from revela.training.lm.prompts import PromptMaker

TEXTS = ["Ocean one is deep.", "A garden of two paths.\n", "Planet three."]


def test_candidates_and_tail_are_marked(tiny_tokenizer):
    prompts = PromptMaker(tiny_tokenizer, 64, 3)
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
    prompts = PromptMaker(tiny_tokenizer, 3, 1)
    _, document = prompts.candidates(["ocean " * 50])
    assert document.count(0) <= 3 + len(tiny_tokenizer("[1] ")["input_ids"])
    _, role = prompts.tail("x " * 50, "y " * 50)
    assert role.count(2) == 3
