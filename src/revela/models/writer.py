"""A causal LM that writes: passages in, what it says of each out, several at a time."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from revela.data.queries import CLOSING, OPENING, Prompting, Writer
from revela.errors import RevelaError
from revela.models.retriever import has_fast_bf16

NEW_TOKENS = 40


def writer(folder: Path, prompting: Prompting, passage_tokens: int) -> Writer:
    """Greedy answers of the LM in this folder. What comes before every passage is read once.

    Args:
        folder: of transformers.
        prompting: how to ask.
        passage_tokens: longest passage; the rest is cut off.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if has_fast_bf16(device) else torch.float32
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).to(device).eval()
    except (OSError, ValueError, KeyError) as error:
        raise RevelaError(f"{folder} cannot be opened as a causal LM: {str(error).splitlines()[0]}") from error
    if prompting.chat and not tokenizer.chat_template:
        raise RevelaError(f"the tokenizer of {folder} has no chat template: use --query-prompting examples")
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    def ids_of(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    before, after = prompting.before, prompting.after
    start = [] if prompting.chat else [i for i in tokenizer("a")["input_ids"] if i == tokenizer.bos_token_id]
    if prompting.chat:
        turn = tokenizer.apply_chat_template(
            [{"role": "user", "content": before + "\x1f" + after}], add_generation_prompt=True, tokenize=False
        )
        before, _, after = turn.partition("\x1f")
        after += OPENING
    head, foot = [*start, *ids_of(before)], ids_of(after)
    read = DynamicCache()
    with torch.inference_mode():
        model(input_ids=torch.tensor([head], device=device), past_key_values=read, use_cache=True, logits_to_keep=1)

    @torch.inference_mode()
    def write(passages: Sequence[str]) -> list[str]:
        tails = [ids_of(p)[:passage_tokens] + foot for p in passages]
        longest = max(map(len, tails))
        padded = [[pad] * (longest - len(t)) + t for t in tails]
        mask = [[1] * len(head) + [0] * (longest - len(t)) + [1] * len(t) for t in tails]
        cache = copy.deepcopy(read)
        cache.batch_repeat_interleave(len(passages))
        ids = model.generate(
            input_ids=torch.tensor([[*head, *t] for t in padded], device=device),
            attention_mask=torch.tensor(mask, device=device),
            past_key_values=cache,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            stop_strings=[CLOSING, "?", "\n\n"],
            tokenizer=tokenizer,
            pad_token_id=pad,
        )
        outputs: list[str] = tokenizer.batch_decode(ids[:, len(head) + longest :], skip_special_tokens=True)
        return outputs

    return write
