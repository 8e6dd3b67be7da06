"""What one pass of an LM over packed chunks sees and changes: stream e keeps keys and values,
stream h mixes something in.

Shapes: T tokens in all, H query heads, G key-value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from revela.packing import Layout

Mix = Callable[[int, Tensor, Tensor, Tensor, Tensor, float | None], Tensor]
"""(layer, own_HTD, query_HTD, key_GTD, value_GTD, scale) -> HTD: h's attention output. Keys and
values are e's, in the layers that were read; without a stream e they are the chunks' own, and the
mix sees every layer.
"""


@dataclass
class Memory:
    """What reading leaves: keys and values (G, T, D) by layer, and the output of the layer below
    the first.
    """

    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    below: Any = None

    @property
    def length(self) -> int:
        """Tokens that were read."""
        return int(next(iter(self.keys.values())).shape[1])

    def part(self, start: int, end: int) -> Memory:
        """Of these tokens only, as something to be continued."""
        keys, values = (
            {layer: t[:, start:end] for layer, t in side.items()}
            for side in (self.keys, self.values)
        )
        return Memory(keys, values)


class Stream:
    """One pass over packed chunks. It sees each layer's keys and values, and may change what its
    attention gives.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout, self.seen = layout, set[int]()

    def see(self, layer: int, key: Tensor, value: Tensor) -> None:
        self.seen.add(layer)

    def before(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Keys and values of a text that comes before all chunks."""

    def change(
        self,
        layer: int,
        own: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
    ) -> Tensor:
        return own


class AllRead(Exception):
    """A stream has what it came for."""


class Reading(Stream):
    """Stream e: keep the keys and values of the wanted layers, and end with the last of them."""

    def __init__(self, layout: Layout, layers: Sequence[int]) -> None:
        super().__init__(layout)
        self.memory, self.layers = Memory(), frozenset(layers)

    def see(self, layer: int, key: Tensor, value: Tensor) -> None:
        super().see(layer, key, value)
        if layer in self.layers:
            self.memory.keys[layer], self.memory.values[layer] = key, value
            if self.memory.keys.keys() == self.layers:
                raise AllRead


class Predicting(Stream):
    """Stream h: mix what was read into the attention, after the text before, if there is one."""

    def __init__(
        self, layout: Layout, memory: Memory | None, mix: Mix | None, earlier: Memory | None
    ) -> None:
        super().__init__(layout)
        self.memory, self.mix, self.earlier = memory, mix, earlier

    def before(self, layer: int) -> tuple[Tensor, Tensor] | None:
        return (
            None if self.earlier is None else (self.earlier.keys[layer], self.earlier.values[layer])
        )

    def change(
        self,
        layer: int,
        own: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
    ) -> Tensor:
        if self.mix is None:
            return own
        if self.memory is None:
            return self.mix(layer, own, query, key, value, scale)
        if layer not in self.memory.keys:
            return own
        return self.mix(
            layer, own, query, self.memory.keys[layer], self.memory.values[layer], scale
        )


class Watching(Predicting):
    """Stream h up to the last of some layers, whose attention is shown to the mix."""

    def __init__(self, layout: Layout, layers: Sequence[int], mix: Mix, earlier: Memory) -> None:
        super().__init__(layout, None, mix, earlier)
        self.last = max(layers)

    def change(
        self,
        layer: int,
        own: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
    ) -> Tensor:
        mixed = super().change(layer, own, query, key, value, scale)
        if layer == self.last:
            raise AllRead
        return mixed


class ReadableLM(Protocol):
    """What the objective asks of an LM; ``revela.lm.language_model.LanguageModel`` answers it."""

    n_layers: int
    n_heads: int

    @property
    def trainable(self) -> bool: ...

    def pack(self, ids_BL: Tensor, mask_BL: Tensor) -> Any: ...

    def read(self, packed: Any, layers: Sequence[int]) -> Any: ...

    def loss(self, packed: Any, memory: Any = None, mix: Any = None) -> Tensor: ...
