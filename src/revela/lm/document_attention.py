"""Document attention: every query row reads every document, each by its own softmax, mixed by given
weights.

For query rows Q and documents j with keys K_j, values V_j and a weight w_j a row:

    b = sum_j w_j * softmax(Q K_j^T * scale) V_j            (Revela, eqs. 5-7; DREAM injects the
    same form)

Rows come in runs that share their weights: a run is a document itself (Revela), or a question about
the documents (DREAM).

There is no causal mask: a query position sees every token of every other document. With ``v_norm``
each document's output is divided by the attention-weighted mean norm of its values (Revela, eq. 6,
in the form of the authors' code):

    softmax(..) V_j / (softmax(..) |V_j| + eps)

computed by appending |v| to V as one more column.

Traded: a Python loop over documents, forward and backward, instead of one large product. Each
document then meets only the rows that give it a weight above ``epsilon``, nothing is padded, and
scores and outputs of a pair live only while it is its turn: the backward pass computes them again.
Memory grows with the tokens, not with the pairs.

Shapes: A runs of rows packed one after another into T rows, B documents packed into S tokens
(Revela: the same), H query heads, G key-value heads, D head width; R rows of one document's
readers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Kernel = Literal["torch", "triton"]
V_NORM_EPS = 1e-6  # the constant of the authors' code
NEARLY_ALL = 0.8  # of the runs of rows


def document_attention(
    query_HTD: Tensor,
    key_GSD: Tensor,
    value_GSD: Tensor,
    weights_AB: Tensor,
    lengths: Sequence[int],
    *,
    rows: Sequence[int] | None = None,
    heads: Tensor | None = None,
    scale: float | None = None,
    v_norm: bool = False,
    epsilon: float = 0.0,
    kernel: Kernel = "torch",
) -> Tensor:
    """Weighted sum over documents of attention within each document.

    Args:
        query_HTD: queries of all H heads, rotary positions already applied.
        key_GSD: keys of the G key-value heads (H is a multiple of G), with the positions of their
            own document.
        value_GSD: values.
        weights_AB: weight of document j for every row of run i. Carries the gradient to the
            retriever.
        lengths: tokens of each document, B numbers that sum to S.
        rows: rows of each run, A numbers that sum to T. None: the runs are the documents.
        heads: indices of the query heads to compute, in the order of the output. None: all H.
        scale: factor on the scores, D ** -0.5 unless given.
        v_norm: divide each document's output by its attention-weighted mean value norm.
        epsilon: pairs with a weight <= epsilon are skipped. At 0 only exact zeros are.
        kernel: "torch" runs anywhere; "triton" (kernels/document_attention.py) needs the triton
            package and a GPU.

    Returns:
        The mixed outputs, (len(heads), T, D), in query_HTD's dtype.
    """
    n_heads, n_groups = query_HTD.shape[0], key_GSD.shape[0]
    if heads is not None and heads.tolist() != list(range(n_heads)):
        shared = heads // (n_heads // n_groups)
        query_HTD, key_GSD, value_GSD = query_HTD[heads], key_GSD[shared], value_GSD[shared]
    scale = query_HTD.shape[-1] ** -0.5 if scale is None else scale
    kind = query_HTD.device.type
    if torch.is_autocast_enabled(
        kind
    ):  # which ends before the backward pass, so it is settled here
        query_HTD, key_GSD, value_GSD = (
            t.to(torch.get_autocast_dtype(kind)) for t in (query_HTD, key_GSD, value_GSD)
        )
    function: Any = _DocumentAttention
    if kernel == "triton":
        from revela.lm.document_attention_triton import TritonDocumentAttention as function
    elif v_norm:
        norm_GS1 = value_GSD.norm(dim=-1, keepdim=True).to(
            value_GSD.dtype
        )  # CUDA's autocast gives it in fp32
        value_GSD = torch.cat([value_GSD, norm_GS1], dim=-1)
    mixed: Tensor = function.apply(
        query_HTD,
        key_GSD,
        value_GSD,
        weights_AB,
        tuple(lengths),
        tuple(rows or lengths),
        scale,
        v_norm,
        epsilon,
    )
    return mixed


class _DocumentAttention(torch.autograd.Function):
    """The sum, and its gradients by recomputation. With ``v_norm`` the last column of the values is
    their norm.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query_HTD: Tensor,
        key_GSD: Tensor,
        value_GSD: Tensor,
        weights_AB: Tensor,
        lengths: tuple[int, ...],
        rows: tuple[int, ...],
        scale: float,
        v_norm: bool,
        epsilon: float,
    ) -> Tensor:
        ctx.save_for_backward(query_HTD, key_GSD, value_GSD, weights_AB)
        ctx.settings = lengths, rows, scale, v_norm, epsilon
        exact = torch.promote_types(query_HTD.dtype, torch.float32)
        mixed_HTD = query_HTD.new_zeros(
            *query_HTD.shape[:2], value_GSD.shape[-1] - v_norm, dtype=exact
        )
        for turn in _turns(query_HTD, key_GSD, weights_AB, lengths, rows, scale, epsilon):
            output_GRD = turn.attention_GRL @ value_GSD[:, turn.document]
            if v_norm:
                output_GRD = output_GRD[..., :-1] / (output_GRD[..., -1:] + V_NORM_EPS)
            turn.add(mixed_HTD, turn.by_head(output_GRD) * turn.weight_R1)
        return mixed_HTD.to(query_HTD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grad_HTD = gradients[0]
        query_HTD, key_GSD, value_GSD, weights_AB = ctx.saved_tensors
        lengths, rows, scale, v_norm, epsilon = ctx.settings
        exact = torch.promote_types(query_HTD.dtype, torch.float32)
        for_query, for_key, for_value, for_weights = (
            torch.zeros_like(t, dtype=exact) if wanted else None
            for t, wanted in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        )
        for turn in _turns(query_HTD, key_GSD, weights_AB, lengths, rows, scale, epsilon):
            value_GLD = value_GSD[:, turn.document]
            output_GRD = turn.attention_GRL @ value_GLD
            grad_HRD = turn.take(grad_HTD)
            grad_GRD = turn.by_key(grad_HRD * turn.weight_R1)
            if v_norm:
                norm_GR1 = output_GRD[..., -1:] + V_NORM_EPS
                unit_GRD = output_GRD[..., :-1] / norm_GR1
                # d (a / n): d a gets g / n, d n gets -(g . a / n) / n.
                grad_GRD = (
                    torch.cat([grad_GRD, -(grad_GRD * unit_GRD).sum(-1, keepdim=True)], dim=-1)
                    / norm_GR1
                )
            else:
                unit_GRD = output_GRD
            if for_weights is not None:
                slope_R = (grad_HRD * turn.by_head(unit_GRD)).sum(dim=(0, 2), dtype=exact)
                for_weights[:, turn.index].index_add_(0, turn.owner_R, slope_R * turn.is_read_R)
            if for_value is not None:
                for_value[:, turn.document] = (turn.attention_GRL.transpose(1, 2) @ grad_GRD).to(
                    exact
                )
            if for_query is None and for_key is None:
                continue
            # Softmax: d s = p (d p - sum p d p), and sum p d p is the output times its own
            # gradient.
            scores_GRL = grad_GRD @ value_GLD.transpose(1, 2)
            scores_GRL -= (grad_GRD * output_GRD).sum(-1, keepdim=True)
            scores_GRL *= turn.attention_GRL
            if for_query is not None:
                turn.add(for_query, turn.by_head(scores_GRL @ key_GSD[:, turn.document]))
            if for_key is not None:
                for_key[:, turn.document] = (scores_GRL.transpose(1, 2) @ turn.query_GRD).to(exact)
        if for_query is not None:
            for_query *= scale
        found = zip((for_query, for_key, for_value, for_weights), ctx.saved_tensors, strict=True)
        return (
            *(None if g is None else g.to(t.dtype) for g, t in found),
            None,
            None,
            None,
            None,
            None,
        )


@dataclass(frozen=True)
class _Turn:
    """One document and the rows that read it; all rows (``rows_R`` is None), if nearly all do: that
    saves picking them out.

    Rows of heads that share keys stand in one long list: (G, heads a key head * R, ...).
    """

    index: int
    document: slice
    rows_R: Tensor | None
    owner_R: Tensor
    is_read_R: Tensor
    weight_R1: Tensor
    query_GRD: Tensor
    attention_GRL: Tensor
    heads: int

    def by_head(self, rows_GRX: Tensor) -> Tensor:
        return rows_GRX.reshape(self.heads, len(self.owner_R), rows_GRX.shape[-1])

    def by_key(self, rows_HRX: Tensor) -> Tensor:
        return rows_HRX.reshape(len(self.query_GRD), -1, rows_HRX.shape[-1])

    def take(self, all_HTX: Tensor) -> Tensor:
        return all_HTX if self.rows_R is None else all_HTX.index_select(1, self.rows_R)

    def add(self, total_HTX: Tensor, rows_HRX: Tensor) -> None:
        if self.rows_R is None:
            total_HTX += rows_HRX
        else:
            total_HTX.index_add_(1, self.rows_R, rows_HRX.to(total_HTX.dtype))


def _turns(
    query_HTD: Tensor,
    key_GSD: Tensor,
    weights_AB: Tensor,
    lengths: Sequence[int],
    rows: Sequence[int],
    scale: float,
    epsilon: float,
) -> Iterator[_Turn]:
    owner_T = torch.repeat_interleave(torch.tensor(rows)).to(query_HTD.device, non_blocking=True)
    is_read_AB = weights_AB.detach() > epsilon
    kept_AB = (weights_AB.detach() * is_read_AB).to(query_HTD.dtype)
    readers_B = is_read_AB.sum(dim=0).tolist()
    if any(
        0 < n < NEARLY_ALL * len(rows) for n in readers_B
    ):  # found all at once: a GPU waits each time that it has to say how many
        is_read_TB = is_read_AB[owner_T]
        rows_of_B = torch.split(
            is_read_TB.T.nonzero()[:, 1].contiguous(), is_read_TB.sum(dim=0).tolist()
        )
    query_HTD = query_HTD * scale
    start = 0
    for j, length in enumerate(lengths):
        document = slice(start, start + length)
        start += length
        if not readers_B[j]:
            continue
        rows_R = None if readers_B[j] >= NEARLY_ALL * len(rows) else rows_of_B[j]
        owner_R = owner_T if rows_R is None else owner_T[rows_R]
        picked_HRD = query_HTD if rows_R is None else query_HTD.index_select(1, rows_R)
        query_GRD = picked_HRD.reshape(len(key_GSD), -1, query_HTD.shape[-1])
        attention_GRL = (query_GRD @ key_GSD[:, document].transpose(1, 2)).softmax(dim=-1)
        yield _Turn(
            j,
            document,
            rows_R,
            owner_R,
            is_read_AB[:, j][owner_R],
            kept_AB[:, j][owner_R][:, None],
            query_GRD,
            attention_GRL,
            len(query_HTD),
        )


class InBatchAttention:
    """Mixes document attention into an LM's own attention; one per group and step (a ``Mix`` of
    language_model.py).

    Args:
        weights_BB: Sim.
        lengths: tokens of each chunk.
        gates_LH: one gate per layer and head; only the heads whose gate is not 0 are computed.
            None: the paper's ungated sum of every head.
        v_norm: V-normalise the in-batch output.
        epsilon: pairs with no more weight than this are skipped.
        kernel: see document_attention.
    """

    def __init__(
        self,
        weights_BB: Tensor,
        lengths: Sequence[int],
        gates_LH: Tensor | None,
        *,
        v_norm: bool,
        epsilon: float = 0.0,
        kernel: Kernel = "torch",
    ) -> None:
        self.weights_BB, self.lengths, self.gates_LH = weights_BB, lengths, gates_LH
        self.v_norm, self.epsilon, self.kernel = v_norm, epsilon, kernel

    def __call__(
        self,
        layer: int,
        own_HTD: Tensor,
        query_HTD: Tensor,
        key_GTD: Tensor,
        value_GTD: Tensor,
        scale: float | None,
    ) -> Tensor:
        heads = (
            None if self.gates_LH is None else self.gates_LH[layer].detach().nonzero().squeeze(1)
        )
        cross_HTD = document_attention(
            query_HTD,
            key_GTD,
            value_GTD,
            self.weights_BB,
            self.lengths,
            heads=heads,
            scale=scale,
            v_norm=self.v_norm,
            epsilon=self.epsilon,
            kernel=self.kernel,
        )
        if self.gates_LH is None or heads is None:
            return own_HTD + cross_HTD
        gate_H11 = self.gates_LH[layer, heads][:, None, None].to(own_HTD.dtype)
        return own_HTD.index_add(
            0, heads, gate_H11 * (cross_HTD - own_HTD[heads]).to(own_HTD.dtype)
        )
