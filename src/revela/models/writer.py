"""A causal LM that writes: prompts in, continuations out, several at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from revela.data.queries import CLOSING, OPENING, Writer
from revela.errors import RevelaError
from revela.models.retriever import has_fast_bf16

NEW_TOKENS = 48


def writer(folder: Path, passage_tokens: int) -> Writer:
    """Greedy continuations of prompts by the LM in this folder, each begun with ``OPENING``.

    An instruct model is asked in its chat template; any other model gets the prompt as it is.

    Args:
        folder: of transformers.
        passage_tokens: prompts may be longer than this by 128 tokens; the rest is cut off.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if has_fast_bf16(device) else torch.float32
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, padding_side="left", truncation_side="left")
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).to(device).eval()
    except (OSError, ValueError, KeyError) as error:
        raise RevelaError(f"{folder} cannot be opened as a causal LM: {str(error).splitlines()[0]}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token

    def asked(prompt: str) -> str:
        if not tokenizer.chat_template:
            return f"{prompt}\n\n{OPENING}"
        turn = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False)
        return f"{turn}{OPENING}"

    @torch.inference_mode()
    def write(prompts: Sequence[str]) -> list[str]:
        inputs = tokenizer(
            [asked(p) for p in prompts],
            add_special_tokens=not tokenizer.chat_template,  # a template brings its own
            padding=True,
            truncation=True,
            max_length=passage_tokens + 128,
            return_tensors="pt",
        ).to(device)
        ids = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            stop_strings=[CLOSING, "?"],
            tokenizer=tokenizer,
            pad_token_id=tokenizer.pad_token_id,
        )
        outputs: list[str] = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return outputs

    return write
