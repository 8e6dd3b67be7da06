"""Gain distillation: the retriever learns how an LM ranks the chunks of a group, by how much each
would help to predict each other one.

    g   = - d L / d s   at s = 0, with Sim = softmax_{j != i}(s)     one forward, one backward pass
    t_i = z( z(g_i + g^T_i) + prior * z(cos_0(i, .)) )
    loss = mean_i KL( softmax(sharpness * t_i) || softmax_j(cos(i, j) / tau) )

L is Revela's next-token loss, cos_0 the retriever's cosines before training, and z standard scores
over the others of a group. g + g^T: a chunk helps where it is helped.

Why at equal weights: the gradient of Revela's loss to a pair is W_ij (G_ij - sum_k W_ik G_ik), with
W = Sim and G_ij = - d L / d W_ij. It mostly repeats the weights that a retriever already gives; at
equal weights the derivative is the gain alone, and tells chunks of one document from others with an
AUC of .83 instead of .69 (docs/results.md). To first order g is what REPLUG reads every pair for.

Cost: one forward and one backward pass of the frozen LM; only g leaves it.
When to use it: on prose in clusters of similar chunks (preset ``gains``).

Shapes: B chunks of a batch, n of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from revela.objectives.base import (
    Collate,
    Parts,
    Side,
    Start,
    others,
    ranking_loss,
    refuse_without_start,
)
from revela.objectives.revela import InBatch, RevelaLoss
from revela.settings import Recipe, setting


@dataclass(frozen=True)
class Gains(InBatch):
    """Learn the ranking of chunks by how much they help an LM, at equal weights."""

    name: ClassVar[str] = "gains"
    learned_from: ClassVar[str] = (
        "{model} learned to rank texts by how much each helps {lm} to predict another."
    )
    loss_is: ClassVar[str] = "KL from the LM's ranking (nats)"

    tau: float = setting(0.05, above=0)
    "Temperature of the cosines."
    sharpness: float = setting(2.0, above=0)
    "Factor of the target's standard scores, before their softmax."
    prior: float = setting(1.0, least=None)
    "Weight of the retriever's cosines before training in the target."

    def refuse(self, recipe: Recipe) -> None:
        refuse_without_start(recipe, self.prior)

    def build(self, parts: Parts) -> tuple[nn.Module, Collate]:
        lm, arguments, collate = self.in_batch(parts, trained=False)
        loss = GainsLoss(
            parts.model,
            lm,
            start=Start.of(parts),
            sharpness=self.sharpness,
            prior=self.prior,
            **arguments,
        )
        return loss, collate


class GainsLoss(RevelaLoss):
    """The loss of a batch of groups.

    Args:
        model, lm, arguments: as for ``RevelaLoss``; of Sim only ``tau`` and ``learn_tau`` count.
        start: what ``model`` was before training.
        sharpness: factor of the target's standard scores.
        prior: weight of the retriever's start in the target. 0: the LM's gains alone.
    """

    def __init__(
        self,
        model: nn.Module,
        lm: Any,
        *,
        start: Start,
        sharpness: float,
        prior: float,
        **arguments: Any,
    ) -> None:
        super().__init__(model, lm, **arguments)
        self.start, self.sharpness, self.prior = start, sharpness, prior

    def forward(self, features: Sequence[Side]) -> Tensor:
        """Loss in nats per chunk; ``features`` as for ``RevelaLoss``."""
        query, passage, chunk = features
        cosines = self.cosines(query, passage)
        start = [torch.zeros_like(cosine) for cosine in cosines]
        if self.prior:
            start = self.cosines_of(*(self.start.unit(self, side) for side in (query, passage)))
        gains_BB = self.gains(self.lm.pack(chunk["input_ids"], chunk["attention_mask"]))
        losses = []
        places = self.places(len(gains_BB))
        for group, cosine_nn, start_nn in zip(places, cosines, start, strict=True):
            gain_nn = gains_BB[group, group]
            teacher, before, now = others(gain_nn + gain_nn.T), others(start_nn), others(cosine_nn)
            losses.append(ranking_loss(now, self.tau, teacher, before, self.prior, self.sharpness))
        return torch.stack(losses).mean()

    def gains(self, packed: Any) -> Tensor:
        """g, (B, B): ``signal`` where all scores are equal."""
        device = next(self.model.parameters()).device
        places = self.places(len(packed.lengths))
        sizes = [len(packed.lengths[group]) for group in places]
        return self.signal(packed, [torch.zeros(size, size, device=device) for size in sizes])
