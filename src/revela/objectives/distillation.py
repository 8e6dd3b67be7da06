"""Ranking distillation: the loss of the objectives ``gains`` and ``attention``.

    t_i = z( z(teacher_i) + z(cos_0(q_i, .)) )
    L   = mean_i KL( softmax(2 t_i) || softmax(cos(q_i, .) / tau) )

- teacher_i: an LM's scores of the candidates of query i.
- cos_0: the retriever's cosines before training. An LM ranks best together with a fitted retriever.
- z: standard scores over the candidates of a query.

Shapes: Q queries, B candidates of each; N texts, D width of a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from hashlib import blake2b

import torch
import torch.nn.functional as F
from torch import Tensor

from revela.device import on_cpu
from revela.objectives.base import BuildContext, RetrieverLoss, Side

TARGET_SCALE = 2.0  # factor of the target before its softmax
MAX_CACHED = 2**26  # fp32 numbers in the cached vectors: 256 MiB

Compare = Callable[[Tensor, Tensor], list[Tensor]]
"""Unit vectors of queries and passages -> (Q, B) cosines per group."""


class InitialRetriever:
    """The retriever before training, without dropout.

    Args:
        as_before: a context in which the objective's model is as it was.
        cache: compute the vector of each text once. Its vector must depend on the text alone.
    """

    def __init__(
        self, as_before: Callable[[], AbstractContextManager[None]], cache: bool = False
    ) -> None:
        self.as_before, self.cache = as_before, cache
        self.cached: dict[bytes, Tensor] = {}

    @classmethod
    def of(cls, parts: BuildContext) -> InitialRetriever:
        """The retriever without LoRA, or a table with its initial rows."""
        from revela.retriever.lora import without_adapters

        cache = parts.context_encoder is None and not parts.recipe.retriever.matryoshka
        return cls(partial(without_adapters, parts.model), cache)

    @torch.no_grad()
    def unit(self, objective: RetrieverLoss, side: Side) -> Tensor:
        """(N, D) unit vectors of tokenized texts."""
        rows = zip(on_cpu(side["input_ids"]), on_cpu(side["attention_mask"]).bool(), strict=True)
        keys = [blake2b(ids[mask].numpy(), digest_size=16).digest() for ids, mask in rows]
        if self.cached.keys() >= set(keys):
            return torch.stack([self.cached[key] for key in keys])
        model = objective.model
        was_training = model.training
        model.eval()
        with self.as_before():
            unit_ND = objective.unit(side)
        model.train(was_training)
        if self.cache and len(self.cached) * unit_ND.shape[1] < MAX_CACHED:
            self.cached.update(zip(keys, unit_ND, strict=True))
        return unit_ND


def distillation_loss(
    objective: RetrieverLoss,
    initial: InitialRetriever,
    sides: tuple[Side, Side],
    compare: Compare,
    teachers: Sequence[Tensor],
) -> Tensor:
    """Mean of ``ranking_loss`` over groups.

    Args:
        objective: has the retriever and tau.
        initial: the retriever before training.
        sides: queries and passages.
        compare: gives the cosines of each group.
        teachers: the LM's scores of each group, in the shape of its cosines.
    """
    query, passage = sides
    cosines = compare(objective.unit(query), objective.unit(passage))
    initial_cosines = compare(initial.unit(objective, query), initial.unit(objective, passage))
    groups = zip(cosines, teachers, initial_cosines, strict=True)
    return torch.stack([ranking_loss(*group, objective.tau) for group in groups]).mean()


def ranking_loss(
    cosine_QB: Tensor, teacher_QB: Tensor, initial_QB: Tensor, tau: float | Tensor
) -> Tensor:
    """L of one group, in nats per query."""
    with torch.autocast(cosine_QB.device.type, enabled=False):
        target_QB = TARGET_SCALE * zscore(zscore(teacher_QB) + zscore(initial_QB))
        return F.kl_div(
            (cosine_QB / tau).log_softmax(dim=-1), target_QB.softmax(dim=-1), reduction="batchmean"
        )


def zscore(scores: Tensor) -> Tensor:
    """Standard scores over the last dimension; 0 where all are equal."""
    centred = scores - scores.mean(dim=-1, keepdim=True)
    return centred / centred.square().mean(dim=-1, keepdim=True).sqrt().clamp(min=1e-9)
