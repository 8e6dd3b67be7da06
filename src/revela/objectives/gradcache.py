"""GradCache (Gao et al., 2021): a step's backward pass in parts, with the same gradient.

- ``embed`` runs the retriever on a few texts at a time without storing activations. The backward
  pass runs it again.
- ``detached_backward`` differentiates a loss at once by a few small tensors. This frees the graph
  of the loss before the backward pass through what made those tensors. Memory is the larger of the
  two graphs, not their sum.

Shapes: N texts, D width of a vector.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Side = dict[str, Tensor]


def embed(vectors: Callable[[Side], Tensor], features: Side, batch: int) -> Tensor:
    """(N, D) vectors of tokenized texts.

    Args:
        vectors: gives those of some of the texts.
        features: of N texts.
        batch: texts per forward pass; the backward pass repeats it with the same dropout. 0: all at
            once, without repetition.
    """
    if not batch or not torch.is_grad_enabled():
        return vectors(features)
    parts = []
    for i in range(0, len(features["input_ids"]), batch):
        rows = slice(i, i + batch)
        part = {name: tensor[rows] for name, tensor in features.items()}
        parts.append(checkpoint(vectors, part, use_reentrant=False))
    return torch.cat(parts)


def detached_backward(loss_of: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """``loss_of(*inputs)``, a scalar, with the same gradient but its graph already freed.

    The result is linear in the inputs: loss + sum_i g_i (x_i - detached x_i), where g_i = d loss /
    d x_i. ``loss_of`` must depend on no other trained tensor. It need not use all inputs.
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
