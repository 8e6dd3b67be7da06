"""Ranking distillation: the loss of the objective ``gains``.

    t_i = z( z(teacher_i) + z(cos_0(q_i, .)) )
    L   = mean_i KL( softmax(2 t_i) || softmax(cos(q_i, .) / tau) )

- teacher_i: an LM's scores of the candidates of query i.
- cos_0: the retriever's cosines before training. An LM ranks best together with a fitted retriever.
- z: standard scores over the candidates of a query.

Shapes: Q queries, B candidates of each; N texts, D width of a vector.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from revela.training.device import on_cpu
from revela.training.methods.base import BuildContext, RetrieverLoss, Side

TARGET_SCALE = 2.0  # factor of the target before its softmax
MAX_CACHED = 2**26  # fp32 numbers in the cached vectors: 256 MiB


class InitialRetriever:
    """The retriever before training, without dropout.

    Args:
        cache: compute the vector of each text once. Its vector must depend on the text alone.
    """

    def __init__(self, cache: bool = False) -> None:
        self.cache, self.cached = cache, dict[bytes, Tensor]()

    @classmethod
    def of(cls, parts: BuildContext) -> InitialRetriever:
        """With a cache, unless vectors depend on a batch's context or width."""
        return cls(parts.context_encoder is None and not parts.recipe.retriever.matryoshka)

    @torch.no_grad()
    def embed(self, objective: RetrieverLoss, side: Side) -> Tensor:
        """(N, D) unit vectors of tokenized texts."""
        rows = zip(on_cpu(side["input_ids"]), on_cpu(side["attention_mask"]).bool(), strict=True)
        keys = [blake2b(ids[mask].numpy(), digest_size=16).digest() for ids, mask in rows]
        if self.cached.keys() >= set(keys):
            return torch.stack([self.cached[key] for key in keys])
        retriever: Any = objective.model
        with retriever.evaluating(adapters=False):
            unit_ND = objective.embed(side)
        if self.cache and len(self.cached) * unit_ND.shape[1] < MAX_CACHED:
            self.cached.update(zip(keys, unit_ND, strict=True))
        return unit_ND


def ranking_loss(
    cosine_QB: Tensor, teacher_QB: Tensor, initial_QB: Tensor, tau: float | Tensor
) -> Tensor:
    """L of one group, in nats per query."""
    target_QB = TARGET_SCALE * zscore(zscore(teacher_QB) + zscore(initial_QB))
    return F.kl_div(
        (cosine_QB / tau).log_softmax(dim=-1), target_QB.softmax(dim=-1), reduction="batchmean"
    )


def zscore(scores: Tensor) -> Tensor:
    """Standard scores over the last dimension; 0 where all are equal."""
    centred = scores - scores.mean(dim=-1, keepdim=True)
    return centred / centred.square().mean(dim=-1, keepdim=True).sqrt().clamp(min=1e-9)
