"""The live model of a run as an encoder, which checks, evaluations and probes take.

Shapes: J slots, D width of the embedding table.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

from revela.encoders.base import Encoded, Role, TextEncoder
from revela.encoders.prompts import Prompts
from revela.encoders.torch_model import TorchRole
from revela.errors import QueryError
from revela.training.retriever.context import ContextEncoder
from revela.training.retriever.module import RetrieverModule


class RetrieverEncoder(TextEncoder):
    """Runs a ``RetrieverModule``, as it is at that moment. Threads take turns.

    Args:
        model, bf16: as for ``RetrieverModule``.
        name: of the model, for messages.
        context_encoder: makes contexts for a model with slots.

    Attributes:
        retriever: runs the model.
        slots: documents that the model reads as its context; 0: none.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        bf16: bool,
        name: str = "the model",
        context_encoder: ContextEncoder | None = None,
    ) -> None:
        self.model, self.retriever, self.name = model, RetrieverModule(model, bf16), name
        self.precision, self.context_encoder = "bf16" if bf16 else "fp32", context_encoder
        prompts = self.retriever.prompt("query"), self.retriever.prompt("document")
        self.prompts, self.limit = Prompts(*prompts), self.retriever.own_limit()
        self.slots = len(self.retriever.slots)
        self._rows: Callable[[], Tensor] | None = None
        self._lock = threading.Lock()  # a batch changes the model while it lasts

    @property
    def tokenizer(self) -> Any:
        tokenizer = self.retriever.tokenizer
        return getattr(tokenizer, "backend_tokenizer", tokenizer)

    @property
    def dimension(self) -> int:
        """D; a fit changes it."""
        return self.retriever.dimension

    def with_context(self, rows: Callable[[], Tensor]) -> RetrieverEncoder:
        """The same encoder with another context in its slots: ``rows`` gives it (J, D) whenever
        texts are encoded. Both encoders may be used by turns.
        """
        other = copy.copy(self)  # shares the model and its lock
        other._rows = rows
        return other

    def as_text(self, texts: Sequence[str]) -> Sequence[str]:
        return self.retriever.as_text(texts)

    def batches(self, texts: Sequence[str], role: Role, with_tokens: bool) -> Iterator[Encoded]:
        """Encode texts of similar length together, longest first."""
        if with_tokens:
            raise QueryError("a model in training gives no token vectors: save it first")
        retriever = self.retriever
        as_read: TorchRole = "query" if role == "query" else "document"
        context = self._rows and (self._rows(),) * 2
        batches = retriever.batches(texts, as_read)
        while True:
            with self._lock, torch.inference_mode(), retriever.evaluating():
                retriever.width, retriever.context = None, context  # not a training batch's
                if not (batch := next(batches, None)):
                    return
                rows, features = batch[0], retriever.states(batch[1], as_read)
                vectors_BD = retriever.unit(retriever.pool(features, as_read)).cpu().numpy()
            yield Encoded(rows, vectors_BD)
