"""Document attention: each query row attends to each document separately; the outputs are weighted.

    b = sum_j w_j * softmax(Q K_j^T * scale) V_j                             (Revela, eqs. 5-7)

Q are the query rows, K_j and V_j the keys and values of document j, and w_j is a row's weight of
document j. There is no causal mask: a row attends to all tokens of a document. V-norm divides each
document's output by the attention-weighted mean norm of its values (Revela, eq. 6, as in the
authors' code):

    softmax(..) V_j / (softmax(..) |V_j| + 1e-6)

A run is a number of consecutive rows with the same weights. In Revela it is a chunk, and w_j is
Sim: the chunks attend to one another. In DREAM it is a question about the candidates.

Two implementations, which the tests hold to a loop over rows, documents and tokens:
- document_attention_recomputed.py, the default: one document at a time, with only the rows that
  give it a weight. The backward pass computes the attention again, so memory grows with the tokens
  and not with the (row, document) pairs;
- document_attention_triton.py: the same on a GPU, without a loop on the host.

Shapes: A runs of rows, T rows in all; B documents packed into S tokens (Revela: A = B, T = S); R
rows that attend to a document; H query heads, G key-value heads, K selected heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from revela.device import on_cpu, sent

Kernel = Literal["torch", "triton"]
V_NORM_EPS = 1e-6  # as in the authors' code
EPSILON = 1e-4  # pairs with no more weight are skipped by the objectives
DENSE = 0.8  # of the runs: a document that more of them attend to is computed for all rows


@dataclass(frozen=True)
class Readers:
    """A document's index and tokens, and the R rows that attend to it.

    ``rows_R`` is None if all T rows are computed, which saves selecting them. Rows that are not
    kept have a weight of 0.
    """

    index: int
    tokens: slice
    rows_R: Tensor | None
    run_R: Tensor
    is_kept_R: Tensor
    weight_R1: Tensor


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

    @cached_property
    def run_T(self) -> Tensor:
        """The run of each row."""
        return sent(torch.repeat_interleave(torch.tensor(self.rows)), self.weights_AB.device)

    @cached_property
    def bounds(self) -> Tensor:
        """Where each document starts among the S tokens, and where the last one ends, (B + 1,)."""
        return sent(torch.tensor([0, *self.lengths]).cumsum(0), self.weights_AB.device)

    @cached_property
    def kept_AB(self) -> Tensor:
        """The weights above ``epsilon``, without a gradient, and 0 for the others."""
        weights_AB = self.weights_AB.detach()
        return (weights_AB * (weights_AB > self.epsilon)).contiguous()

    @cached_property
    def slot_AB(self) -> Tensor:
        """The place of each document among those that its run keeps."""
        return (self.kept_AB > 0).cumsum(dim=1) - 1

    @cached_property
    def slots(self) -> int:
        """The maximum number of documents that a run keeps, at least 1. It waits for a GPU."""
        return max(1, int(on_cpu(self.slot_AB.max())) + 1)

    @cached_property
    def readers(self) -> list[Readers]:
        """The documents that some run keeps, and their rows. It waits for a GPU."""
        is_kept_AB = self.kept_AB > 0
        on_host_AB = on_cpu(is_kept_AB)
        runs_B = on_host_AB.sum(dim=0).tolist()
        sparse = [j for j, runs in enumerate(runs_B) if 0 < runs < DENSE * len(self.rows)]
        selected_rows = dict[int, Tensor]()
        if sparse:
            rows = [on_host_AB[on_cpu(self.run_T), j].nonzero().squeeze(1) for j in sparse]
            flat = sent(torch.cat(rows), self.kept_AB.device)
            parts = torch.split(flat, [len(rows_R) for rows_R in rows])
            selected_rows = dict(zip(sparse, parts, strict=True))
        readers, end = [], 0
        for j, length in enumerate(self.lengths):
            start, end = end, end + length
            if runs_B[j]:
                rows_R = selected_rows.get(j)
                run_R = self.run_T if rows_R is None else self.run_T[rows_R]
                kept_R, weight_R1 = is_kept_AB[:, j][run_R], self.kept_AB[:, j][run_R][:, None]
                readers.append(Readers(j, slice(start, end), rows_R, run_R, kept_R, weight_R1))
        return readers


def select_heads(
    heads_K: Tensor, query_HTD: Tensor, key_GSD: Tensor, value_GSD: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The queries of these heads, and the keys and values of each, (K, ...)."""
    group_K = heads_K // (len(query_HTD) // len(key_GSD))
    return query_HTD[heads_K], key_GSD[group_K], value_GSD[group_K]


def document_attention(
    query_HTD: Tensor,
    key_GSD: Tensor,
    value_GSD: Tensor,
    documents: DocumentWeights,
    *,
    scale: float | None = None,
    v_norm: bool = False,
    kernel: Kernel = "torch",
) -> Tensor:
    """The weighted sum over documents of the attention within each document, b of the equation.

    Args:
        query_HTD: with rotary positions applied.
        key_GSD, value_GSD: with the positions of their own document. H is a multiple of G.
        documents: where the documents are, and their weights.
        scale: factor on the scores; None: D ** -0.5.
        v_norm: divide each document's output by its attention-weighted mean value norm.
        kernel: "triton" needs the triton package and a GPU.

    Returns:
        (H, T, D), in query_HTD's dtype, or that of autocast.
    """
    device = query_HTD.device.type
    if torch.is_autocast_enabled(device):  # cast here: autocast ends before the backward pass
        dtype = torch.get_autocast_dtype(device)
        query_HTD, key_GSD, value_GSD = (t.to(dtype) for t in (query_HTD, key_GSD, value_GSD))
    scale = query_HTD.shape[-1] ** -0.5 if scale is None else scale
    if kernel == "triton":
        from revela.lm.document_attention_triton import triton_document_attention as attend
    else:
        from revela.lm.document_attention_recomputed import recomputed_document_attention as attend
    return attend(query_HTD, key_GSD, value_GSD, documents, scale, V_NORM_EPS if v_norm else None)
