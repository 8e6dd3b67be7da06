"""Texts -> arrays of unit vectors, by a ``RetrieverModule``.

Shapes: N texts, B texts of a batch, T tokens of a text, D numbers of a text's vector, W of a
token's.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from torch import Tensor
from tqdm import tqdm

from revela.device import on_cpu, sent, uses_bf16
from revela.encoder.bert import max_positions
from revela.encoder.prompts import OWN, Given
from revela.encoder.saved_config import words_to_vectors_of
from revela.encoder.static_encoder import check_tokens
from revela.encoder.token_counter import TokenCounter, check_max_tokens
from revela.errors import QueryError
from revela.retriever.build import load_retriever, positions_of
from revela.retriever.context import ContextEncoder, load_context_encoder
from revela.retriever.module import Features, RetrieverModule, Role, has_routes
from revela.settings import Precision
from revela.silence import SHOWN_AFTER, silence_libraries
from revela.types import QueryTokens, Vectors, check_vectors_finite, sequence_of


class RetrieverEncoder:
    """The ``TokenEncoder`` of a Sentence-Transformers model: prompts by role, finite unit vectors.

    Threads may share it: their batches take turns.

    Args:
        model, bf16, max_tokens: as for ``RetrieverModule``.
        name: of the model, for messages.
        context_encoder: makes contexts for a model with slots.

    Attributes:
        retriever: runs the model.
        slots: documents that the model reads as its context; 0: none.
        words_to_vectors: see ``words_to_vectors_of``.
    """

    words_to_vectors = 1.0

    def __init__(
        self,
        model: SentenceTransformer,
        bf16: bool,
        max_tokens: int | None = None,
        name: str = "the model",
        context_encoder: ContextEncoder | None = None,
    ) -> None:
        self.model, self.retriever = model, RetrieverModule(model, bf16, max_tokens)
        self.name, self.context_encoder = name, context_encoder
        self.slots = len(self.retriever.slots)
        self._rows: Callable[[], Tensor] | None = None
        self._lock = threading.Lock()  # a batch changes the model while it lasts

    @classmethod
    def load(
        cls,
        folder: Path,
        precision: Precision,
        max_tokens: int | None = None,
        prompts: Given = OWN,
    ) -> RetrieverEncoder:
        """Open a saved retriever, or any Sentence-Transformers folder (``load_encoder``)."""
        silence_libraries()
        model = load_retriever(folder, prompts=prompts)
        bf16 = uses_bf16(precision, model.device)
        encoder = cls(model, bf16, max_tokens, str(folder), load_context_encoder(folder))
        encoder.words_to_vectors = words_to_vectors_of(folder)
        if max_tokens is not None:
            models = [p.model for p in model.modules() if isinstance(p, modules.Transformer)]
            found = (positions_of(m) or max_positions(m.config.to_dict()) for m in models)
            most = min(
                filter(None, found), default=None if models else encoder.retriever.own_limit()
            )
            check_max_tokens(max_tokens, most and most - encoder.slots, encoder.name)
        return encoder

    @property
    def precision(self) -> str:
        """ "bf16" or "fp32"."""
        return "bf16" if self.retriever.bf16 else "fp32"

    def with_context(self, rows: Callable[[], Tensor]) -> RetrieverEncoder:
        """The same encoder with another context in its slots: ``rows`` gives it (J, D) whenever
        texts are encoded. Both encoders may be used by turns.
        """
        other = copy.copy(self)  # shares the model and its lock
        other._rows = rows
        return other

    def encode_queries(self, texts: Sequence[str], progress: bool = False) -> Vectors:
        """(N, D) float32. Raises RevelaError for infinity and NaN."""
        return self._encode(texts, "query", progress)

    def encode_passages(self, texts: Sequence[str], progress: bool = False) -> Vectors:
        """``encode_queries``, but as passages."""
        return self._encode(texts, "document", progress)

    def encode_with_tokens(
        self, texts: Sequence[str], progress: bool = False
    ) -> tuple[Vectors, list[Vectors]]:
        """``encode_passages``, and each passage's unit token vectors, (T, W) float32.

        Token vectors are states of the transformer's last layer, without prompts and special
        tokens, after the linear layer that follows the pooling if there is one.
        """
        texts = sequence_of(texts)
        tokens: list[Vectors] = [np.empty(0, np.float32)] * len(texts)
        return self._encode(texts, "document", progress, tokens), tokens

    def query_tokens(self, queries: Sequence[str]) -> list[QueryTokens]:
        """``encode_queries``, and the queries' token vectors as above, from the same pass."""
        queries = sequence_of(queries)
        tokens: list[Vectors] = [np.empty(0, np.float32)] * len(queries)
        vectors_ND = self._encode(queries, "query", False, tokens)
        tokenizer, prompt = self.retriever.tokenizer, self.retriever.prompt("query")
        with self._lock:  # each call changes the tokenizer's truncation
            read = tokenizer([prompt + query for query in queries], return_offsets_mapping=True)
            special, begin = set(tokenizer.all_special_ids), self._prompt_length("query")
        encoded = []
        for i, (vector_D, tokens_TW) in enumerate(zip(vectors_ND, tokens, strict=True)):
            places = zip(read["input_ids"][i], read["offset_mapping"][i], strict=True)
            spans = [
                (max(0, start - len(prompt)), end - len(prompt))
                for token, (start, end) in places
                if token not in special
            ]
            encoded.append(QueryTokens(vector_D, tokens_TW, spans[begin:][: len(tokens_TW)]))
        return encoded

    def fitted(self, heads: Sequence[str], texts: Sequence[str], part: int = 1) -> list[list[str]]:
        """``LimitedEncoder.fitted``."""
        return self.counter.fitted(heads, texts, self.retriever.limit(), part)

    @functools.cached_property
    def counter(self) -> TokenCounter:
        """Counts tokens as the model reads passages, without ``max_tokens``."""
        retriever = self.retriever
        tokenizer = getattr(retriever.tokenizer, "backend_tokenizer", retriever.tokenizer)
        prompts = retriever.prompt("query"), retriever.prompt("document")
        return TokenCounter(tokenizer, *prompts, retriever.own_limit(), as_text=retriever.as_text)

    @torch.inference_mode()
    def _encode(
        self, texts: Sequence[str], role: Role, progress: bool, tokens: list[Vectors] | None = None
    ) -> Vectors:
        """The texts' vectors (N, D); writes token vectors into ``tokens``."""
        retriever, texts = self.retriever, sequence_of(texts)
        if tokens is not None:
            self._check_tokens()
        vectors_ND = np.empty((len(texts), retriever.dimension), dtype=np.float32)
        how: dict[str, Any] = dict(total=len(texts), unit="text", disable=not progress)
        context = self._rows and (self._rows(),) * 2
        batches = retriever.batches(texts, role)
        with tqdm(**how, delay=SHOWN_AFTER, leave=False) as bar:
            while True:
                with self._lock, retriever.evaluating():
                    retriever.width, retriever.context = None, context  # not a training batch's
                    if not (batch := next(batches, None)):
                        break
                    indices, features = batch[0], retriever.states(batch[1], role)
                    if tokens is not None:
                        for i, vectors in zip(indices, self._tokens(features, role), strict=True):
                            tokens[i] = vectors
                    vectors_ND[indices] = retriever.unit(retriever.pool(features, role)).cpu()
                bar.update(len(indices))
        check_vectors_finite(vectors_ND, self.name)
        return vectors_ND

    def _check_tokens(self) -> None:
        """Refuse token vectors if there are none, or those of queries are of another model."""
        if has_routes(self.model):
            raise QueryError(
                "this model reads queries and passages by different modules, whose token vectors "
                "cannot be compared: search without --rerank and --keep-tokens"
            )
        if not isinstance(self.model[0], modules.Transformer):
            check_tokens()

    def _tokens(self, features: Features, role: Role) -> list[Vectors]:
        """The token vectors of a batch with states; see ``encode_with_tokens``."""
        ids_BT, states_BTW = on_cpu(features["input_ids"]), features["token_embeddings"]
        special = torch.tensor(self.retriever.tokenizer.all_special_ids)
        kept_BT = on_cpu(features["attention_mask"]).bool() & ~torch.isin(ids_BT, special)
        kept_BT &= kept_BT.cumsum(dim=1) > self._prompt_length(role)
        places = sent(kept_BT.flatten().nonzero().squeeze(1), states_BTW.device)
        unit = self.retriever.unit_states(states_BTW.flatten(0, 1)[places]).cpu()
        return [rows_TW.numpy() for rows_TW in torch.split(unit, kept_BT.sum(dim=1).tolist())]

    def _prompt_length(self, role: Role) -> int:
        """The tokens of a role's prompt; the space at its end belongs to the text."""
        prompt, tokenizer = self.retriever.prompt(role).rstrip(), self.retriever.tokenizer
        return len(tokenizer(prompt, add_special_tokens=False)["input_ids"]) if prompt else 0
