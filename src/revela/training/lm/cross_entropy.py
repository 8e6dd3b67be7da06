"""Cross-entropy of a linear head, one block of rows at a time.

    loss = -log softmax(h W^T + b)[target]        d loss / d h = (softmax - onehot) W

h is the head's input; W and b are its weights. With a frozen head the forward pass computes loss
and gradient from the same logits: nothing is recomputed. The gradient of a trained head depends on
the gradient of each row's loss, so the backward pass computes the logits of each block again. The
logits of 875 tokens over 49,152 words at once would take 172 MB in fp32, and several times that
with the backward pass; those of 32 groups, 9.6 GB.

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
    *,
    exact: bool = False,
) -> Tensor:
    """``F.cross_entropy(F.linear(hidden, W, b), targets, reduction="none")``, in nats, (R,).

    Args:
        hidden_RD: h.
        weight_VD: W, frozen or trained. The products are computed in its dtype.
        targets_R: token ids.
        bias_V: b.
        exact: do not round logits to the dtype of half-precision weights. Losses differ by some
            0.01 nats, which matters for differences of likelihoods. A GPU never rounds them; a CPU
            takes three times as long.
    """
    on_cpu = hidden_RD.device.type == "cpu"
    logits_per_block = LOGITS_PER_BLOCK if on_cpu else LOGITS_PER_BLOCK_OF_A_GPU
    rows_per_block = max(1, logits_per_block // len(weight_VD))
    losses_R: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden_RD, weight_VD, targets_R, bias_V, rows_per_block, exact
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
        exact: bool,
    ) -> Tensor:
        n_rows, trains_head = len(hidden_RD), ctx.needs_input_grad[1] or ctx.needs_input_grad[3]
        needs_gradient = ctx.needs_input_grad[0] and not trains_head
        wide = torch.promote_types(weight_VD.dtype, torch.float32)
        losses_R = torch.empty(n_rows, dtype=wide, device=hidden_RD.device)
        log_sum_R = torch.empty_like(losses_R) if trains_head else None
        gradient_RD = torch.empty_like(hidden_RD) if needs_gradient else None
        for start in range(0, n_rows, rows_per_block):
            rows = slice(start, start + rows_per_block)
            target_R1 = targets_R[rows, None]
            scores_RV = _logits(hidden_RD[rows], weight_VD, bias_V, exact)
            # In place: over 49,152 logits torch.logsumexp takes 0.75 to 1 ms per row on a CPU;
            # amax, exp and sum take about 0.1 ms.
            greatest_R1 = scores_RV.amax(dim=1, keepdim=True)
            scores_RV -= greatest_R1
            target_score_R1 = scores_RV.gather(1, target_R1)
            sum_R1 = scores_RV.exp_().sum(dim=1, keepdim=True)
            losses_R[rows] = (sum_R1.log() - target_score_R1).squeeze(1)
            if log_sum_R is not None:
                log_sum_R[rows] = (sum_R1.log() + greatest_R1).squeeze(1)
            if gradient_RD is not None:
                scores_RV /= sum_R1
                scores_RV.scatter_add_(1, target_R1, scores_RV.new_full(target_R1.shape, -1.0))
                gradient_RD[rows] = (scores_RV.to(weight_VD.dtype) @ weight_VD).to(hidden_RD.dtype)
        ctx.rows_per_block, ctx.exact, ctx.trains_head = rows_per_block, exact, trains_head
        head = (hidden_RD, weight_VD, targets_R, bias_V, log_sum_R)
        ctx.save_for_backward(*(head if trains_head else (gradient_RD,)))
        return losses_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.trains_head:
            (gradient_RD,) = ctx.saved_tensors
            return gradient_RD * gradients[0][:, None].to(gradient_RD.dtype), *[None] * 5
        hidden_RD, weight_VD, targets_R, bias_V, log_sum_R = ctx.saved_tensors
        wide = log_sum_R.dtype
        to_hidden_RD = torch.empty_like(hidden_RD)
        to_weight_VD = torch.zeros_like(weight_VD, dtype=wide)
        to_bias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=wide)
        for start in range(0, len(hidden_RD), ctx.rows_per_block):
            rows = slice(start, start + ctx.rows_per_block)
            scores_RV = _logits(hidden_RD[rows], weight_VD, bias_V, ctx.exact)
            slopes_RV = scores_RV.sub_(log_sum_R[rows, None]).exp_()
            target_R1 = targets_R[rows, None]
            slopes_RV.scatter_add_(1, target_R1, slopes_RV.new_full(target_R1.shape, -1.0))
            slopes_RV *= gradients[0][rows, None]
            if to_bias_V is not None:
                to_bias_V += slopes_RV.sum(dim=0)
            slopes_RV = slopes_RV.to(weight_VD.dtype)
            to_hidden_RD[rows] = (slopes_RV @ weight_VD).to(hidden_RD.dtype)
            to_weight_VD += slopes_RV.T @ hidden_RD[rows].to(weight_VD.dtype)
        to_weight_VD = to_weight_VD.to(weight_VD.dtype)
        to_bias_V = None if to_bias_V is None else to_bias_V.to(bias_V.dtype)
        return to_hidden_RD, to_weight_VD, None, to_bias_V, None, None


def _logits(hidden_RD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, exact: bool) -> Tensor:
    """(R, V), in fp32 or fp64; computed in half precision without ``exact``, if W is, on a CPU."""
    wide = torch.promote_types(weight_VD.dtype, torch.float32)
    hidden_RD = hidden_RD.to(weight_VD.dtype)
    if weight_VD.dtype == wide:
        scores_RV = hidden_RD @ weight_VD.T
    elif weight_VD.is_cuda:
        scores_RV = torch.mm(hidden_RD, weight_VD.T, out_dtype=wide)
    elif exact:
        scores_RV = hidden_RD.to(wide) @ weight_VD.to(wide).T
    else:
        scores_RV = (hidden_RD @ weight_VD.T).to(wide)
    if bias_V is not None:
        scores_RV += bias_V
    return scores_RV
