"""A retriever: text -> tokens by role -> hidden states -> pooled -> cut to width -> unit vectors.

``RetrieverModule`` runs a Sentence-Transformers model wherever torch does: in training, checks,
fit, encoding, probes and export. That model is what is saved (save.py).

Shapes: N texts, B texts of a batch, T tokens, J slots, D numbers of a text's vector, W of a
token's, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from torch import Tensor, nn

from revela.device import autocast, sent
from revela.errors import RevelaError, first_line
from revela.packing import packed
from revela.retriever.static_trainable import TrainableTable

SLOT = "<|context-{}|>"
STEM = SLOT.partition("{}")[0]
READ_AHEAD = 4096  # texts that are tokenized, and sorted by length, at once
# With fewer tokens a GPU would wait for launches of kernels; more would not fit where attention
# computes explicit scores.
TOKENS_PER_BATCH, TOKENS_ON_A_GPU = 8192, 32768

Features = dict[str, Any]
Role = Literal["query", "document"]
"""The roles of a text, as sentence-transformers calls them."""


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

    def parts(self, role: Role = "document") -> list[nn.Module]:
        """The modules that read texts of this role, in order.

        Raises:
            RevelaError: the role has no route.
        """
        try:
            return list(_without_routes(self.model, role))
        except ValueError as error:
            raise RevelaError(
                f"this model has no route for a {role} ({first_line(error)}): give another model"
            ) from error

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

    def prompt(self, role: Role) -> str:
        """The prefix of texts of this role."""
        return prompt_of(self.model, role)

    def own_limit(self, role: Role = "document") -> int | None:
        """Maximum tokens per text, prompt and special tokens included; None: no limit."""
        first = self.parts(role)[0]
        if isinstance(first, TrainableTable):
            return None
        if isinstance(first, modules.StaticEmbedding):
            return (first.tokenizer.truncation or {}).get("max_length")
        return getattr(first, "max_seq_length", None)

    def limit(self, role: Role = "document") -> int | None:
        """``max_tokens`` and the slots; or ``own_limit``."""
        if self.max_tokens is None:
            return self.own_limit(role)
        return self.max_tokens + len(self.slots)

    def lower_limit(self, tokens: int) -> None:
        """Set ``max_tokens`` to a number of tokens, at most the model's own limit."""
        own = self.own_limit()
        self.max_tokens = min(tokens, own - len(self.slots)) if own else tokens

    def tokenize(self, texts: Sequence[str], role: Role) -> Features:
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
        return read_as_text(texts) if self.slots else texts

    def batches(self, texts: Sequence[str], role: Role) -> Iterator[tuple[list[int], Features]]:
        """(indices of texts, their features) of texts of like length, longest first."""
        max_tokens = TOKENS_PER_BATCH if self.device.type == "cpu" else TOKENS_ON_A_GPU
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

    def states(self, features: Features, role: Role = "document") -> Features:
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

    def pool(self, features: Features, role: Role = "document") -> Tensor:
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

    def forward(self, features: Features, role: Role = "document") -> Tensor:
        """(B, D) unit vectors of tokenized texts."""
        return self.unit(self.pool(self.states(features, role), role))

    def unit_states(self, states: Tensor) -> Tensor:
        """A transformer's states (..., W) as late interaction compares them, in fp32: of length
        one, after the linear layer that follows the pooling where the model has one.
        """
        after = itertools.dropwhile(lambda p: not isinstance(p, modules.Pooling), self.parts())
        linear = next((p.linear for p in after if isinstance(p, modules.Dense)), None)
        if linear is not None and linear.in_features == states.shape[-1]:
            states = linear(states)
        return F.normalize(states.float(), dim=-1)

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


def prompt_of(model: SentenceTransformer, role: Role) -> str:
    """A model's prompt for a role; "" if it has none. Passages have either of two names."""
    prompts = model.prompts
    return prompts.get(role) or (role == "document" and prompts.get("passage")) or ""


def has_routes(model: SentenceTransformer) -> bool:
    """Whether a model reads queries and passages by modules of their own (``Router``)."""
    return any(isinstance(part, modules.Router) for part in model)


def _without_routes(parts: Iterable[nn.Module], role: Role) -> Iterator[nn.Module]:
    for part in parts:
        if isinstance(part, modules.Router):
            route = part._resolve_route(task=role, modality="text")  # nothing public says it
            yield from _without_routes(part.sub_modules[route], role)
        else:
            yield part


def slot_ids(model: Any) -> range:
    """The token ids of a model's slots, in order."""
    added: dict[str, int] = getattr(model.tokenizer, "get_added_vocab", dict)()
    count = next(j for j in itertools.count() if SLOT.format(j) not in added)
    first = added[SLOT.format(0)] if count else 0
    return range(first, first + count)


def read_as_text(texts: Sequence[str]) -> list[str]:
    """The texts, with the names of slots in them broken up."""
    return [text.replace(STEM, STEM[:2] + " " + STEM[2:]) for text in texts]
