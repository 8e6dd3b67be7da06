"""The attention of each layer in the two streams of an LM (Revela, section 3.2).

Stream e keeps keys and values; stream h mixes something into the attention output. In-batch
attention (eq. 7) mixes in attention over the other chunks of a group:

    h = s + b                  paper: every head of every layer, b with V-norm (eq. 8)
    h = (1 - g) s + g b        gated (ours): a gate g per head; a gate of 0 costs nothing

s is the output of a head's own attention. b is document attention over the other chunks, weighted
by the retriever's similarity Sim.

Shapes: B chunks of a group, T tokens in all, P tokens of a prefix, L layers, H query heads, G
key-value heads, D head width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from revela.training.device import sent
from revela.training.lm.document_attention import (
    DocumentWeights,
    Kernel,
    document_attention,
    select_heads,
)
from revela.training.packing import Layout

Mix = Callable[[int, Tensor, Tensor, Tensor, Tensor, float | None], Tensor]
"""(layer, own_HTD, query_HTD, key_GTD, value_GTD, scale) -> stream h's attention output (H, T, D).

``own_HTD`` is the plain LM's attention output. With a memory of stream e the mix is called in the
memory's layers, with e's keys and values; without one in every layer, with the chunks' own.
"""


@dataclass
class KVCache:
    """Keys and values (G, T, D) by layer, and the output of the layer below the first one."""

    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    below: Any = None

    @property
    def length(self) -> int:
        """The number of tokens."""
        return int(next(iter(self.keys.values())).shape[1])

    def part(self, start: int, end: int) -> KVCache:
        """Keys and values of these tokens only."""
        keys, values = (
            {layer: t[:, start:end] for layer, t in side.items()}
            for side in (self.keys, self.values)
        )
        return KVCache(keys, values)


class StopForward(Exception):
    """Raised in a layer's attention, as no layer above it is needed."""


@dataclass
class Stream:
    """State of a forward pass, shared by the attention of all layers.

    Attributes:
        layout: the chunks.
        keep: layers whose keys and values go into ``kept``.
        mix: changes the attention output; None: the plain LM.
        memory: of stream e over the same chunks, for ``mix``.
        prefix: keys and values of a text that each chunk continues.
        last: the pass ends with the attention of this layer; without a ``mix``, before it.
        layers_run: how often the attention of each layer has run.
    """

    layout: Layout
    keep: Collection[int] = ()
    mix: Mix | None = None
    memory: KVCache | None = None
    prefix: KVCache | None = None
    last: int | None = None
    kept: KVCache = field(default_factory=KVCache)
    layers_run: Counter[int] = field(default_factory=Counter)

    def begin(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
        """Take a layer's keys and values (G, T, D) before its attention, and return those of the
        prefix (G, P, D), if there is one.
        """
        self.layers_run[layer] += 1
        if layer in self.keep:
            self.kept.keys[layer], self.kept.values[layer] = key, value
        if layer == self.last and self.mix is None:
            raise StopForward
        return None if self.prefix is None else (self.prefix.keys[layer], self.prefix.values[layer])

    def end(self, layer: int, own: Tensor, *inputs: Any) -> Tensor:
        """Return the layer's attention output; arguments as for ``Mix``."""
        if self.mix is not None:
            if self.memory is None:
                own = self.mix(layer, own, *inputs)
            elif layer in self.memory.keys:
                query, _, _, scale = inputs
                keys, values = self.memory.keys[layer], self.memory.values[layer]
                own = self.mix(layer, own, query, keys, values, scale)
        if layer == self.last:
            raise StopForward
        return own


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
