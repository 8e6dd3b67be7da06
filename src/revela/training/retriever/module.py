"""A retriever: text -> tokens by role -> hidden states -> pooled -> truncated -> unit vectors, or
vectors as they are if they are compared by dot products.

``RetrieverModule`` runs a Sentence-Transformers model in training and in the fit. That model is
what is saved (save.py). ``RetrieverEncoder`` is the same as an encoder, which checks, evaluations
and probes take.

Shapes: N texts, B texts of a batch, T tokens, J slots, D numbers of a text's vector, W of a
token's, V vocabulary.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from torch import Tensor, nn

from revela.encoders.base import Encoded, Features, TextEncoder, without_slots
from revela.encoders.prompts import Prompts
from revela.encoders.torch_model import (
    TASKS,
    compares_by_dot,
    own_limit,
    slot_ids,
    tokens_per_batch,
)
from revela.training.device import autocast, sent
from revela.training.packing import packed
from revela.types import Role


class RetrieverModule(nn.Module):
    """A Sentence-Transformers model: ``tokenize`` gives the features of texts, and ``forward``
    their vectors, by ``states`` and ``pool``.

    The model's own modules may be replaced at any time (by a fit), its prompts and slots may not.

    Args:
        model: stays as it is, except while ``evaluating``.
        bf16: run the transformer, if there is one, under bf16 autocast. The modules after it stay
            in fp32: they cost little, and bf16 would lose much.

    Attributes:
        prompts: prefixes of queries and of passages.
        slots: token ids of the slots, in order.
        max_tokens: texts are truncated here instead of at the model's own limit; slots do not
            count.
        context: (rows, null rows) of the slots, (J, D) each, which may need a gradient. In training
            a slot has its null row with probability ``slot_dropout``, drawn by text and slot. None:
            the rows in the model's table.
        packs: compute no padding where the transformer allows it.
    """

    def __init__(self, model: SentenceTransformer, bf16: bool = False) -> None:
        super().__init__()
        self.model, self.training = model, model.training
        self.bf16 = bf16 and isinstance(model[0], modules.Transformer)
        self.prompts, self.slots = Prompts.named(model.prompts), slot_ids(self)
        self.max_tokens: int | None = None
        self.context: tuple[Tensor, Tensor] | None = None
        self.slot_dropout, self.packs = 0.0, True

    @property
    def tokenizer(self) -> Any:
        """A tokenizer of transformers or, for a table of tokens, of the tokenizers library."""
        return getattr(self.model[0], "tokenizer", None)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return torch.device(self.model.device)

    @property
    def limit(self) -> int | None:
        """Maximum tokens per text, prompt, slots and special tokens included; None: no limit."""
        if self.max_tokens is not None:
            return self.max_tokens + len(self.slots)
        return own_limit(self.model)

    def lower_limit(self, tokens: int) -> None:
        """Set ``max_tokens`` to a number of tokens, at most the model's own limit."""
        self.max_tokens = None
        self.max_tokens = min(tokens, self.limit - len(self.slots)) if self.limit else tokens

    def tokenize(self, texts: Sequence[str], role: Role) -> Features:
        """The features of texts with the prompt of their role, padded."""
        texts = without_slots(texts) if self.slots else texts
        read = [text if text.strip() else "." for text in texts]  # else it has no token to pool
        limit = {"text": {"max_length": self.limit} if self.max_tokens else {}}
        task, prompt = TASKS[role], getattr(self.prompts, role) or None
        return dict(self.model.preprocess(read, prompt=prompt, task=task, processing_kwargs=limit))

    def states(self, features: Features) -> Features:
        """The features, and the states of the transformer's last layer (``token_embeddings``, B, T,
        W) in fp32; on the model's device.
        """
        first, device = self.model[0], self.device
        read = {k: sent(v, device) if isinstance(v, Tensor) else v for k, v in features.items()}
        if not isinstance(first, modules.Transformer):
            return dict(first(read))
        with ExitStack() as stack:
            if self.packs:  # before all else, as a first try draws no random numbers
                stack.enter_context(packed(first.model))
            if self.context is not None:
                table = first.model.get_input_embeddings()
                stack.enter_context(table.register_forward_hook(self._fill_slots))
            if self.bf16:
                stack.enter_context(autocast(device, True))
            read = first(read)
        half = torch.bfloat16
        return {k: v.float() if getattr(v, "dtype", None) == half else v for k, v in read.items()}

    def pool(self, features: Features) -> Tensor:
        """(B, D) vectors of any norm, of features with states."""
        features = dict(features)  # modules write into it
        for part in list(self.model)[1:]:
            features = part(features)
        vectors_BD: Tensor = features["sentence_embedding"]
        return vectors_BD

    def forward(self, features: Features) -> Tensor:
        """(B, D) vectors of tokenized texts, cut to ``truncate_dim``, in fp32 or better; of length
        one, unless the model ``compares_by_dot``.
        """
        vectors_BD = self.pool(self.states(features))[:, : self.model.truncate_dim]
        vectors_BD = vectors_BD.to(torch.promote_types(vectors_BD.dtype, torch.float32))
        return vectors_BD if compares_by_dot(self.model) else F.normalize(vectors_BD, dim=-1)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """While open, dropout is off."""
        training = self.training
        self.eval()
        try:
            yield
        finally:
            self.train(training)

    def _fill_slots(self, table: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> Tensor:
        """The output of the embedding table, with the context in the slots."""
        assert self.context is not None
        rows_JD, null_JD = self.context
        slot = inputs[0] - self.slots.start
        is_slot = (slot >= 0) & (slot < len(self.slots))
        slot = slot.clamp(0, len(self.slots) - 1)
        rows = rows_JD[slot]
        if self.training and self.slot_dropout:
            is_null = torch.rand(slot.shape, device=slot.device) < self.slot_dropout
            rows = torch.where(is_null[..., None], null_JD[slot], rows)
        rows = (rows * getattr(table, "embed_scale", 1.0)).to(out.dtype)
        return torch.where(is_slot[..., None], rows, out)


class RetrieverEncoder(TextEncoder):
    """Runs a ``RetrieverModule`` in its current state, without token vectors. Threads take turns.

    Args:
        model, bf16: as for ``RetrieverModule``.
        read_context: of a model with slots, makes their rows (J, D) from texts.

    Attributes:
        retriever: runs the model.
    """

    lacks_tokens = "a model in training gives no token vectors: save it first"

    def __init__(
        self,
        model: SentenceTransformer,
        bf16: bool,
        read_context: Callable[[Sequence[str]], Tensor] | None = None,
    ) -> None:
        self.model, self.retriever = model, RetrieverModule(model, bf16)
        self.precision, self.read_context = "bf16" if bf16 else "fp32", read_context
        self.by_dot = compares_by_dot(model)
        self.prompts, self.limit = self.retriever.prompts, self.retriever.limit
        self.slots, self.batch_tokens = len(self.retriever.slots), tokens_per_batch(model.device)
        self._rows: Callable[[], Tensor] | None = None
        self._lock = threading.Lock()  # a batch changes the model while it lasts

    @property
    def tokenizer(self) -> Any:
        tokenizer = self.retriever.tokenizer
        return getattr(tokenizer, "backend_tokenizer", tokenizer)

    def in_context(self, texts: Sequence[str]) -> RetrieverEncoder:
        """The same encoder with these texts as its context, which it reads whenever it encodes.
        Both encoders can be used in turn.
        """
        assert self.read_context is not None
        other = copy.copy(self)  # shares the model and its lock
        other._rows = partial(self.read_context, texts)
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
            retriever.context = context  # not a training batch's
            return Encoded(retriever(read).cpu().numpy())
