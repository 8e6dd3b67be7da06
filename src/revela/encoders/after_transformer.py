"""Build the modules after a transformer as an OpenVINO graph: pooling, linear layers, and so on.

Shapes: B texts, L tokens, D width of a token's state and a text's vector, W width of a token's
vector.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from revela.encoders.bert import MASK, layer_norm, linear, numbers
from revela.encoders.model_files import Weights

if TYPE_CHECKING:
    from openvino import Model

VECTOR, TOKENS = "sentence_embedding", "unit_token_embeddings"
# Former flags of Sentence-Transformers' pooling -> mode, in the order in which modes are joined.
FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid", "SiLU")
EPS = 1e-12  # minimum length in a division, as in torch


class Unsupported(Exception):
    """A module that this file cannot build."""


def with_modules(states: Model, modules: list[tuple[str, Path]], width: int | None) -> Model:
    """Append the modules after a transformer to its graph.

    Args:
        states: the transformer's graph; its first output is the states of tokens, (B, L, D), and
            its input ``MASK`` the attention mask, (B, L). Padding is at the right.
        modules: kind and folder of each module after the transformer.
        width: truncate vectors to this width; None: do not.

    Returns:
        A graph with the outputs ``VECTOR`` (B, D) and ``TOKENS`` (B, L, W), both of unit length.

    Raises:
        Unsupported: a module, or one of its settings, cannot be built here.
    """
    import openvino as ov
    from openvino import opset13 as op

    tokens_BLD = states.outputs[0].get_node().input_value(0)
    mask_BL1 = op.convert(op.unsqueeze(states.input(MASK).get_node(), numbers(-1)), "f32")
    if not modules or modules[0][0] != "Pooling":
        raise Unsupported("no pooling")
    vectors = _pooled(tokens_BLD, mask_BL1, _read(modules[0][1]))
    for kind, folder in modules[1:]:
        vectors = _changed(vectors, kind, folder)
    if width is not None:
        vectors = op.slice(vectors, numbers(0), numbers(width), numbers(1), numbers(1))
    dense = next((Weights(folder) for kind, folder in modules if kind == "Dense"), None)
    width_of_tokens = int(tokens_BLD.get_partial_shape()[2].get_length())
    if dense and dense.stored("linear.weight").shape[1] == width_of_tokens:
        tokens_BLD = linear(tokens_BLD, dense, "linear", "linear.bias" in dense)
    outputs = [_unit(vectors), _unit(tokens_BLD)]
    for node, name in zip(outputs, (VECTOR, TOKENS), strict=True):
        node.output(0).set_names({name})
    parameters = [value.get_node() for value in states.inputs]
    return ov.Model(outputs, parameters, states.get_friendly_name())


def _unit(vectors: Any) -> Any:
    from openvino import opset13 as op

    return op.normalize_l2(vectors, numbers(-1), EPS, "max")


def _changed(vectors: Any, kind: str, folder: Path) -> Any:
    """Vectors (B, D) after a module that follows the pooling."""
    if kind == "Normalize":
        return _unit(vectors)
    if kind == "Dropout":  # only used in training
        return vectors
    if kind == "Dense":
        about, name = _read(folder), "sentence_embedding"
        inside = about.get("module_input_name", name), about.get("module_output_name") or name
        if about.get("use_residual") or inside != (name, name):
            raise Unsupported("Dense")
        weights = Weights(folder)
        return _activated(linear(vectors, weights, "linear", "linear.bias" in weights), about)
    if kind == "LayerNorm":
        return layer_norm(vectors, Weights(folder), "norm", 1e-5)
    raise Unsupported(kind)


def _read(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return read


def _pooled(tokens_BLD: Any, mask_BL1: Any, about: dict[str, Any]) -> Any:
    """The pooling that a config.json describes: (B, D)."""
    from openvino import opset13 as op

    if not about.get("include_prompt", True):
        raise Unsupported("pooling without the prompt")
    modes = about.get("pooling_mode") or [mode for flag, mode in FLAGS.items() if about.get(flag)]
    modes = [modes] if isinstance(modes, str) else modes or ["mean"]
    tokens, none = op.constant(np.array([1], np.int64)), op.constant(np.float32(1e-9))
    pooled = []
    for mode in modes:
        if mode == "cls":
            first = op.constant(np.array(0, np.int64))
            pooled.append(op.gather(tokens_BLD, first, tokens))
        elif mode == "max":
            one, far = op.constant(np.float32(1)), op.constant(np.float32(-3e38))
            hidden = op.multiply(op.subtract(one, mask_BL1), far)
            pooled.append(op.reduce_max(op.add(tokens_BLD, hidden), tokens))
        elif mode in ("mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"):
            weights_BL1 = _weights(mask_BL1, mode)
            total = op.reduce_sum(op.multiply(tokens_BLD, weights_BL1), tokens)
            size = op.maximum(op.reduce_sum(weights_BL1, tokens), none)
            size = op.sqrt(size) if mode == "mean_sqrt_len_tokens" else size
            pooled.append(op.divide(total, size))
        else:
            raise Unsupported(f"pooling {mode}")
    return op.concat(pooled, 1) if len(pooled) > 1 else pooled[0]


def _weights(mask_BL1: Any, mode: str) -> Any:
    """Weights of tokens: equal, growing from first to last, or only on the last."""
    from openvino import opset13 as op

    if mode not in ("weightedmean", "lasttoken"):
        return mask_BL1
    tokens = op.constant(np.array(1, np.int64))
    places_BL1 = op.multiply(op.cum_sum(mask_BL1, tokens), mask_BL1)
    if mode == "weightedmean":
        return places_BL1
    last_B11 = op.reduce_max(places_BL1, tokens, True)
    return op.convert(op.equal(places_BL1, last_B11), "f32")


def _activated(inputs: Any, about: dict[str, Any]) -> Any:
    from openvino import opset13 as op

    name = about.get("activation_function", "Tanh").rpartition(".")[2]
    if name not in ACTIVATIONS:
        raise Unsupported(f"Dense with {name}")
    if name == "Identity":
        return inputs
    if name == "SiLU":
        return op.swish(inputs)
    if name == "GELU":
        return op.gelu(inputs, "erf")
    activate = {"Tanh": op.tanh, "ReLU": op.relu, "Sigmoid": op.sigmoid}[name]
    return activate(inputs)
