"""In-batch attention: an LM's chunk also attends to the other chunks of its group (Revela, eq. 7).

The output s of a head's own attention is mixed with b, that of document attention over the other
chunks, weighted by the retriever's similarity (Sim):
- paper: h = s + b in every head of every layer, with V-normalised b;
- gated (ours): h = (1 - g) s + g b, with a gate g per head; a gate of 0 costs nothing.

Shapes: B chunks of a group, T tokens in all, L layers, H heads, G key-value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from revela.lm.document_attention import Kernel, document_attention


class InBatchAttention:
    """The ``Mix`` (streams.py) of Revela, for one group and step.

    Args:
        weights_BB: Sim.
        lengths: tokens per chunk.
        gates_LH: a gate per layer and head; heads whose gate is 0 are not computed. None: the
            paper's sum.
        v_norm: V-normalise b.
        epsilon: skip pairs with a weight of at most this.
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
        gates_H = None if self.gates_LH is None else self.gates_LH[layer]
        heads = None if gates_H is None else gates_H.detach().nonzero().squeeze(1)
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
        if gates_H is None or heads is None:
            return own_HTD + cross_HTD
        gate_H11 = gates_H[heads][:, None, None].to(own_HTD.dtype)
        change_HTD = gate_H11 * (cross_HTD - own_HTD[heads]).to(own_HTD.dtype)
        return own_HTD.index_add(0, heads, change_HTD)
