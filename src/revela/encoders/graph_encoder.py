"""Encode texts as unit vectors by an OpenVINO graph on the CPU, without torch.

Shapes: B texts of a batch, L tokens, D width of a text's vector, W of a token's.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from revela.encoders.after_transformer import TOKENS, VECTOR
from revela.encoders.base import Encoded, Features, TextEncoder, truncate
from revela.encoders.bert import MASK, WORDS
from revela.encoders.cpu import has_bf16, openvino_core
from revela.encoders.prompts import Prompts
from revela.types import Role, fp32

if TYPE_CHECKING:
    from openvino import Model

IDS = "input_ids"
# Lengths of batches are rounded up to a multiple of this: OpenVINO allocates memory for each new
# shape, and does not free all of it.
ROUNDED = 16
# Entries of OpenVINO's cache of shapes, per kind of operation. With its default, 5,000, the memory
# of a service grows for hours, by 3 MB per shape; with 0, a query takes twice as long.
CACHED_SHAPES = 100


class Graph(NamedTuple):
    """A retriever as a graph with the outputs ``VECTOR`` (B, D) and ``TOKENS`` (B, L, W).

    Attributes:
        precision: "int8", "bf16" or "fp32".
        table_VD: word embeddings, if they are not in the graph.
    """

    model: Model
    precision: str
    table_VD: NDArray[Any] | None = None

    def inputs(self, ids_BL: NDArray[Any], mask_BL: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """The graph's inputs for a batch."""
        if self.table_VD is not None:
            return {WORDS: fp32(self.table_VD[ids_BL]), MASK: mask_BL}
        return {IDS: ids_BL, MASK: mask_BL}

    def compiled(self, outputs: Sequence[str]) -> Any:
        """Compile the part of the graph that computes these outputs."""
        import openvino as ov

        nodes = [self.model.output(name).get_node().input_value(0) for name in outputs]
        part = ov.Model(nodes, self.model.get_parameters(), "encoder")
        use_bf16 = self.precision != "fp32" and has_bf16()
        settings = {
            "INFERENCE_PRECISION_HINT": "bf16" if use_bf16 else "f32",
            "PERFORMANCE_HINT": "LATENCY",
            "CPU_RUNTIME_CACHE_CAPACITY": CACHED_SHAPES,
        }
        return openvino_core().compile_model(part, "CPU", settings)


class GraphEncoder(TextEncoder):
    """Runs a graph; each thread has its own inference request.

    Args:
        graph: the graph to run.
        tokenizer: a tokenizer of the ``tokenizers`` library.
        padding: id of the padding token.
        prompts, limit, name: as for ``TextEncoder``.
    """

    tokenizer: Any = None

    def __init__(
        self,
        graph: Graph,
        tokenizer: Any,
        prompts: tuple[str, str] = ("", ""),
        limit: int | None = None,
        padding: int = 0,
        name: str = "the model",
    ) -> None:
        self.graph, self.tokenizer, self.padding = graph, tokenizer, padding
        self.prompts, self.limit, self.name = Prompts(*prompts), limit, name
        self.precision = graph.precision
        tokenizer.enable_padding(pad_id=padding)
        truncate(tokenizer, limit)
        self._lock = threading.Lock()
        self._compiled: Any = None
        self._gives_tokens = False
        self._own = threading.local()  # the thread's request, and the compiled graph of it

    def with_graph(self, **changes: Any) -> GraphEncoder:
        """The same encoder with another graph; ``changes`` are fields of ``Graph``."""
        how = self.tokenizer, self.prompts, self.limit, self.padding, self.name
        return GraphEncoder(self.graph._replace(**changes), *how)

    def tokenize(self, texts: Sequence[str], role: Role) -> Features:
        """Ids and mask (N, L), padded on the right."""
        prompt = self.prompt(role)
        encodings = self.tokenizer.encode_batch([prompt + text for text in texts])
        ids_NL = np.array([encoding.ids for encoding in encodings])
        mask_NL = np.array([encoding.attention_mask for encoding in encodings])
        return {IDS: ids_NL, MASK: mask_NL}

    def encode_batch(self, features: Features, role: Role, with_tokens: bool) -> Encoded:
        """Run the graph; batches are padded to a multiple of ``ROUNDED``."""
        length = features[IDS].shape[1]
        rounded = -(-length // ROUNDED) * ROUNDED
        more = (0, 0), (0, min(rounded, self.limit or rounded) - length)
        ids_BL = np.pad(features[IDS], more, constant_values=self.padding)
        inputs = self.graph.inputs(ids_BL, np.pad(features[MASK], more))
        found = self._request(with_tokens).infer(inputs, share_inputs=True)
        return Encoded(found[VECTOR], found[TOKENS] if with_tokens else None)

    def _request(self, needs_tokens: bool) -> Any:
        """This thread's request to the compiled graph. OpenVINO queues the requests of all threads.
        The graph is compiled with token vectors when they are first needed.
        """
        with self._lock:
            if self._compiled is None or (needs_tokens and not self._gives_tokens):
                outputs = [VECTOR, TOKENS] if needs_tokens else [VECTOR]
                self._compiled, self._gives_tokens = self.graph.compiled(outputs), needs_tokens
            compiled = self._compiled
        if getattr(self._own, "graph", None) is not compiled:
            self._own.graph, self._own.request = compiled, compiled.create_infer_request()
        return self._own.request
