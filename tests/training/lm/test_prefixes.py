"""Texts that continue another equal the joined texts, for each family; what a mix receives."""

from __future__ import annotations

import pytest
import torch
from test_language_model import FAMILIES, build

from revela.errors import RevelaError
from revela.training.lm.language_model import LanguageModel


@pytest.mark.parametrize("kind", FAMILIES)
def test_continuing_equals_the_joined_texts(kind):
    """Logits, losses and gradients of the input embeddings, against stock transformers."""
    generator = torch.Generator().manual_seed(2)
    before = torch.randint(3, 400, (1, 7), generator=generator)
    tails = torch.randint(3, 400, (3, 5), generator=generator)
    lengths = [5, 2, 4]
    plain = build(kind)
    joined = [torch.cat([before[0], t[:n]])[None] for t, n in zip(tails, lengths, strict=True)]
    want = [plain(input_ids=ids).logits[0, 7:] for ids in joined]
    lm = LanguageModel(build(kind))
    mask = torch.tensor([[1] * n + [0] * (5 - n) for n in lengths])
    packed = lm.pack(tails, mask)
    memory = lm.prefill(lm.pack(before, torch.ones_like(before)), range(4))
    got = lm.logits(packed, prefix=memory)
    torch.testing.assert_close(got, torch.cat(want), atol=1e-10, rtol=0)
    rows = packed.layout.with_next_R
    losses = lm.token_losses(packed, rows, prefix=memory)
    expected = [
        -w[t].log_softmax(-1)[tail[t + 1]]
        for w, tail, n in zip(want, tails, lengths, strict=True)
        for t in range(n - 1)
    ]
    torch.testing.assert_close(losses, torch.stack(expected), atol=1e-10, rtol=0)
    gradients = [
        torch.autograd.grad(total.sum(), model.get_input_embeddings().weight)[0]
        for total, model in ((losses, lm.model), (torch.stack(expected), plain))
    ]
    torch.testing.assert_close(*gradients, atol=1e-10, rtol=0)


def test_a_text_and_what_continues_it_must_fit_the_window():
    lm = LanguageModel(build("gemma3"))
    before, tail = torch.full((1, 60), 5), torch.full((1, 10), 6)
    memory = lm.prefill(lm.pack(before, torch.ones_like(before)), range(4))
    with pytest.raises(RevelaError, match="70 tokens is longer than the LM's sliding window of 64"):
        lm.logits(lm.pack(tail, torch.ones_like(tail)), prefix=memory)
