"""Memory of a part instead of the whole: two cuts through a training step that change no gradient
(GradCache; Gao et al., 2021).

- ``embed`` reads texts a few at a time and keeps nothing of the way; the backward pass reads them
  again.
- ``cut`` takes the gradient of a loss to a few small tensors at once, so that the graph behind the
  loss is gone before the backward pass of what made those tensors begins.

Shapes: N texts, D width of a vector.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def embed(model: nn.Module, features: dict[str, Any], batch: int) -> Tensor:
    """(N, D) vectors of tokenized texts, in fp32 or better.

    Args:
        model: gives ``sentence_embedding``.
        features: of N texts.
        batch: texts at a time, forward and once more in the backward pass (with the same dropout);
            0: all at once, and once.
    """

    def vectors(part: dict[str, Any]) -> Tensor:
        out: Tensor = model(dict(part))["sentence_embedding"]
        return out.to(torch.promote_types(out.dtype, torch.float32))

    n_texts = len(features["input_ids"])
    if not batch or not torch.is_grad_enabled():
        return vectors(features)
    parts = (
        {
            k: v[i : i + batch] if isinstance(v, Tensor) and v.dim() else v
            for k, v in features.items()
        }
        for i in range(0, n_texts, batch)
    )
    return torch.cat([checkpoint(vectors, part, use_reentrant=False) for part in parts])


def cut(loss_of: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
    """``loss_of(*inputs)``: the same scalar with the same gradient to the inputs, but its own graph
    is already freed.

    Args:
        loss_of: must depend on nothing else that is trained.
        inputs: tensors of any shape, or None; the loss may not need all of them.
    """
    leaves = [None if t is None else t.detach().requires_grad_(t.requires_grad) for t in inputs]
    loss = loss_of(*leaves)
    wanted = [
        (t, leaf)
        for t, leaf in zip(inputs, leaves, strict=True)
        if t is not None and leaf is not None and leaf.requires_grad
    ]
    if not wanted or not loss.requires_grad:
        return loss.detach()
    gradients = torch.autograd.grad(loss, [leaf for _, leaf in wanted], allow_unused=True)
    linear = torch.stack(
        [(t * g).sum() for (t, _), g in zip(wanted, gradients, strict=True) if g is not None]
    ).sum()
    return loss.detach() + linear - linear.detach()
