"""Document attention one document at a time, recomputed in the backward pass.

The sum of document_attention.py as a Python loop over documents, forward and backward. For each
document it computes only the rows with a weight above ``epsilon``, without padding. Scores and
outputs of a (row, document) pair exist only while the loop is at its document, so memory grows with
the tokens, not with the pairs.

With a = softmax(s) V over one document, n = softmax(s) |V| + eps and o = a / n:

    d a = d o / n        d n = -(d o . o) / n        d s = p (d p - sum p d p),  p = softmax(s)

Shapes: A runs of rows, T rows in all; B documents packed into S tokens; H query heads, G key-value
heads, D head width; per document, L tokens and R rows that attend to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from revela.training.lm.document_weights import AttendingRows, DocumentWeights


def recomputed_document_attention(
    query_HTD: Tensor,
    key_GSD: Tensor,
    value_GSD: Tensor,
    documents: DocumentWeights,
    scale: float,
    norm_eps: float | None,
) -> Tensor:
    """(H, T, D); arguments as in ``document_attention``, ``norm_eps`` None for no V-norm."""
    if norm_eps is not None:
        # CUDA's autocast computes norms in fp32.
        norm_GS1 = value_GSD.norm(dim=-1, keepdim=True).to(value_GSD.dtype)
        value_GSD = torch.cat([value_GSD, norm_GS1], dim=-1)
    output_HTD: Tensor = _Recomputed.apply(  # type: ignore[no-untyped-call]
        query_HTD, key_GSD, value_GSD, documents.weights_AB, documents.attending, scale, norm_eps
    )
    return output_HTD


class _Recomputed(torch.autograd.Function):
    """With ``norm_eps`` the last column of the values is their norm."""

    @staticmethod
    def forward(
        ctx: Any,
        query_HTD: Tensor,
        key_GSD: Tensor,
        value_GSD: Tensor,
        weights_AB: Tensor,
        attending: Sequence[AttendingRows],
        scale: float,
        norm_eps: float | None,
    ) -> Tensor:
        ctx.save_for_backward(query_HTD, key_GSD, value_GSD, weights_AB)
        ctx.attending, ctx.scale, ctx.norm_eps = attending, scale, norm_eps
        width = value_GSD.shape[-1] - (norm_eps is not None)
        exact = torch.promote_types(query_HTD.dtype, torch.float32)
        total_HTD = query_HTD.new_zeros(*query_HTD.shape[:2], width, dtype=exact)
        for document in _attended_documents(query_HTD, key_GSD, attending, scale):
            output_GRD = document.attention_GRL @ value_GSD[:, document.attending.tokens]
            output_HRD = document.by_head(_v_normed(output_GRD, norm_eps))
            document.add(total_HTD, output_HRD * document.weight_R1)
        return total_HTD.to(query_HTD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        query_HTD, key_GSD, value_GSD, _ = ctx.saved_tensors
        exact = torch.promote_types(query_HTD.dtype, torch.float32)
        grad_query, grad_key, grad_value, grad_weights = (
            torch.zeros_like(t, dtype=exact) if needed else None
            for t, needed in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        )
        for document in _attended_documents(query_HTD, key_GSD, ctx.attending, ctx.scale):
            attending, tokens = document.attending, document.attending.tokens
            attention_GRL = document.attention_GRL
            output_GRD = attention_GRL @ value_GSD[:, tokens]
            normed_GRD = _v_normed(output_GRD, ctx.norm_eps)
            grad_HRD = document.take(grad_outputs[0])
            grad_GRD = document.by_key(grad_HRD * document.weight_R1)
            if ctx.norm_eps is not None:
                grad_norm_GR1 = -(grad_GRD * normed_GRD).sum(-1, keepdim=True)
                grad_GRD = torch.cat([grad_GRD, grad_norm_GR1], dim=-1)
                grad_GRD = grad_GRD / (output_GRD[..., -1:] + ctx.norm_eps)
            if grad_weights is not None:
                slope_HRD = grad_HRD * document.by_head(normed_GRD)
                slope_R = slope_HRD.sum(dim=(0, 2), dtype=exact) * attending.is_kept_R
                grad_weights[:, attending.index].index_add_(0, attending.run_R, slope_R)
            if grad_value is not None:
                grad_value[:, tokens] = (attention_GRL.transpose(1, 2) @ grad_GRD).to(exact)
            if grad_query is None and grad_key is None:
                continue
            # sum p d p is the output times its gradient.
            grad_scores_GRL = grad_GRD @ value_GSD[:, tokens].transpose(1, 2)
            grad_scores_GRL -= (grad_GRD * output_GRD).sum(-1, keepdim=True)
            grad_scores_GRL *= attention_GRL
            if grad_query is not None:
                document.add(grad_query, document.by_head(grad_scores_GRL @ key_GSD[:, tokens]))
            if grad_key is not None:
                grad_key_GLD = grad_scores_GRL.transpose(1, 2) @ document.query_GRD
                grad_key[:, tokens] = grad_key_GLD.to(exact)
        if grad_query is not None:
            grad_query *= ctx.scale
        gradients = grad_query, grad_key, grad_value, grad_weights
        pairs = zip(gradients, ctx.saved_tensors, strict=True)
        return *(g if g is None else g.to(t.dtype) for g, t in pairs), None, None, None


def _v_normed(output_GRD: Tensor, norm_eps: float | None) -> Tensor:
    if norm_eps is None:
        return output_GRD
    return output_GRD[..., :-1] / (output_GRD[..., -1:] + norm_eps)


@dataclass(frozen=True)
class _AttendedDocument:
    """One document, and the attention of its rows over its tokens.

    Rows of heads that share keys are consecutive: (G, H / G * R, ...).
    """

    attending: AttendingRows
    weight_R1: Tensor
    query_GRD: Tensor
    attention_GRL: Tensor
    heads: int

    def by_head(self, rows_GRX: Tensor) -> Tensor:
        return rows_GRX.reshape(self.heads, len(self.weight_R1), rows_GRX.shape[-1])

    def by_key(self, rows_HRX: Tensor) -> Tensor:
        return rows_HRX.reshape(len(self.query_GRD), -1, rows_HRX.shape[-1])

    def take(self, all_HTX: Tensor) -> Tensor:
        rows_R = self.attending.rows_R
        return all_HTX if rows_R is None else all_HTX.index_select(1, rows_R)

    def add(self, total_HTX: Tensor, rows_HRX: Tensor) -> None:
        if self.attending.rows_R is None:
            total_HTX += rows_HRX
        else:
            total_HTX.index_add_(1, self.attending.rows_R, rows_HRX.to(total_HTX.dtype))


def _attended_documents(
    query_HTD: Tensor, key_GSD: Tensor, documents: Sequence[AttendingRows], scale: float
) -> Iterator[_AttendedDocument]:
    query_HTD = query_HTD * scale
    for attending in documents:
        rows_R = attending.rows_R
        query_HRD = query_HTD if rows_R is None else query_HTD.index_select(1, rows_R)
        query_GRD = query_HRD.reshape(len(key_GSD), -1, query_HTD.shape[-1])
        key_GLD = key_GSD[:, attending.tokens]
        yield _AttendedDocument(
            attending,
            weight_R1=attending.weight_R1.to(query_HTD.dtype),
            query_GRD=query_GRD,
            attention_GRL=(query_GRD @ key_GLD.transpose(1, 2)).softmax(dim=-1),
            heads=len(query_HTD),
        )
