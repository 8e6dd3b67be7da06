"""Encode by sentence-transformers, for models that are neither a graph nor a table of words."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer

from revela.encoders import torch_model
from revela.encoders.base import Encoded, Features, TextEncoder, no_transformer
from revela.encoders.prompts import OWN, GivenPrompts, Prompts
from revela.types import Precision, Role


class TorchEncoder(TextEncoder):
    """Runs a Sentence-Transformers model; threads take turns.

    Args:
        bf16: run the transformer in bf16; the modules after it run in fp32.
        max_tokens: truncate texts here instead of at the model's own limit; slots do not count.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        bf16: bool = False,
        max_tokens: int | None = None,
        name: str = "the model",
        by_dot: bool = False,
    ) -> None:
        transformer = torch_model.transformer_of(model)
        self.bf16 = bf16 and transformer is not None
        self.model, self.precision, self.name = model.eval(), "bf16" if self.bf16 else "fp32", name
        self.prompts, self.slots = Prompts.named(model.prompts), len(torch_model.slot_ids(model))
        if max_tokens is not None:
            torch_model.truncate_at(model, max_tokens, name)
        if transformer is None:
            self.lacks_tokens = no_transformer(name)
        else:
            # With padding before a text, its learned positions would depend on the other texts.
            transformer.tokenizer.padding_side = "right"
        self.by_dot, self.limit = by_dot, torch_model.own_limit(model)
        self.batch_tokens = torch_model.tokens_per_batch(model.device)
        self._lock = threading.Lock()  # tokenizers are not thread-safe

    @classmethod
    def load(
        cls,
        folder: Path,
        precision: Precision,
        max_tokens: int | None = None,
        prompts: GivenPrompts = OWN,
        by_dot: bool = False,
    ) -> TorchEncoder:
        """Open a Sentence-Transformers folder, on a GPU if there is one."""
        model = torch_model.open_model(folder, prompts=prompts)
        bf16 = torch_model.uses_bf16(precision, model.device)
        return cls(model, bf16, max_tokens, str(folder), by_dot)

    @functools.cached_property
    def tokenizer(self) -> Any:
        """A copy, as sentence-transformers changes the model's own at every call."""
        tokenizer: Any = self.model[0].tokenizer
        with self._lock:
            tokenizer = copy.deepcopy(getattr(tokenizer, "backend_tokenizer", tokenizer))
        tokenizer.no_padding()
        return tokenizer

    def tokenize(self, texts: Sequence[str], role: Role) -> Features:
        """The features that sentence-transformers makes of texts."""
        task, prompt = torch_model.TASKS[role], self.prompt(role) or None
        with self._lock:
            return dict(self.model.preprocess(texts, prompt=prompt, task=task))

    def encode_batch(self, features: Features, role: Role, with_tokens: bool) -> Encoded:
        """Run the model, one batch at a time."""
        device = self.model.device
        with self._lock, torch.inference_mode():
            read = {k: v.to(device) if hasattr(v, "to") else v for k, v in features.items()}
            found = torch_model.text_vectors(self.model, read, with_tokens, self.bf16, self.by_dot)
            return Encoded(*(tensor.cpu().numpy() for tensor in found))
