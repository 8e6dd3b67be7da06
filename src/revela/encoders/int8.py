"""Quantise the matrix products of a graph to int8: weights with a scale per output, activations
with one range per product.

Channels with large activations are scaled down, and their weights are scaled up by the same factor
(SmoothQuant, Xiao et al., ICML 2023, eq. 4). Ranges are measured on random tokens of the model's
vocabulary. They cover the ranges of text, so no text is needed and the result is always the same.

Shapes: C channels (inputs) of a product, N its outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from revela.encoders.cpu import openvino_core

if TYPE_CHECKING:
    from openvino import Model

MIGRATION = 0.6  # SmoothQuant's alpha; chosen on the two embedded models (research/notebook.md)
LEVELS = 256


def quantised(model: Model, batches: Iterable[Mapping[str, NDArray[Any]]]) -> Model:
    """Copy a graph, with its products of states and weights in int8.

    Args:
        model: a graph in fp32.
        batches: inputs for measuring the ranges.
    """
    import openvino as ov
    from openvino import opset13 as op

    copy = model.clone()
    if not (products := _products(copy)):
        return copy
    probe = ov.Model([inputs for _, inputs, _ in products], copy.get_parameters(), "ranges")
    compiled = openvino_core().compile_model(probe, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    lows, highs = [], []
    for batch in batches:
        measured = compiled(dict(batch)).values()
        flat = [states.reshape(-1, states.shape[-1]) for states in measured]
        lows.append([states.min(axis=0) for states in flat])
        highs.append([states.max(axis=0) for states in flat])
    for i, (product, inputs, weights_NC) in enumerate(products):
        low_C = np.min([low[i] for low in lows], axis=0)
        high_C = np.max([high[i] for high in highs], axis=0)
        largest_C = np.maximum(np.maximum(-low_C, high_C), 1e-6)
        weight_C = np.maximum(np.abs(weights_NC).max(axis=0), 1e-6)
        scale_C = largest_C**MIGRATION / weight_C ** (1 - MIGRATION)
        low, high = _range(float((low_C / scale_C).min()), float((high_C / scale_C).max()))
        ends = [op.constant(np.float32(end)) for end in (low, high)]
        scaled = op.multiply(inputs, op.constant((1 / scale_C).astype(np.float32)))
        states = op.fake_quantize(scaled, *ends, *ends, LEVELS)
        weights_NC = weights_NC * scale_C
        step_N1 = np.maximum(np.abs(weights_NC).max(axis=1, keepdims=True), 1e-12) / 127
        stored = op.constant(np.round(weights_NC / step_N1).astype(np.int8))
        step = op.constant(step_N1.astype(np.float32))
        weights = op.multiply(op.convert(stored, "f32"), step)
        new = op.matmul(states, weights, False, True)
        product.output(0).replace(new.output(0))
    return copy


def _products(model: Model) -> list[tuple[Any, Any, NDArray[np.float32]]]:
    """(product, states, weights (N, C)) of each product of states, which have three dimensions, and
    a constant.
    """
    found = []
    for node in model.get_ordered_ops():
        if node.get_type_name() != "MatMul":
            continue
        states, weights = node.input_value(0), node.input_value(1).get_node()
        attributes = node.get_attributes()
        is_constant = weights.get_type_name() == "Constant" and len(weights.shape) == 2
        if not is_constant or len(states.get_partial_shape()) != 3 or attributes["transpose_a"]:
            continue
        numbers = np.asarray(weights.data, np.float32)
        found.append((node, states, numbers if attributes["transpose_b"] else numbers.T))
    return found


def _range(low: float, high: float) -> tuple[float, float]:
    """The range to quantise. 0 is one of its levels: the middle one, unless most of the range is
    above 0.
    """
    low, high = min(low, 0.0), max(high, 0.0)
    if -low < high / 2:
        step = (high - low) / (LEVELS - 1)
        below = round(-low / step)
        return -below * step, (LEVELS - 1 - below) * step
    step = max(-low / (LEVELS // 2), high / (LEVELS // 2 - 1))
    return -LEVELS // 2 * step, (LEVELS // 2 - 1) * step
