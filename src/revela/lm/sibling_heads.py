"""Which heads of an LM make use of a related document? A label-free probe by one gradient per gate.

Put a gate on every head (base 0.1) and take the gradient of the next-token loss to each gate twice:
once with the in-batch attention on chunks of the same document, once on chunks of others. A head
whose opening lowers the loss on siblings, but not on strangers, carries the signal that trains a
retriever: the difference ranks the heads.

Shapes: B chunks of a group, L layers, H heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from revela.lm.document_attention import InBatchAttention
from revela.lm.streams import ReadableLM

BASE_GATE = 0.1


def probe_heads(lm: ReadableLM, groups: Iterable[tuple[Any, Tensor]]) -> Tensor:
    """Score every head by d loss(other) / d gate - d loss(sibling) / d gate; (L, H), higher is
    better.

    Args:
        lm: a language model; its parameters get no gradient.
        groups: (packed chunks, document of each chunk (B,)) pairs. Chunks without a sibling, or
            without a stranger, read nothing.
    """
    scores_LH = torch.zeros(lm.n_layers, lm.n_heads)
    count = 0
    for packed, document_B in groups:
        document_B = document_B.to(packed.ids_1T.device)
        same_BB = document_B[:, None] == document_B[None, :]
        other_BB = ~same_BB
        same_BB.fill_diagonal_(False)
        memory = lm.read(packed, range(lm.n_layers))
        for sign, pairs_BB in ((-1.0, same_BB), (1.0, other_BB)):
            weights_BB = pairs_BB.float() / pairs_BB.sum(dim=1, keepdim=True).clamp(min=1)
            gates_LH = torch.full(
                (lm.n_layers, lm.n_heads), BASE_GATE, device=document_B.device, requires_grad=True
            )
            loss = lm.loss(
                packed, memory, InBatchAttention(weights_BB, packed.lengths, gates_LH, v_norm=False)
            )
            scores_LH += sign * torch.autograd.grad(loss, gates_LH)[0].cpu()
        count += 1
    return scores_LH / max(1, count)


def ranked_heads(scores_LH: Tensor) -> list[tuple[int, int, float]]:
    """(layer, head, score), best first."""
    n_heads = scores_LH.shape[1]
    order = scores_LH.flatten().argsort(descending=True)
    return [(int(i) // n_heads, int(i) % n_heads, float(scores_LH.flatten()[i])) for i in order]
