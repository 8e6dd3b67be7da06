"""Encode texts as unit vectors by an OpenVINO graph on the CPU, without torch.

Batches hold texts of similar length, as padding costs time.

Shapes: N texts, B texts of a batch, L tokens, D width of the vectors; T tokens of a text without
prompt and special tokens, W width of a token's vector.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from revela.encoder.after_transformer import TOKENS, VECTOR
from revela.encoder.bert import MASK, WORDS
from revela.encoder.processor import has_bf16, openvino_core
from revela.encoder.token_counter import Spans, TokenCounter, truncate
from revela.encoder.weights import fp32
from revela.silence import SHOWN_AFTER
from revela.types import QueryTokens, Vectors, check_vectors_finite, sequence_of

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
Tokens = tuple[Vectors, Spans]
"""The vectors of a text's tokens, (T, W), and the span of each in prompt + text."""


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


class GraphEncoder:
    """A ``TokenEncoder`` that runs a graph. Threads may share it: their batches take turns.

    Args:
        graph: the graph to run.
        tokenizer: a tokenizer of the ``tokenizers`` library.
        prompts: prefixes of queries and of passages.
        max_tokens: texts are truncated to this length, special tokens included; None: not at all.
        padding: id of the padding token.
        name: the model's name, for messages.
        words_to_vectors: see ``words_to_vectors_of``.
    """

    slots = 0

    def __init__(
        self,
        graph: Graph,
        tokenizer: Any,
        prompts: tuple[str, str] = ("", ""),
        max_tokens: int | None = None,
        padding: int = 0,
        name: str = "the model",
        words_to_vectors: float = 1.0,
    ) -> None:
        self.graph, self.tokenizer, self.name = graph, tokenizer, name
        self.query_prompt, self.passage_prompt = prompts
        self.max_tokens, self.padding, self.words_to_vectors = max_tokens, padding, words_to_vectors
        tokenizer.no_padding()
        truncate(tokenizer, max_tokens)
        self._lock = threading.Lock()
        self._compiled: Any = None
        self._gives_tokens = False
        self._own = threading.local()  # each thread's request, and the graph that it is of

    def with_graph(self, **changes: Any) -> GraphEncoder:
        """The same encoder with another graph; ``changes`` are fields of ``Graph``."""
        prompts = self.query_prompt, self.passage_prompt
        how = (self.tokenizer, prompts, self.max_tokens, self.padding, self.name)
        return GraphEncoder(replace(self.graph, **changes), *how, self.words_to_vectors)

    @property
    def precision(self) -> str:
        """ "int8", "bf16" or "fp32"."""
        return self.graph.precision

    def encode_queries(self, texts: Sequence[str], progress: bool = False) -> Vectors:
        """Encode queries, (N, D) float32. Raises RevelaError for infinity and NaN."""
        return self._encode(texts, self.query_prompt, progress)

    def encode_passages(self, texts: Sequence[str], progress: bool = False) -> Vectors:
        """``encode_queries``, but for passages."""
        return self._encode(texts, self.passage_prompt, progress)

    def encode_with_tokens(
        self, texts: Sequence[str], progress: bool = False
    ) -> tuple[Vectors, list[Vectors]]:
        """``encode_passages``, and each passage's unit token vectors, (T, W) float32.

        Token vectors are the states of the transformer's last layer, without prompts and special
        tokens, after the linear layer that follows the pooling, if there is one.
        """
        texts = sequence_of(texts)
        tokens: list[Tokens] = [(np.empty(0, np.float32), [])] * len(texts)
        vectors_ND = self._encode(texts, self.passage_prompt, progress, tokens)
        return vectors_ND, [vectors_TW for vectors_TW, _ in tokens]

    def query_tokens(self, queries: Sequence[str]) -> list[QueryTokens]:
        """``encode_queries``, and the queries' token vectors, from the same pass."""
        queries = sequence_of(queries)
        tokens: list[Tokens] = [(np.empty(0, np.float32), [])] * len(queries)
        begin = len(self.query_prompt)
        vectors_ND = self._encode(queries, self.query_prompt, False, tokens)
        return [
            QueryTokens(vector_D, vectors_TW, [(max(0, a - begin), b - begin) for a, b in spans])
            for vector_D, (vectors_TW, spans) in zip(vectors_ND, tokens, strict=True)
        ]

    def fitted(self, heads: Sequence[str], texts: Sequence[str], part: int = 1) -> list[list[str]]:
        """``LimitedEncoder.fitted``."""
        return self.counter.fitted(heads, texts, self.max_tokens, part)

    @functools.cached_property
    def counter(self) -> TokenCounter:
        """Counts tokens as this encoder reads them."""
        prompts = self.query_prompt, self.passage_prompt
        return TokenCounter(self.tokenizer, *prompts, self.max_tokens)

    def _encode(
        self, texts: Sequence[str], prompt: str, progress: bool, tokens: list[Tokens] | None = None
    ) -> Vectors:
        """The texts' vectors (N, D); writes token vectors into ``tokens``."""
        texts = sequence_of(texts)
        vectors_ND: Vectors | None = None
        how: dict[str, Any] = dict(total=len(texts), unit="text", disable=not progress)
        request = self._request(tokens is not None)
        with tqdm(**how, delay=SHOWN_AFTER, leave=False) as bar:
            for rows, encodings in self._batches(texts, prompt):
                ids_BL, mask_BL = self._padded(encodings)
                found = request.infer(self.graph.inputs(ids_BL, mask_BL), share_inputs=True)
                vectors_BD = found[VECTOR]
                if vectors_ND is None:
                    vectors_ND = np.empty((len(texts), vectors_BD.shape[1]), np.float32)
                vectors_ND[rows] = vectors_BD
                if tokens is not None:
                    for i, *read in zip(rows, encodings, found[TOKENS], strict=True):
                        tokens[i] = self._tokens_of_text(prompt, *read)
                bar.update(len(rows))
        if vectors_ND is None:
            width = self.graph.model.output(VECTOR).get_partial_shape()[1].get_length()
            vectors_ND = np.empty((0, width), np.float32)
        check_vectors_finite(vectors_ND, self.name)
        return vectors_ND

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

    def _batches(self, texts: Sequence[str], prompt: str) -> Iterator[tuple[list[int], list[Any]]]:
        """(indices of texts, their encodings) of texts of similar length, longest first."""
        by_length = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        for start in range(0, len(by_length), READ_AHEAD):
            window = by_length[start : start + READ_AHEAD]
            # An empty text has no token to pool.
            read = [prompt + (texts[i] if texts[i].strip() else ".") for i in window]
            encodings = self.tokenizer.encode_batch(read)
            order = sorted(range(len(window)), key=lambda i: -len(encodings[i]))
            while order:
                size = max(1, TOKENS_PER_BATCH // len(encodings[order[0]]))
                rows, order = order[:size], order[size:]
                yield [window[i] for i in rows], [encodings[i] for i in rows]

    def _padded(self, encodings: Sequence[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ids and mask of a batch (B, L), padded at the right."""
        longest = max(len(encoding) for encoding in encodings)
        rounded = -(-longest // ROUNDED) * ROUNDED
        longest = min(rounded, self.max_tokens or rounded)
        ids_BL = np.full((len(encodings), longest), self.padding, np.int64)
        mask_BL = np.zeros((len(encodings), longest), np.int64)
        for row, encoding in enumerate(encodings):
            ids_BL[row, : len(encoding)] = encoding.ids
            mask_BL[row, : len(encoding)] = 1
        return ids_BL, mask_BL

    def _tokens_of_text(self, prompt: str, encoding: Any, vectors_LW: Vectors) -> Tokens:
        """A text's tokens, without padding, special tokens and prompt."""
        kept = [place for place, i in enumerate(encoding.ids) if i not in self._special]
        kept = kept[self._tokens_of_prompt(prompt) :]
        return vectors_LW[kept], [encoding.offsets[place] for place in kept]

    @functools.cached_property
    def _special(self) -> set[int]:
        added = self.tokenizer.get_added_tokens_decoder()
        return {i for i, token in added.items() if token.special}

    def _tokens_of_prompt(self, prompt: str) -> int:
        # The space at the end of a prompt belongs to the text.
        return len(self.tokenizer.encode(prompt.rstrip(), add_special_tokens=False))
