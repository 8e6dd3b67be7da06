"""What one forward pass of an LM over packed chunks records and changes.

Stream e (``Reading``) records keys and values; stream h (``Predicting``) mixes something into the
attention output (Revela, section 3.2).

Shapes: T tokens in all, H query heads, G key-value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from revela.packing import Layout

Mix = Callable[[int, Tensor, Tensor, Tensor, Tensor, float | None], Tensor]
"""(layer, own_HTD, query_HTD, key_GTD, value_GTD, scale) -> stream h's attention output (H, T, D).

With a memory of stream e it is called in the layers that were read, with e's keys and values;
without one in every layer, with the chunks' own.
"""


@dataclass
class Memory:
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

    def part(self, start: int, end: int) -> Memory:
        """Keys and values of these tokens only."""
        keys, values = (
            {layer: t[:, start:end] for layer, t in side.items()}
            for side in (self.keys, self.values)
        )
        return Memory(keys, values)


class StopForward(Exception):
    """Raised in a layer's attention: the layers above it are not needed."""


class Stream:
    """A forward pass that records which layers ran and changes nothing."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.layers_run = layout, set[int]()

    def record(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Called with each layer's keys and values (G, T, D), before its attention."""
        self.layers_run.add(layer)

    def before(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Keys and values (G, P, D) of a text that all chunks continue."""

    def mixed(
        self,
        layer: int,
        own: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
    ) -> Tensor:
        """The layer's attention output, given that of the plain LM (``own``); as for ``Mix``."""
        return own


class Reading(Stream):
    """Stream e: keep the keys and values of these layers, and stop at the last of them."""

    def __init__(self, layout: Layout, layers: Sequence[int]) -> None:
        super().__init__(layout)
        self.memory, self.layers = Memory(), frozenset(layers)

    def record(self, layer: int, key: Tensor, value: Tensor) -> None:
        super().record(layer, key, value)
        if layer in self.layers:
            self.memory.keys[layer], self.memory.values[layer] = key, value
            if self.memory.keys.keys() == self.layers:
                raise StopForward


class Predicting(Stream):
    """Stream h: apply ``mix`` to the attention of chunks that may continue an ``earlier`` text.

    Args:
        layout: the chunks.
        memory: of stream e over the same chunks.
        mix: see ``Mix``; None: the plain LM.
        earlier: every layer's keys and values of the text that each chunk continues.
        last: stop after the attention of this layer.
    """

    def __init__(
        self,
        layout: Layout,
        memory: Memory | None,
        mix: Mix | None,
        earlier: Memory | None,
        last: int | None = None,
    ) -> None:
        super().__init__(layout)
        self.memory, self.mix, self.earlier, self.last = memory, mix, earlier, last

    def before(self, layer: int) -> tuple[Tensor, Tensor] | None:
        if self.earlier is None:
            return None
        return self.earlier.keys[layer], self.earlier.values[layer]

    def mixed(
        self,
        layer: int,
        own: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
    ) -> Tensor:
        if self.mix is not None:
            if self.memory is None:
                own = self.mix(layer, own, query, key, value, scale)
            elif layer in self.memory.keys:
                key, value = self.memory.keys[layer], self.memory.values[layer]
                own = self.mix(layer, own, query, key, value, scale)
        if layer == self.last:
            raise StopForward
        return own


class ReadableLM(Protocol):
    """What an objective needs of an LM; ``revela.lm.language_model.LanguageModel`` has it."""

    n_layers: int
    n_heads: int

    @property
    def trainable(self) -> bool: ...

    def pack(self, ids_BL: Tensor, mask_BL: Tensor) -> Any: ...

    def read(self, packed: Any, layers: Sequence[int]) -> Any: ...

    def loss(self, packed: Any, memory: Any = None, mix: Any = None) -> Tensor: ...

    def token_losses(
        self, packed: Any, rows_R: Tensor, memory: Any = None, mix: Any = None, before: Any = None
    ) -> Tensor: ...
