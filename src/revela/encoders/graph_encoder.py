"""Encode texts as unit vectors by an OpenVINO graph on the CPU, without torch.

Batches hold texts of similar length, as padding costs time.

Shapes: B texts of a batch, L tokens, D width of a text's vector, W of a token's.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from revela.encoders.after_transformer import TOKENS, VECTOR
from revela.encoders.base import Encoded, Role, TextEncoder, Tokens, truncate
from revela.encoders.bert import MASK, WORDS
from revela.encoders.cpu import has_bf16, openvino_core
from revela.encoders.prompts import Prompts
from revela.types import Vectors, fp32

if TYPE_CHECKING:
    from openvino import Model

IDS = "input_ids"
READ_AHEAD = 4096  # texts that are tokenized, and sorted by length, at once
TOKENS_PER_BATCH = 4096
# Lengths of batches are rounded up to a multiple of this: OpenVINO prepares each new shape, and
# never frees some of that memory.
ROUNDED = 16
# OpenVINO's cache of prepared shapes, in entries per kind of operation. With its default of 5,000 a
# service grows for hours, by 3 MB per shape; with 0, a query takes twice as long.
PREPARED = 100


@dataclass(frozen=True)
class Graph:
    """A retriever as a graph with the outputs ``VECTOR`` (B, D) and ``TOKENS`` (B, L, W).

    Attributes:
        precision: "int8", "bf16" or "fp32".
        table_VD: word embeddings, if the graph begins after them.
    """

    model: Model
    precision: str
    table_VD: NDArray[Any] | None = None

    def inputs(self, ids_BL: NDArray[Any], mask_BL: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """The graph's inputs for a batch."""
        if self.table_VD is not None:
            return {WORDS: fp32(self.table_VD[ids_BL]), MASK: mask_BL}
        names = {name for value in self.model.inputs for name in value.get_names()}
        every = {IDS: ids_BL, MASK: mask_BL, "token_type_ids": np.zeros_like(ids_BL)}
        return {name: values for name, values in every.items() if name in names}

    def compiled(self, outputs: Sequence[str]) -> Any:
        """Compile the part of the graph that computes these outputs."""
        import openvino as ov

        nodes = [self.model.output(name).get_node().input_value(0) for name in outputs]
        part = ov.Model(nodes, self.model.get_parameters(), "encoder")
        use_bf16 = self.precision != "fp32" and has_bf16()
        settings = {
            "INFERENCE_PRECISION_HINT": "bf16" if use_bf16 else "f32",
            "PERFORMANCE_HINT": "LATENCY",
            "CPU_RUNTIME_CACHE_CAPACITY": PREPARED,
        }
        return openvino_core().compile_model(part, "CPU", settings)


class GraphEncoder(TextEncoder):
    """Runs a graph; threads have requests of their own.

    Args:
        graph: the graph to run.
        tokenizer: a tokenizer of the ``tokenizers`` library.
        padding: id of the padding token.
        prompts, limit, name, words_to_vectors: as for ``TextEncoder``.
    """

    tokenizer: Any = None
    dimension = 0

    def __init__(
        self,
        graph: Graph,
        tokenizer: Any,
        prompts: tuple[str, str] = ("", ""),
        limit: int | None = None,
        padding: int = 0,
        name: str = "the model",
        words_to_vectors: float = 1.0,
    ) -> None:
        self.graph, self.tokenizer, self.padding = graph, tokenizer, padding
        self.prompts, self.limit, self.name = Prompts(*prompts), limit, name
        self.words_to_vectors, self.precision = words_to_vectors, graph.precision
        self.dimension = graph.model.output(VECTOR).get_partial_shape()[1].get_length()
        tokenizer.no_padding()
        truncate(tokenizer, limit)
        self._lock = threading.Lock()
        self._compiled: Any = None
        self._gives_tokens = False
        self._own = threading.local()  # each thread's request, and the graph that it is of

    def with_graph(self, **changes: Any) -> GraphEncoder:
        """The same encoder with another graph; ``changes`` are fields of ``Graph``."""
        how = (self.tokenizer, self.prompts, self.limit, self.padding, self.name)
        return GraphEncoder(replace(self.graph, **changes), *how, self.words_to_vectors)

    def batches(self, texts: Sequence[str], role: Role, with_tokens: bool) -> Iterator[Encoded]:
        """Encode texts of similar length together, longest first."""
        request, prompt = self._request(with_tokens), self.prompt_length(role)
        for rows, encodings in self._tokenized(texts, role):
            ids_BL, mask_BL = self._padded(encodings)
            found = request.infer(self.graph.inputs(ids_BL, mask_BL), share_inputs=True)
            tokens = list[Tokens]()
            if with_tokens:
                every = zip(encodings, found[TOKENS], strict=True)
                tokens = [self._tokens_of_text(*text, prompt) for text in every]
            yield Encoded(rows, found[VECTOR], tokens)

    def _request(self, needs_tokens: bool) -> Any:
        """This thread's request to the compiled graph. OpenVINO keeps the order of all requests.
        The graph computes token vectors once they have been requested.
        """
        with self._lock:
            if self._compiled is None or (needs_tokens and not self._gives_tokens):
                outputs = [VECTOR, TOKENS] if needs_tokens else [VECTOR]
                self._compiled, self._gives_tokens = self.graph.compiled(outputs), needs_tokens
            compiled = self._compiled
        if getattr(self._own, "graph", None) is not compiled:
            self._own.graph, self._own.request = compiled, compiled.create_infer_request()
        return self._own.request

    def _tokenized(self, texts: Sequence[str], role: Role) -> Iterator[tuple[list[int], list[Any]]]:
        """(indices of texts, their encodings) of texts of similar length, longest first."""
        by_length = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        for start in range(0, len(by_length), READ_AHEAD):
            window = by_length[start : start + READ_AHEAD]
            encodings = self.tokenizer.encode_batch([self.prompted(texts[i], role) for i in window])
            order = sorted(range(len(window)), key=lambda i: -len(encodings[i]))
            while order:
                size = max(1, TOKENS_PER_BATCH // len(encodings[order[0]]))
                rows, order = order[:size], order[size:]
                yield [window[i] for i in rows], [encodings[i] for i in rows]

    def _padded(self, encodings: Sequence[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ids and mask of a batch (B, L), padded at the right."""
        longest = max(len(encoding) for encoding in encodings)
        rounded = -(-longest // ROUNDED) * ROUNDED
        longest = min(rounded, self.limit or rounded)
        ids_BL = np.full((len(encodings), longest), self.padding, np.int64)
        mask_BL = np.zeros((len(encodings), longest), np.int64)
        for row, encoding in enumerate(encodings):
            ids_BL[row, : len(encoding)] = encoding.ids
            mask_BL[row, : len(encoding)] = 1
        return ids_BL, mask_BL

    def _tokens_of_text(self, encoding: Any, vectors_LW: Vectors, prompt: int) -> Tokens:
        """A text's tokens, without padding, special tokens and the tokens of the prompt."""
        kept = [place for place, i in enumerate(encoding.ids) if i not in self._special][prompt:]
        return vectors_LW[kept], [encoding.offsets[place] for place in kept]

    @functools.cached_property
    def _special(self) -> set[int]:
        added = self.tokenizer.get_added_tokens_decoder()
        return {i for i, token in added.items() if token.special}
