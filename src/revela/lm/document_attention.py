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
EPSILON = 1e-4  # objectives skip pairs with no more weight
NEARLY_ALL = 0.8  # of the runs: from this share on, all rows are computed and none are picked out


@dataclass(frozen=True)
class Readers:
    """One document, and the rows that attend to it.

    ``rows_R`` is None if all rows are computed, which saves picking them out; those that are not
    kept have a weight of 0.
    """

    index: int
    tokens: slice
    rows_R: Tensor | None
    run_R: Tensor
    is_kept_R: Tensor
    weight_R1: Tensor


class DocumentWeights:
    """How much each run of rows takes of each document: made once for all layers of a step, as
    finding who takes how much waits for a GPU.

    Args:
        weights_AB: weight of document j for every row of run i. Carries the gradient to the
            retriever.
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
        """Where each document begins among the S tokens, and where the last one ends, (B + 1,)."""
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
        """The most documents that a run keeps, or 1; it waits for a GPU."""
        return max(1, int(on_cpu(self.slot_AB.max())) + 1)

    @cached_property
    def readers(self) -> list[Readers]:
        """The documents that some run gives a weight above ``epsilon``, and the rows that read
        them.
        """
        kept_AB = self.kept_AB
        is_kept_AB = kept_AB > 0
        on_host_AB = on_cpu(is_kept_AB)  # the one wait
        runs_B = on_host_AB.sum(dim=0).tolist()
        nearly_all = NEARLY_ALL * len(self.rows)
        few = [j for j, n in enumerate(runs_B) if 0 < n < nearly_all]
        of_few = [on_host_AB[on_cpu(self.run_T), j].nonzero().squeeze(1) for j in few]
        rows_of = {}
        if few:
            flat = sent(torch.cat(of_few), kept_AB.device)
            rows_of = dict(zip(few, torch.split(flat, list(map(len, of_few))), strict=True))
        found, end = [], 0
        for j, length in enumerate(self.lengths):
            start, end = end, end + length
            if runs_B[j]:
                rows_R = rows_of.get(j)
                run_R = self.run_T if rows_R is None else self.run_T[rows_R]
                kept_R, weight_R1 = is_kept_AB[:, j][run_R], kept_AB[:, j][run_R][:, None]
                found.append(Readers(j, slice(start, end), rows_R, run_R, kept_R, weight_R1))
        return found


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
