"""Cross-entropy of a frozen linear head, one block of rows at a time.

    loss = -log softmax(h W^T + b)[target]        d loss / d h = (softmax - onehot) W

h is the head's input; W and b are its weights. The forward pass computes loss and gradient from
the same logits: nothing is recomputed. The logits of 875 tokens over 49,152 words at once would
take 172 MB in fp32, and several times that with the backward pass.

Shapes: R rows, D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# 32 and 512 MiB in fp32. A GPU computes a block of 2**23 in less time than it takes to start it.
LOGITS_PER_BLOCK, LOGITS_PER_BLOCK_OF_A_GPU = 2**23, 2**27


def linear_cross_entropy(
    hidden_RD: Tensor,
    weight_VD: Tensor,
    targets_R: Tensor,
    bias_V: Tensor | None = None,
    logits_per_block: int | None = None,
) -> Tensor:
    """``F.cross_entropy(F.linear(hidden, W, b), targets, reduction="none")``, in nats, (R,).

    Args:
        hidden_RD: h; only it gets a gradient.
        weight_VD: W, frozen. The products are computed in its dtype.
        targets_R: token ids.
        bias_V: b, frozen.
        logits_per_block: logits in memory at a time. None: as many as suit the device.
    """
    if weight_VD.requires_grad or (bias_V is not None and bias_V.requires_grad):
        raise ValueError(
            "linear_cross_entropy gives the head no gradient: freeze it, or use F.cross_entropy"
        )
    if logits_per_block is None:
        on_cpu = hidden_RD.device.type == "cpu"
        logits_per_block = LOGITS_PER_BLOCK if on_cpu else LOGITS_PER_BLOCK_OF_A_GPU
    rows_per_block = max(1, logits_per_block // len(weight_VD))
    losses_R: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden_RD, weight_VD, targets_R, bias_V, rows_per_block
    )
    return losses_R


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        weight_VD: Tensor,
        targets_R: Tensor,
        bias_V: Tensor | None,
        rows_per_block: int,
    ) -> Tensor:
        n_rows = len(hidden_RD)
        exact = torch.promote_types(weight_VD.dtype, torch.float32)
        losses_R = torch.empty(n_rows, dtype=exact, device=hidden_RD.device)
        gradient_RD = torch.empty_like(hidden_RD) if ctx.needs_input_grad[0] else None
        for start in range(0, n_rows, rows_per_block):
            rows = slice(start, start + rows_per_block)
            target_R1 = targets_R[rows, None]
            scores_RV = (hidden_RD[rows].to(weight_VD.dtype) @ weight_VD.T).to(exact)
            if bias_V is not None:
                scores_RV += bias_V
            # In place: over 49,152 logits torch.logsumexp takes .75 to 1 ms per row on a CPU, amax,
            # exp and sum about .1 ms.
            scores_RV -= scores_RV.amax(dim=1, keepdim=True)
            target_score_R1 = scores_RV.gather(1, target_R1)
            sum_R1 = scores_RV.exp_().sum(dim=1, keepdim=True)
            losses_R[rows] = (sum_R1.log() - target_score_R1).squeeze(1)
            if gradient_RD is not None:
                scores_RV /= sum_R1
                scores_RV.scatter_add_(1, target_R1, scores_RV.new_full(target_R1.shape, -1.0))
                gradient_RD[rows] = (scores_RV.to(weight_VD.dtype) @ weight_VD).to(hidden_RD.dtype)
        ctx.save_for_backward(gradient_RD)
        return losses_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient_RD,) = ctx.saved_tensors
        return gradient_RD * gradients[0][:, None].to(gradient_RD.dtype), None, None, None, None
