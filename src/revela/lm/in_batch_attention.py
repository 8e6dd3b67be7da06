"""In-batch attention: an LM's chunk also attends to the other chunks of its group (Revela, eq. 7).

    h = s + b                  paper: every head of every layer, b with V-norm (eq. 8)
    h = (1 - g) s + g b        gated (ours): a gate g per head; a gate of 0 costs nothing

s is the output of a head's own attention. b is document attention over the other chunks, weighted
by the retriever's similarity Sim.

Shapes: B chunks of a group, T tokens in all, L layers, H heads, G key-value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from revela.device import sent
from revela.lm.document_attention import Kernel, document_attention, select_heads
from revela.lm.document_weights import DocumentWeights


class InBatchAttention:
    """The ``Mix`` (streams.py) of Revela, for one group and step.

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
        kernel: Kernel = "torch",
    ) -> None:
        self.documents = DocumentWeights(weights_BB, lengths, epsilon=epsilon)
        self.gates_LH, self.v_norm, self.kernel = gates_LH, v_norm, kernel
        self.heads = {
            layer: sent(torch.tensor(gated), weights_BB.device)
            for layer, gated in (heads or {}).items()
            if gates_LH is not None and len(gated) < gates_LH.shape[1]
        }

    def __call__(
        self,
        layer: int,
        own_HTD: Tensor,
        query_HTD: Tensor,
        key_GTD: Tensor,
        value_GTD: Tensor,
        scale: float | None,
    ) -> Tensor:
        heads = self.heads.get(layer)
        if heads is not None:
            query_HTD, key_GTD, value_GTD = select_heads(heads, query_HTD, key_GTD, value_GTD)
        cross_HTD = document_attention(
            query_HTD,
            key_GTD,
            value_GTD,
            self.documents,
            scale=scale,
            v_norm=self.v_norm,
            kernel=self.kernel,
        )
        if self.gates_LH is None:
            return own_HTD + cross_HTD
        gate_H11 = self.gates_LH[layer][:, None, None].to(own_HTD.dtype)
        if heads is None:
            return own_HTD + gate_H11 * (cross_HTD - own_HTD).to(own_HTD.dtype)
        change_HTD = gate_H11[heads] * (cross_HTD - own_HTD[heads]).to(own_HTD.dtype)
        return own_HTD.index_add(0, heads, change_HTD)
