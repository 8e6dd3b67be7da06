"""What one forward pass of an LM over packed chunks keeps and changes.

Stream e keeps keys and values; stream h mixes something into the attention output (Revela, section
3.2).

Shapes: T tokens in all, H query heads, G key-value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from revela.packing import Layout

Mix = Callable[[int, Tensor, Tensor, Tensor, Tensor, float | None], Tensor]
"""(layer, own_HTD, query_HTD, key_GTD, value_GTD, scale) -> stream h's attention output (H, T, D).

With a memory of stream e it is called in the layers that were read, with e's keys and values;
without one in every layer, with the chunks' own.
"""


@dataclass
class KVCache:
    """Keys and values (G, T, D) per layer that was read; ``below``: the output of the layer below
    the first of them.
    """

    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    below: Any = None

    @property
    def length(self) -> int:
        """Tokens that were read."""
        return int(next(iter(self.keys.values())).shape[1])

    def part(self, start: int, end: int) -> KVCache:
        """Keys and values of these tokens only."""
        keys, values = (
            {layer: t[:, start:end] for layer, t in side.items()}
            for side in (self.keys, self.values)
        )
        return KVCache(keys, values)


class StopForward(Exception):
    """Raised in a layer's attention: the layers above it are not needed."""


@dataclass
class Stream:
    """A forward pass, which the attention of every layer is given.

    Attributes:
        layout: the chunks.
        keep: layers whose keys and values ``kept`` gets.
        mix: changes the attention output; None: the plain LM.
        memory: of stream e over the same chunks, for ``mix``.
        prefix: keys and values of a text that each chunk continues.
        last: the pass ends with the attention of this layer; without a ``mix``, before it.
        layers_run: the layers that have called.
    """

    layout: Layout
    keep: Collection[int] = ()
    mix: Mix | None = None
    memory: KVCache | None = None
    prefix: KVCache | None = None
    last: int | None = None
    kept: KVCache = field(default_factory=KVCache)
    layers_run: set[int] = field(default_factory=set)

    def begin(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
        """Take a layer's keys and values (G, T, D), before its attention; gives those of the text
        that all chunks continue, (G, P, D).
        """
        self.layers_run.add(layer)
        if layer in self.keep:
            self.kept.keys[layer], self.kept.values[layer] = key, value
        if layer == self.last and self.mix is None:
            raise StopForward
        return None if self.prefix is None else (self.prefix.keys[layer], self.prefix.values[layer])

    def end(self, layer: int, own: Tensor, *inputs: Any) -> Tensor:
        """The layer's attention output, given that of the plain LM (``own``); as for ``Mix``."""
        if self.mix is not None:
            if self.memory is None:
                own = self.mix(layer, own, *inputs)
            elif layer in self.memory.keys:
                query, _, _, scale = inputs
                of_e = self.memory.keys[layer], self.memory.values[layer]
                own = self.mix(layer, own, query, *of_e, scale)
        if layer == self.last:
            raise StopForward
        return own
