"""Build the modules after a transformer as an OpenVINO graph: pooling, linear layers, and so on.

Shapes: B texts, L tokens, D width of a token's state and a text's vector, W width of a token's
vector.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from revela.encoders.bert import MASK, linear, numbers
from revela.encoders.model_files import Weights

if TYPE_CHECKING:
    from openvino import Model

VECTOR, TOKENS = "sentence_embedding", "unit_token_embeddings"
# Poolings in all forms of a config.json of Sentence-Transformers; the last ones are former flags.
CLS: tuple[Any, ...] = ("cls", ["cls"], ["pooling_mode_cls_token"])
MEAN: tuple[Any, ...] = ("mean", ["mean"], ["pooling_mode_mean_tokens"], [])
EPS = 1e-12  # minimum length in a division, as in torch


class Unsupported(Exception):
    """A module that this file cannot build."""


def with_modules(states: Model, modules: list[tuple[str, Path]], width: int | None) -> Model:
    """Append the modules after a transformer to its graph.

    Args:
        states: the transformer's graph; its first output is the states of tokens, (B, L, D), and
            its input ``MASK`` the attention mask, (B, L). Padding is on the right.
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
    from openvino import opset13 as op

    if kind == "Normalize":
        return _unit(vectors)
    if kind == "Dropout":  # only used in training
        return vectors
    if kind == "Dense":
        about, name = _read(folder), "sentence_embedding"
        inside = about.get("module_input_name", name), about.get("module_output_name") or name
        activation = about.get("activation_function", "Tanh").rpartition(".")[2]
        is_known = inside == (name, name) and activation in ("Tanh", "Identity")
        if about.get("use_residual") or not is_known:
            raise Unsupported("Dense")
        weights = Weights(folder)
        vectors = linear(vectors, weights, "linear", "linear.bias" in weights)
        return op.tanh(vectors) if activation == "Tanh" else vectors
    raise Unsupported(kind)


def _read(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return read


def _pooled(tokens_BLD: Any, mask_BL1: Any, about: dict[str, Any]) -> Any:
    """Token states pooled to (B, D), as a config.json describes it."""
    from openvino import opset13 as op

    if not about.get("include_prompt", True):
        raise Unsupported("pooling without the prompt")
    flags = [name for name, value in about.items() if value and name.startswith("pooling_mode_")]
    mode = about.get("pooling_mode") or flags
    if mode in CLS:
        return op.squeeze(op.gather(tokens_BLD, numbers(0), numbers(1)), numbers(1))
    if mode not in MEAN:
        raise Unsupported(f"pooling {mode}")
    total = op.reduce_sum(op.multiply(tokens_BLD, mask_BL1), numbers(1))
    least = op.constant(np.float32(1e-9))
    return op.divide(total, op.maximum(op.reduce_sum(mask_BL1, numbers(1)), least))
