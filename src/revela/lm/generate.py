"""A causal LM that writes: passages in, what it says of each out, several at a time."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import torch

from revela.corpus.queries import CLOSING, OPENING, Prompting, Writer
from revela.device import compute_device, uses_bf16
from revela.lm.language_model import load_tokenizer, open_causal_lm
from revela.lm.prompts import in_chat, plain_ids, start_ids
from revela.settings import Precision

NEW_TOKENS = 40


def writer(folder: Path, prompting: Prompting, passage_tokens: int, precision: Precision) -> Writer:
    """Greedy answers of the LM in this folder. What comes before every passage is read once.

    Args:
        folder: of transformers.
        prompting: how to ask.
        passage_tokens: longest passage; the rest is cut off.
        precision: arithmetic of the LM.
    """
    from transformers import DynamicCache

    device = compute_device()
    model = open_causal_lm(
        folder, torch.bfloat16 if uses_bf16(precision, device) else torch.float32
    ).to(device)
    tokenizer = load_tokenizer(folder)
    if prompting.chat:
        before, after = in_chat(
            tokenizer, prompting.before, prompting.after, "--query-prompting examples"
        )
        head, foot = plain_ids(tokenizer, before), plain_ids(tokenizer, after + OPENING)
    else:
        head, foot = (
            [*start_ids(tokenizer), *plain_ids(tokenizer, prompting.before)],
            plain_ids(tokenizer, prompting.after),
        )
    read = DynamicCache()
    with torch.inference_mode():
        model(
            input_ids=torch.tensor([head], device=device),
            past_key_values=read,
            use_cache=True,
            logits_to_keep=1,
        )

    @torch.inference_mode()
    def write(passages: Sequence[str]) -> list[str]:
        tails = [plain_ids(tokenizer, p)[:passage_tokens] + foot for p in passages]
        longest = max(map(len, tails))
        padded = [[tokenizer.pad_token_id] * (longest - len(t)) + t for t in tails]
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
            pad_token_id=tokenizer.pad_token_id,
        )
        outputs: list[str] = tokenizer.batch_decode(
            ids[:, len(head) + longest :], skip_special_tokens=True
        )
        return outputs

    return write
