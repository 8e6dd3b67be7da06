"""The live model of a run as an encoder, which checks, evaluations and probes take.

Shapes: J slots, D width of the embedding table.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

from revela.encoders.base import Encoded, Features, TextEncoder
from revela.encoders.torch_model import tokens_per_batch
from revela.training.retriever.context import ContextEncoder
from revela.training.retriever.module import RetrieverModule
from revela.types import Role


class RetrieverEncoder(TextEncoder):
    """Runs a ``RetrieverModule``, as it is at that moment, without token vectors. Threads take
    turns.

    Args:
        model, bf16: as for ``RetrieverModule``.
        name: of the model, for messages.
        context_encoder: makes contexts for a model with slots.

    Attributes:
        retriever: runs the model.
    """

    lacks_tokens = "a model in training gives no token vectors: save it first"

    def __init__(
        self,
        model: SentenceTransformer,
        bf16: bool,
        name: str = "the model",
        context_encoder: ContextEncoder | None = None,
    ) -> None:
        self.model, self.retriever, self.name = model, RetrieverModule(model, bf16), name
        self.precision, self.context_encoder = "bf16" if bf16 else "fp32", context_encoder
        self.prompts, self.limit = self.retriever.prompts, self.retriever.limit
        self.slots, self.batch_tokens = len(self.retriever.slots), tokens_per_batch(model.device)
        self._rows: Callable[[], Tensor] | None = None
        self._lock = threading.Lock()  # a batch changes the model while it lasts

    @property
    def tokenizer(self) -> Any:
        tokenizer = self.retriever.tokenizer
        return getattr(tokenizer, "backend_tokenizer", tokenizer)

    def with_context(self, rows: Callable[[], Tensor]) -> RetrieverEncoder:
        """The same encoder with another context in its slots: ``rows`` gives it (J, D) whenever
        texts are encoded. Both encoders may be used by turns.
        """
        other = copy.copy(self)  # shares the model and its lock
        other._rows = rows
        return other

    def tokenize(self, texts: Sequence[str], role: Role) -> Features:
        context = self._rows and (self._rows(),) * 2  # of many batches
        with self._lock:  # tokenizers are not thread-safe
            return {**self.retriever.tokenize(texts, role), "context": context}

    def encode_batch(self, features: Features, role: Role, with_tokens: bool) -> Encoded:
        """Run the model as it is now, without dropout."""
        retriever, read = self.retriever, dict(features)
        context = read.pop("context")
        with self._lock, torch.inference_mode(), retriever.evaluating():
            retriever.width, retriever.context = None, context  # not a training batch's
            return Encoded(retriever(read, role).cpu().numpy())
