"""Generated text is the same in batches as alone; the LM has the precision asked for."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from revela.training.lm import generate as writer
from revela.training.lm.generate import PLACE

PROMPT = f"Passage: engine1. {PLACE} Question:"


def test_a_real_model_writes_what_it_would_write_alone(tiny_lm_folder):
    """Padded, in a batch, after a beginning read once: the words of generating from one text."""
    passages = ["ocean1 ocean2.", "garden1 garden2 garden3 garden4 garden5."]
    outputs = writer.writer(tiny_lm_folder, PROMPT, 64, "fp32")(passages)
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm_folder)
    model = AutoModelForCausalLM.from_pretrained(tiny_lm_folder)
    for passage, output in zip(passages, outputs, strict=True):
        parts = ("Passage: engine1. ", passage, " Question:")
        pieces = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts]
        ids = torch.tensor([[i for piece in pieces for i in piece]])
        alone = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=writer.NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        want = tokenizer.decode(alone[0, ids.shape[1] :], skip_special_tokens=True)
        assert output and want.startswith(output[:-1])  # it may stop earlier, at a question mark


def test_a_token_without_a_row_is_read(tiny_lm_folder, tmp_path):
    """Gemma 3 has one, for images."""
    AutoModelForCausalLM.from_pretrained(tiny_lm_folder).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm_folder)
    tokenizer.add_tokens(["<image>"])
    tokenizer.save_pretrained(tmp_path)
    (output,) = writer.writer(tmp_path, PROMPT, 64, "fp32")(["ocean1 <image> ocean2."])
    assert output


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_it_computes_in_the_precision_asked_for(tiny_lm_folder, monkeypatch, precision, dtype):
    opened = []
    original = writer.open_causal_lm

    def noting(*arguments):
        opened.append(original(*arguments))
        return opened[-1]

    monkeypatch.setattr(writer, "open_causal_lm", noting)
    writer.writer(tiny_lm_folder, PROMPT, 64, precision)
    assert {parameter.dtype for parameter in opened[0].parameters()} == {dtype}
