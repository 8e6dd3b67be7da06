"""FLOP of a training step, from shapes alone, and of a device: model FLOP utilisation.

A multiply-add is two FLOP. Counted are matrix products: projections, MLPs, attention, LoRA, the
LM's head. Not counted: norms, rotary positions, softmaxes and other elementwise work, embedding
look-ups, pooling, and what is computed twice to save memory. Causal attention counts what lies
below the diagonal, as a fused kernel computes it.

The backward pass needs gradients to activations through every frozen weight, but not past the
first thing that is trained (or mixed in), and gradients to weights for LoRA only: see
``retriever_flops`` and ``lm_flops``. Document attention is counted apart (``document_flops``),
because the bound has none.

Shapes: texts of L tokens, T in all; D width of the model, H query heads and G key-value heads of
width d, F of the MLP, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from research.benchmarks.forms import timed

# FLOP/s by data sheet; Hopper's in the SXM form.
DENSE_BF16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
SLOWER = ("PCIe", "NVL")  # forms of these chips that are measured instead


@dataclass(frozen=True)
class Shape:
    """A decoder of gated MLPs (Llama, Qwen, Mistral), of which ``layers`` are used, with LoRA of
    this rank on every linear layer.
    """

    layers: int
    width: int
    heads: int
    key_heads: int
    head_width: int
    mlp: int
    vocabulary: int
    rank: int = 0

    @classmethod
    def of(cls, config: Any, layers: int = 0, rank: int = 0) -> Shape:
        """The shape of a transformers configuration; ``layers`` of 0 means all."""
        heads = config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        depth = min(layers or config.num_hidden_layers, config.num_hidden_layers)
        sizes = (
            config.hidden_size,
            heads,
            config.num_key_value_heads,
            width,
            config.intermediate_size,
            config.vocab_size,
        )
        return cls(depth, *sizes, rank)

    @property
    def _read(self) -> list[tuple[int, int]]:
        """(in, out) of the projections to keys and values."""
        return [(self.width, self.key_heads * self.head_width)] * 2

    @property
    def _asked(self) -> tuple[int, int]:
        return self.width, self.heads * self.head_width

    @property
    def _rest(self) -> list[tuple[int, int]]:
        """(in, out) of what comes after attention."""
        return [
            (self.heads * self.head_width, self.width),
            (self.width, self.mlp),
            (self.width, self.mlp),
            (self.mlp, self.width),
        ]

    def linear(self, sizes: Sequence[tuple[int, int]], tokens: int) -> float:
        """Forward of these linear layers and their LoRA."""
        return 2.0 * tokens * sum(i * o + self.rank * (i + o) for i, o in sizes)

    def linear_back(
        self, sizes: Sequence[tuple[int, int]], tokens: int, to_input: bool = True
    ) -> float:
        """Gradients to LoRA's two factors and to what lies between them and, unless nothing before
        is trained, to the input.
        """
        to_lora = sum(self.rank * (i + 2 * o) for i, o in sizes)
        return 2.0 * tokens * (to_lora + to_input * sum(i * o + self.rank * i for i, o in sizes))

    def attention(self, cells: float) -> float:
        """Forward of all heads over this many (query, key) pairs of tokens: scores and outputs.
        Backward is twice as much.
        """
        return 2 * 2.0 * self.heads * self.head_width * cells

    def layer(self, tokens: int, cells: float) -> float:
        """Forward of a layer."""
        return self.linear([self._asked, *self._read, *self._rest], tokens) + self.attention(cells)

    def layer_back(self, tokens: int, cells: float, to_input: bool = True) -> float:
        """Backward of a layer: to its input, or only as far as LoRA on queries, keys and values
        needs it.
        """
        projections = self.linear_back([self._asked, *self._read], tokens, to_input)
        return projections + self.linear_back(self._rest, tokens) + 2 * self.attention(cells)


def cells_of(lengths: Sequence[int], causal: bool = True) -> float:
    """Pairs of tokens of the same text that attend; not ``causal``: what a form computes that
    writes all scores out.
    """
    return sum(n * (n + 1) / 2 if causal else n * n for n in lengths)


def retriever_flops(shape: Shape, lengths: Sequence[int], causal: bool = True) -> float:
    """Forward and backward of the retriever on these texts. Its first layer's input is no result of
    training: no gradient goes there.
    """
    tokens, cells = sum(lengths), cells_of(lengths, causal)
    forward = shape.layers * shape.layer(tokens, cells)
    return (
        forward
        + (shape.layers - 1) * shape.layer_back(tokens, cells)
        + shape.layer_back(tokens, cells, to_input=False)
    )


def lm_flops(
    shape: Shape, lengths: Sequence[int], layers: Sequence[int], trained: bool, causal: bool = True
) -> float:
    """Both streams of the LM on these chunks, in-batch attention left out.

    Stream e runs forward, in the last mixed layer as far as keys and values; stream h forward from
    the first mixed layer on, since below both are equal, and through the head (a row for every
    token that has a next). Frozen: h alone runs backward, to activations only, from the head to the
    output of attention in the first mixed layer. Trained: h runs backward through all layers, e
    from the last layer's keys and values down, both with gradients to LoRA.

    Args:
        shape: of the LM; its rank is 0 if it is frozen.
        lengths: tokens of each chunk.
        layers: mixed layers, ascending.
        trained: by LoRA; then every layer is mixed.
        causal: see cells_of.
    """
    tokens, cells = sum(lengths), cells_of(lengths, causal)
    first, last, depth = layers[0], layers[-1], shape.layers
    read = last * shape.layer(tokens, cells) + shape.linear([shape._asked, *shape._read], tokens)
    predicted = (depth - first) * shape.layer(tokens, cells)
    head = 2 * 2.0 * (tokens - len(lengths)) * shape.width * shape.vocabulary
    forward = read + predicted + head  # the head both ways
    if not trained:
        # In the first mixed layer what attention is made of needs none.
        return (
            forward
            + (depth - first - 1) * shape.layer_back(tokens, cells)
            + shape.linear_back(shape._rest, tokens)
        )
    through = (depth - 1) * shape.layer_back(tokens, cells) + shape.layer_back(
        tokens, cells, to_input=False
    )
    behind = through - shape.layer_back(tokens, cells) + shape.linear_back(shape._read, tokens)
    return forward + through + behind


def document_flops(shape: Shape, heads: Mapping[int, int], cells: float, trained: bool) -> float:
    """Forward and backward of document attention.

    Frozen, the gradient goes to the queries (two products), but not in the first mixed layer, where
    they are no result of Sim; that to Sim itself is no matrix product. Trained, it goes to queries,
    keys and values (four).

    Args:
        shape: of the LM.
        heads: mixed heads by layer.
        cells: (query row, key) pairs of tokens over all pairs of chunks that weigh enough.
        trained: whether the LM is.
    """
    a_head = 2 * 2.0 * shape.head_width * cells  # forward; two products
    if trained:
        return 3 * a_head * sum(heads.values())
    return 2 * a_head * sum(heads.values()) - a_head * heads[min(heads)]


def peak_flops(device: torch.device) -> tuple[float, str]:
    """Dense bf16 FLOP/s of this device, and where the number is from."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    known = next(
        (
            peak
            for chip, peak in DENSE_BF16.items()
            if chip in name and not any(s in name for s in SLOWER)
        ),
        None,
    )
    return (known, "data sheet") if known else (product_flops(device), "a product")


def product_flops(device: torch.device, size: int = 8192, repeats: int = 5) -> float:
    """FLOP/s that a product of two large matrices reaches in bf16: the best of a few."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = [timed(lambda: left @ right, device) for _ in range(repeats + 1)]
    return 2.0 * size**3 / min(times[1:])
