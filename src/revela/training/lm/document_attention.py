"""Document attention: each query row attends to each document separately; the outputs are weighted.

    b = sum_j w_j * softmax(Q K_j^T * scale) V_j                             (Revela, eqs. 5-7)

Q are the query rows, K_j and V_j the keys and values of document j, and w_j is a row's weight of
document j. Without a causal mask, a row attends to all tokens of a document. V-norm divides each
document's output by the attention-weighted mean norm of its values (Revela, eq. 6, as in the
authors' code):

    softmax(..) V_j / (softmax(..) |V_j| + 1e-6)

A run is a sequence of rows with the same weights: in Revela a chunk, with w_j = Sim; in DREAM a
question about the candidates.

In-batch attention (Revela, eqs. 7 and 8) mixes b over the other chunks of a group into the output s
of a head's own attention:

    h = s + b                  paper: every head of every layer, b with V-norm
    h = (1 - g) s + g b        gated (ours): a gate g per head; a gate of 0 costs nothing

There are two forms, which the tests compare with the equation line by line (tests/naive.py):
- ``_Recomputed``, the default on a CPU and in fp32: one document at a time, with only the rows that
  give it a weight, without padding. Scores and outputs of a (row, document) pair exist only while
  the loop is at its document, and the backward pass computes them again, so memory grows with the
  tokens and not with the pairs;
- document_attention_varlen.py, the default on a GPU in bf16: flash attention over all
  (run, document) pairs at once.

The backward pass, with p = softmax(Q K^T) of one document, a = p V, n = p |V| + eps and o = a / n:

    d a = d o / n        d n = -(d o . o) / n        d s = p (d p - sum p d p)

Shapes: A runs of rows, T rows in all; B documents packed into S tokens, L of a document (Revela: A
= B, T = S), and R rows that attend to it; H query heads, G key-value heads, K selected heads, D
head width; Revela: L layers in L x H gates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from revela.training.device import fetched, on_cpu, sent
from revela.training.lm.document_attention_varlen import Pairs, pairs_of, varlen_document_attention
from revela.training.lm.language_model import Attended

Kernel = Literal["auto", "torch", "varlen"]
V_NORM_EPS = 1e-6  # as in the authors' code
EPSILON = 1e-4  # methods skip pairs with at most this weight
DENSE = 0.8  # share of the runs; a document that more of them attend to is computed for all rows


@dataclass(frozen=True)
class AttendingRows:
    """A document's index and tokens, and the R rows that attend to it.

    ``rows_R`` None: all T rows. Rows that are not kept have a weight of 0.
    """

    index: int
    tokens: slice
    rows_R: Tensor | None
    run_R: Tensor
    weight_R1: Tensor

    def take(self, all_HTX: Tensor) -> Tensor:
        return all_HTX if self.rows_R is None else all_HTX.index_select(1, self.rows_R)


class DocumentWeights:
    """The weight of each document for each run of rows, made once for all layers of a step.

    Args:
        weights_AB: w_j for every row of run i. Carries the gradient to the retriever.
        lengths: tokens per document, B numbers that sum to S.
        rows: rows per run, A numbers that sum to T. None: the runs are the documents.
        epsilon: skip pairs with a weight <= epsilon; they get no gradient. 0 skips exact zeros.
    """

    def __init__(
        self,
        weights_AB: Tensor,
        lengths: Sequence[int],
        rows: Sequence[int] | None = None,
        epsilon: float = 0.0,
    ) -> None:
        self.weights_AB, self.epsilon = weights_AB, epsilon
        self.lengths, self.rows = tuple(lengths), tuple(lengths if rows is None else rows)
        # On its way to the host while the GPU computes what comes before the first mixed layer.
        self._is_kept_on_host = fetched(weights_AB.detach() > epsilon)

    @cached_property
    def run_T(self) -> Tensor:
        """The run of each row."""
        return sent(torch.repeat_interleave(torch.tensor(self.rows)), self.weights_AB.device)

    @cached_property
    def kept_AB(self) -> Tensor:
        """The weights above ``epsilon``, without a gradient, and 0 for the others."""
        weights_AB = self.weights_AB.detach()
        return (weights_AB * (weights_AB > self.epsilon)).contiguous()

    @cached_property
    def pairs(self) -> Pairs:
        """The pairs that have weight. Synchronises with a GPU."""
        device = self.weights_AB.device
        return pairs_of(self._is_kept_on_host(), self.rows, self.lengths, device)

    @cached_property
    def attending(self) -> list[AttendingRows]:
        """The documents that some run keeps, and their rows. Synchronises with a GPU."""
        on_host_AB = self._is_kept_on_host()
        runs_B = on_host_AB.sum(dim=0).tolist()
        sparse = [j for j, runs in enumerate(runs_B) if 0 < runs < DENSE * len(self.rows)]
        selected_rows = dict[int, Tensor]()
        if sparse:
            rows = [on_host_AB[on_cpu(self.run_T), j].nonzero().squeeze(1) for j in sparse]
            flat = sent(torch.cat(rows), self.kept_AB.device)
            parts = torch.split(flat, [len(rows_R) for rows_R in rows])
            selected_rows = dict(zip(sparse, parts, strict=True))
        attending, end = [], 0
        for j, length in enumerate(self.lengths):
            start, end = end, end + length
            if runs_B[j]:
                rows_R = selected_rows.get(j)
                run_R = self.run_T if rows_R is None else self.run_T[rows_R]
                weight_R1 = self.kept_AB[:, j][run_R][:, None]
                attending.append(AttendingRows(j, slice(start, end), rows_R, run_R, weight_R1))
        return attending


def document_attention(
    query_HTD: Tensor,
    key_GSD: Tensor,
    value_GSD: Tensor,
    documents: DocumentWeights,
    *,
    scale: float | None = None,
    v_norm: bool = False,
    kernel: Kernel = "auto",
) -> Tensor:
    """The weighted sum over documents of the attention within each document, b of the equation.

    Args:
        query_HTD: with rotary positions applied.
        key_GSD, value_GSD: with the positions of their own document. H is a multiple of G.
        documents: where the documents are, and their weights.
        scale: factor on the scores; None: D ** -0.5.
        v_norm: divide each document's output by its attention-weighted mean value norm.
        kernel: "varlen" needs a GPU and bf16; "auto" is "varlen" where it runs, else "torch".

    Returns:
        (H, T, D), in query_HTD's dtype, or that of autocast.
    """
    device = query_HTD.device.type
    if torch.is_autocast_enabled(device):  # cast here: autocast ends before the backward pass
        dtype = torch.get_autocast_dtype(device)
        query_HTD, key_GSD, value_GSD = (t.to(dtype) for t in (query_HTD, key_GSD, value_GSD))
    scale = query_HTD.shape[-1] ** -0.5 if scale is None else scale
    if kernel == "auto":
        kernel = "varlen" if has_varlen(query_HTD.device, query_HTD.dtype) else "torch"
    if v_norm:  # CUDA's autocast computes norms in fp32
        norm_GS1 = value_GSD.norm(dim=-1, keepdim=True).to(value_GSD.dtype)
        value_GSD = torch.cat([value_GSD, norm_GS1], dim=-1)
    inputs = query_HTD, key_GSD, value_GSD, documents.weights_AB
    how = scale, V_NORM_EPS if v_norm else None
    output_HTD: Tensor
    if kernel == "varlen":
        run, given = varlen_document_attention, (*inputs, documents.pairs, *how)
        output_HTD = checkpoint(run, *given, use_reentrant=False, preserve_rng_state=False)
    else:
        output_HTD = _Recomputed.apply(*inputs, documents.attending, *how)  # type: ignore[no-untyped-call]
    return output_HTD


def has_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether variable-length flash attention runs here."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def select_heads(
    heads_K: Tensor, query_HTD: Tensor, key_GSD: Tensor, value_GSD: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The queries of these heads, and the keys and values of each, (K, ...)."""
    group_K = heads_K // (len(query_HTD) // len(key_GSD))
    return query_HTD[heads_K], key_GSD[group_K], value_GSD[group_K]


def by_layer(heads: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    """The heads of each layer, from (layer, head) pairs."""
    layers: dict[int, list[int]] = {}
    for layer, head in heads:
        layers.setdefault(layer, []).append(head)
    return layers


class InBatchAttention:
    """The ``Mix`` of Revela, for one group and step.

    Args:
        weights_BB: Sim.
        lengths: tokens per chunk.
        gates_LH: g. None: the paper's sum.
        heads: the heads to compute in each layer, as the other gates are 0. None: all.
        v_norm: V-normalise b.
        epsilon: skip pairs with a weight of at most this.
        kernel: see document_attention.
    """

    def __init__(
        self,
        weights_BB: Tensor,
        lengths: Sequence[int],
        gates_LH: Tensor | None,
        heads: Mapping[int, Sequence[int]] | None = None,
        *,
        v_norm: bool,
        epsilon: float = 0.0,
        kernel: Kernel = "auto",
    ) -> None:
        self.documents = DocumentWeights(weights_BB, lengths, epsilon=epsilon)
        self.gates_LH, self.v_norm, self.kernel = gates_LH, v_norm, kernel
        self.heads = {
            layer: sent(torch.tensor(gated), weights_BB.device)
            for layer, gated in (heads or {}).items()
            if gates_LH is not None and len(gated) < gates_LH.shape[1]
        }

    def __call__(self, layer: int, own_HTD: Tensor, inputs: Attended) -> Tensor:
        states, heads = inputs[:3], self.heads.get(layer)
        if heads is not None:
            states = select_heads(heads, *states)
        scale, v_norm, kernel = inputs.scale, self.v_norm, self.kernel
        cross_HTD = document_attention(
            *states, self.documents, scale=scale, v_norm=v_norm, kernel=kernel
        )
        if self.gates_LH is None:
            return own_HTD + cross_HTD
        gate_H11 = self.gates_LH[layer][:, None, None].to(own_HTD.dtype)
        if heads is None:
            return own_HTD + gate_H11 * (cross_HTD - own_HTD).to(own_HTD.dtype)
        change_HTD = gate_H11[heads] * (cross_HTD - own_HTD[heads]).to(own_HTD.dtype)
        return own_HTD.index_add(0, heads, change_HTD)


class _Recomputed(torch.autograd.Function):
    """(H, T, D). With ``norm_eps``, which is None for no V-norm, the last column of the values is
    their norm.
    """

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
            grad_HRD = attending.take(grad_outputs[0])
            grad_GRD = document.by_key(grad_HRD * document.weight_R1)
            if ctx.norm_eps is not None:
                grad_norm_GR1 = -(grad_GRD * normed_GRD).sum(-1, keepdim=True)
                grad_GRD = torch.cat([grad_GRD, grad_norm_GR1], dim=-1)
                grad_GRD = grad_GRD / (output_GRD[..., -1:] + ctx.norm_eps)
            if grad_weights is not None:
                slope_HRD = grad_HRD * document.by_head(normed_GRD)
                is_kept_R = attending.weight_R1[:, 0] > 0
                slope_R = slope_HRD.sum(dim=(0, 2), dtype=exact) * is_kept_R
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
        query_GRD = attending.take(query_HTD).reshape(len(key_GSD), -1, query_HTD.shape[-1])
        key_GLD = key_GSD[:, attending.tokens]
        yield _AttendedDocument(
            attending,
            weight_R1=attending.weight_R1.to(query_HTD.dtype),
            query_GRD=query_GRD,
            attention_GRL=(query_GRD @ key_GLD.transpose(1, 2)).softmax(dim=-1),
            heads=len(query_HTD),
        )
