"""Write a query for each passage with a causal LM, several passages per batch.

training/generated_queries.py has the prompts. Every prompt begins with the same text (instruction
or examples), so its keys and values are computed once and copied for each batch. Passages are
padded on the left.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from revela.encoders.torch_model import uses_bf16
from revela.training.device import compute_device
from revela.training.lm.prompts import plain_ids, start_ids
from revela.training.models import load_tokenizer, open_causal_lm
from revela.types import Precision

NEW_TOKENS = 40  # maximum length of the output
PLACE = "{passage}"  # in a prompt
CLOSING = "</question>"  # by which some models end a question

Writer = Callable[[Sequence[str]], list[str]]
"""Passages -> what a language model writes about each."""


def writer(folder: Path, prompt: str, passage_tokens: int, precision: Precision) -> Writer:
    """Open the LM in a folder, as a function that writes about passages by greedy decoding.

    The text of the prompt before ``PLACE`` is read here, once. Passages are truncated to
    ``passage_tokens``.
    """
    from transformers import DynamicCache

    device = compute_device()
    dtype = torch.bfloat16 if uses_bf16(precision, device) else torch.float32
    model = open_causal_lm(folder, dtype).to(device)
    tokenizer, rows = load_tokenizer(folder), model.get_input_embeddings().num_embeddings
    (before, _, after), start = prompt.partition(PLACE), start_ids(tokenizer)
    head, foot = [*start, *plain_ids(tokenizer, before)], plain_ids(tokenizer, after)
    head_cache, head_1T = DynamicCache(), torch.tensor([head], device=device)
    with torch.inference_mode():
        model(input_ids=head_1T, past_key_values=head_cache, use_cache=True, logits_to_keep=1)

    @torch.inference_mode()
    def write(passages: Sequence[str]) -> list[str]:
        tails = [plain_ids(tokenizer, p)[:passage_tokens] + foot for p in passages]
        longest = max(map(len, tails))
        padded = [[tokenizer.pad_token_id] * (longest - len(t)) + t for t in tails]
        mask = [[1] * len(head) + [0] * (longest - len(t)) + [1] * len(t) for t in tails]
        cache = copy.deepcopy(head_cache)
        cache.batch_repeat_interleave(len(passages))
        read = torch.tensor([[*head, *t] for t in padded], device=device)
        ids = model.generate(
            input_ids=read.clamp(max=rows - 1),  # a token may have no row, as in LanguageModel.pack
            attention_mask=torch.tensor(mask, device=device),
            past_key_values=cache,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            stop_strings=[CLOSING, "?", "\n\n"],
            tokenizer=tokenizer,
            pad_token_id=tokenizer.pad_token_id,
        )
        new_ids = ids[:, len(head) + longest :]
        outputs: list[str] = tokenizer.batch_decode(new_ids, skip_special_tokens=True)
        return outputs

    return write
