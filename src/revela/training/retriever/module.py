"""A retriever: text -> tokens by role -> hidden states -> pooled -> cut to width -> unit vectors.

``RetrieverModule`` runs a Sentence-Transformers model wherever torch does: in training, checks,
fit, encoding, probes and export. That model is what is saved (save.py).

Shapes: N texts, B texts of a batch, T tokens, J slots, D numbers of a text's vector, W of a
token's, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from torch import Tensor, nn

from revela.encoders.torch_model import (
    TorchRole,
    own_limit,
    parts_of,
    prompt_of,
    read_as_text,
    slot_ids,
    tokens_per_batch,
)
from revela.training.device import autocast, sent
from revela.training.packing import packed
from revela.training.retriever.static_trainable import TrainableTable

READ_AHEAD = 4096  # texts that are tokenized, and sorted by length, at once

Features = dict[str, Any]


class RetrieverModule(nn.Module):
    """A Sentence-Transformers model: ``tokenize`` gives the features of texts, and ``forward``
    their unit vectors, by ``states``, ``pool`` and ``unit``.

    The model's own modules may be replaced at any time (by a fit). A model with a ``Router`` reads
    each role by modules of its own; tokens are then counted as documents are read.

    Args:
        model: stays as it is, except while ``evaluating``.
        bf16: run the transformer, if there is one, under bf16 autocast. The modules after it stay
            in fp32: they cost little, and bf16 would lose much.
        max_tokens: truncate texts here instead of at the model's own limit; slots do not count.

    Attributes:
        width: numbers that are kept of each vector; None: the model's ``truncate_dim``, or all.
        context: (rows, null rows) of the slots, (J, D) each, which may need a gradient. In training
            a slot has its null row with probability ``slot_dropout``, drawn by text and slot. None:
            the rows in the model's table.
        packs: compute no padding where the transformer allows it.
    """

    def __init__(
        self, model: SentenceTransformer, bf16: bool = False, max_tokens: int | None = None
    ) -> None:
        super().__init__()
        self.model, self.max_tokens, self.training = model, max_tokens, model.training
        first = [self.parts(role)[0] for role in ("query", "document")]
        self.bf16 = bf16 and any(isinstance(part, modules.Transformer) for part in first)
        self.slots = slot_ids(self)
        self.width: int | None = None
        self.context: tuple[Tensor, Tensor] | None = None
        self.slot_dropout, self.packs = 0.0, True

    def parts(self, role: TorchRole = "document") -> list[nn.Module]:
        """The modules that read texts of this role, in order.

        Raises:
            RevelaError: the role has no route.
        """
        return parts_of(self.model, role)

    @property
    def tokenizer(self) -> Any:
        """A tokenizer of transformers or, for a table of tokens, of the tokenizers library."""
        return getattr(self.parts()[0], "tokenizer", None)

    @property
    def device(self) -> torch.device:
        """Of the weights."""
        return torch.device(self.model.device)

    @property
    def dimension(self) -> int:
        """D, of whole vectors."""
        return int(self.model.get_embedding_dimension() or 0)

    def prompt(self, role: TorchRole) -> str:
        """The prefix of texts of this role."""
        return prompt_of(self.model, role)

    def own_limit(self, role: TorchRole = "document") -> int | None:
        """Maximum tokens per text, prompt and special tokens included; None: no limit."""
        is_table = isinstance(self.parts(role)[0], TrainableTable)
        return None if is_table else own_limit(self.model, role)

    def limit(self, role: TorchRole = "document") -> int | None:
        """``max_tokens`` and the slots; or ``own_limit``."""
        if self.max_tokens is None:
            return self.own_limit(role)
        return self.max_tokens + len(self.slots)

    def lower_limit(self, tokens: int) -> None:
        """Set ``max_tokens`` to a number of tokens, at most the model's own limit."""
        own = self.own_limit()
        self.max_tokens = min(tokens, own - len(self.slots)) if own else tokens

    def tokenize(self, texts: Sequence[str], role: TorchRole) -> Features:
        """The features of texts with the prompt of their role, padded."""
        # An empty text has no token to pool.
        read = [text if text.strip() else "." for text in self.as_text(texts)]
        how: dict[str, Any] = {"task": role, "prompt": self.prompt(role) or None}
        limit = self.max_tokens and self.limit(role)
        if limit and isinstance(self.parts(role)[0], modules.Transformer):
            how["processing_kwargs"] = {"text": {"max_length": limit}}
        features = dict(self.model.preprocess(read, **how))
        if limit and "offsets" in features:  # of a table of tokens: one text after another
            ids = features["input_ids"].tensor_split(features["offsets"][1:])
            rows = [row[:limit] for row in ids]
            features["input_ids"] = torch.cat(rows)
            features["offsets"] = torch.tensor([0, *map(len, rows[:-1])]).cumsum(0)
        return features

    def as_text(self, texts: Sequence[str]) -> Sequence[str]:
        """The texts; for a model with slots, names of slots in them are broken up."""
        return read_as_text(self.model, texts)

    def batches(
        self, texts: Sequence[str], role: TorchRole
    ) -> Iterator[tuple[list[int], Features]]:
        """(indices of texts, their features) of texts of like length, longest first."""
        max_tokens = tokens_per_batch(self.device)
        by_length = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        for start in range(0, len(by_length), READ_AHEAD):
            window = by_length[start : start + READ_AHEAD]
            features = self.tokenize([texts[i] for i in window], role)
            mask_NL = features.get("attention_mask")
            if mask_NL is None:
                yield window, features
                continue
            tokens = mask_NL.sum(dim=1)
            order = tokens.argsort(descending=True, stable=True).tolist()
            padded_right = bool(mask_NL[:, 0].all())
            while order:
                longest = max(1, int(tokens[order[0]]))
                size = max(1, max_tokens // longest)
                rows, order = order[:size], order[size:]
                columns = slice(0, longest) if padded_right else slice(-longest, None)
                batch = {
                    name: value[rows][:, columns]
                    if isinstance(value, Tensor) and value.shape == mask_NL.shape
                    else value
                    for name, value in features.items()
                }
                yield [window[i] for i in rows], batch

    def states(self, features: Features, role: TorchRole = "document") -> Features:
        """The features, and the states of the transformer's last layer (``token_embeddings``, B, T,
        W) in fp32; on the model's device.
        """
        first, device = self.parts(role)[0], self.device
        read = {
            name: sent(value, device)
            if isinstance(value, Tensor) and value.device != device
            else value
            for name, value in features.items()
        }
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
        if not self.bf16:
            return dict(read)
        half = torch.bfloat16
        return {k: v.float() if getattr(v, "dtype", None) == half else v for k, v in read.items()}

    def pool(self, features: Features, role: TorchRole = "document") -> Tensor:
        """(B, D) vectors of any norm, of features with states."""
        features = dict(features)  # modules write into it
        for part in self.parts(role)[1:]:
            features = part(features)
        vectors_BD: Tensor = features["sentence_embedding"]
        return vectors_BD

    def unit(self, vectors: Tensor) -> Tensor:
        """(..., D) cut to ``width``, and of length one; in fp32 or better."""
        vectors = vectors[..., : self.width or self.model.truncate_dim]
        return F.normalize(vectors.to(torch.promote_types(vectors.dtype, torch.float32)), dim=-1)

    def forward(self, features: Features, role: TorchRole = "document") -> Tensor:
        """(B, D) unit vectors of tokenized texts."""
        return self.unit(self.pool(self.states(features, role), role))

    @contextmanager
    def evaluating(self, adapters: bool = True) -> Iterator[None]:
        """While open, there is no dropout; and without ``adapters`` (LoRA, the trained half of a
        table) vectors have the cosines that they had before training.
        """
        training, trained = self.training, list[Any]()
        if not adapters:
            from peft.tuners.tuners_utils import BaseTunerLayer

            kinds = BaseTunerLayer, TrainableTable
            trained = [part for part in self.modules() if isinstance(part, kinds)]
        self.eval()
        for part in trained:
            part.enable_adapters(False)
        try:
            yield
        finally:
            for part in trained:
                part.enable_adapters(True)
            self.train(training)

    def _fill_slots(self, table: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> Tensor:
        """What the embedding table gives, with the context in the slots."""
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


def split_in_half(
    texts: Sequence[str],
    tokenizer: Any,
    max_tokens: int,
    draws: Sequence[random.Random] | None = None,
) -> list[str]:
    """The first half of each text's tokens, after truncation to ``max_tokens``; with ``draws``, a
    random span of that length.
    """
    read = tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True)
    found = []
    for i, (text, spans) in enumerate(zip(texts, read["offset_mapping"], strict=True)):
        tokens = min(len(spans), max_tokens)
        length = tokens // 2
        start = draws[i].randint(0, tokens - length) if draws and length else 0
        begin = spans[start][0] if draws and length else 0
        found.append(text[begin : spans[start + length - 1][1]] if length else text)
    return found
