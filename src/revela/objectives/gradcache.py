"""GradCache (Gao et al., 2021): the backward pass of a step in parts, with the same gradient.

- ``embed`` runs the retriever on a few texts at a time and stores no activations; the backward pass
  runs it again.
- ``detached_backward`` takes the gradient of a loss with respect to a few small tensors at once, so
  that the graph of the loss is freed before the backward pass of what made those tensors begins.
  Memory is the larger of the two graphs, not their sum.

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
        model: the retriever; its output has ``sentence_embedding``.
        features: of N texts.
        batch: texts per forward pass, which the backward pass repeats with the same dropout; 0: all
            at once, without repetition.
    """

    def vectors(part: dict[str, Any]) -> Tensor:
        out: Tensor = model(dict(part))["sentence_embedding"]
        return out.to(torch.promote_types(out.dtype, torch.float32))

    if not batch or not torch.is_grad_enabled():
        return vectors(features)
    found = []
    for i in range(0, len(features["input_ids"]), batch):
        rows = slice(i, i + batch)
        part = {k: v[rows] if isinstance(v, Tensor) and v.dim() else v for k, v in features.items()}
        found.append(checkpoint(vectors, part, use_reentrant=False))
    return torch.cat(found)


def detached_backward(loss_of: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """``loss_of(*inputs)``, the same scalar with the same gradient, but its graph is already freed.

    The result is linear in the inputs: loss + sum_i g_i (x_i - detached x_i), with g_i = d loss /
    d x_i. ``loss_of`` must depend on nothing else that is trained; it may not need all inputs.
    """
    leaves = [t.detach().requires_grad_(t.requires_grad) for t in inputs]
    loss = loss_of(*leaves)
    trained = [pair for pair in zip(inputs, leaves, strict=True) if pair[1].requires_grad]
    if not trained or not loss.requires_grad:
        return loss.detach()
    gradients = torch.autograd.grad(loss, [leaf for _, leaf in trained], allow_unused=True)
    pairs = zip((t for t, _ in trained), gradients, strict=True)
    linear = torch.stack([(t * g).sum() for t, g in pairs if g is not None]).sum()
    return loss.detach() + linear - linear.detach()
