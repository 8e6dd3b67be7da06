"""Build BERT as an OpenVINO graph from a folder's weights, without torch.

Also RoBERTa and XLM-RoBERTa, whose positions begin at another number. The graph begins after the
word embeddings, which the caller looks up: their table may be most of the model, of which a batch
needs few rows.

Shapes: B texts, L tokens, D width of a token's state, H heads, V words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from revela.encoders.model_files import Weights

if TYPE_CHECKING:
    from openvino import Model

WORDS, MASK, STATES = "word_embeddings", "attention_mask", "token_embeddings"
FIRST_POSITION = {"bert": 0, "roberta": None, "xlm-roberta": None}  # None: after the padding's id
ACTIVATIONS = {"gelu": "erf", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
FAR = -1e4  # attention score of padding; small enough for bf16


def is_bert(config: dict[str, Any]) -> bool:
    """Whether ``bert`` can build the model of a config.json."""
    return (
        config.get("model_type") in FIRST_POSITION
        and config.get("hidden_act", "gelu") in ACTIVATIONS
        and config.get("position_embedding_type", "absolute") == "absolute"
        and not (config.get("is_decoder") or config.get("add_cross_attention"))
    )


def max_positions(config: dict[str, Any]) -> int | None:
    """The maximum tokens of a text by a model's number of positions; None: no limit."""
    positions = config.get("max_position_embeddings")
    return positions - _first_position(config) if positions and is_bert(config) else positions


def _first_position(config: dict[str, Any]) -> int:
    first = FIRST_POSITION[config["model_type"]]
    return int(config.get("pad_token_id", 1)) + 1 if first is None else first


def bert(config: dict[str, Any], weights: Weights) -> tuple[Model, NDArray[Any]]:
    """Build the graph.

    Returns:
        A graph from word embeddings (B, L, D) and mask (B, L) to states (B, L, D); and the word
        embeddings (V, D), memory-mapped.

    Raises:
        ValueError: a weight is missing.
    """
    import openvino as ov
    from openvino import opset13 as op

    # In a checkpoint with a head for masked language modelling, all names have a prefix.
    prefix = next(
        (p for p in ("", "bert.", "roberta.") if f"{p}embeddings.LayerNorm.weight" in weights), ""
    )
    heads, eps = int(config["num_attention_heads"]), float(config.get("layer_norm_eps", 1e-12))
    gelu = ACTIVATIONS[config.get("hidden_act", "gelu")]
    first = _first_position(config)

    table_VD = weights.stored(f"{prefix}embeddings.word_embeddings.weight")
    width = table_VD.shape[1]
    words_BLD = op.parameter([-1, -1, width], ov.Type.f32, name=WORDS)
    mask_BL = op.parameter([-1, -1], ov.Type.i64, name=MASK)
    for node in (words_BLD, mask_BL):
        node.output(0).set_names({node.get_friendly_name()})

    # Texts are padded on the right, so positions are the same as without padding.
    length = op.gather(op.shape_of(mask_BL), numbers(1), numbers(0))
    positions_LD = op.slice(
        op.constant(weights.fp32(f"{prefix}embeddings.position_embeddings.weight")),
        numbers(first),
        op.add(length, numbers(first)),
        numbers(1),
        numbers(0),
    )
    one_text_D = op.constant(weights.fp32(f"{prefix}embeddings.token_type_embeddings.weight")[0])
    begun_BLD = op.add(op.add(words_BLD, positions_LD), one_text_D)
    states_BLD = layer_norm(begun_BLD, weights, f"{prefix}embeddings.LayerNorm", eps)

    padding_B11L = op.unsqueeze(op.unsqueeze(mask_BL, numbers(1)), numbers(1))
    one, far = op.constant(np.float32(1)), op.constant(np.float32(FAR))
    bias_B11L = op.multiply(op.subtract(one, op.convert(padding_B11L, "f32")), far)

    def by_head(states: Any) -> Any:
        parts_BLHD = op.reshape(states, numbers(0, 0, heads, width // heads), True)
        return op.transpose(parts_BLHD, numbers(0, 2, 1, 3))

    for i in range(int(config["num_hidden_layers"])):
        layer = f"{prefix}encoder.layer.{i}"
        queries, keys, values = (
            by_head(linear(states_BLD, weights, f"{layer}.attention.self.{part}"))
            for part in ("query", "key", "value")
        )
        mixed_BHLD = op.scaled_dot_product_attention(queries, keys, values, bias_B11L)
        mixed_BLD = op.reshape(
            op.transpose(mixed_BHLD, numbers(0, 2, 1, 3)), numbers(0, 0, width), True
        )
        attended = op.add(linear(mixed_BLD, weights, f"{layer}.attention.output.dense"), states_BLD)
        states_BLD = layer_norm(attended, weights, f"{layer}.attention.output.LayerNorm", eps)
        inner = op.gelu(linear(states_BLD, weights, f"{layer}.intermediate.dense"), gelu)
        changed = op.add(linear(inner, weights, f"{layer}.output.dense"), states_BLD)
        states_BLD = layer_norm(changed, weights, f"{layer}.output.LayerNorm", eps)
    states_BLD.output(0).set_names({STATES})
    return ov.Model([states_BLD], [words_BLD, mask_BL], config["model_type"]), table_VD


def numbers(*values: int) -> Any:
    """A constant of integers."""
    from openvino import opset13 as op

    return op.constant(np.array(values, np.int64))


def linear(inputs: Any, weights: Weights, name: str, has_bias: bool = True) -> Any:
    """The linear layer of this name."""
    from openvino import opset13 as op

    product = op.matmul(inputs, op.constant(weights.fp32(f"{name}.weight")), False, True)
    return op.add(product, op.constant(weights.fp32(f"{name}.bias"))) if has_bias else product


def layer_norm(inputs: Any, weights: Weights, name: str, eps: float) -> Any:
    """The LayerNorm of this name."""
    from openvino import opset13 as op

    normal = op.mvn(inputs, numbers(-1), True, eps, "inside_sqrt")
    scaled = op.multiply(normal, op.constant(weights.fp32(f"{name}.weight")))
    return op.add(scaled, op.constant(weights.fp32(f"{name}.bias")))
