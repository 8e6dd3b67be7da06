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
from typing import Any

import torch
from torch import Tensor, nn

from revela.objectives.base import (
    ChunkBatches,
    Collate,
    Parts,
    Side,
    Start,
    language_model,
    others,
    ranking_loss,
)
from revela.objectives.revela import EPSILON, RevelaLoss, gates
from revela.settings import Gains


def build(settings: Gains, parts: Parts) -> tuple[nn.Module, Collate]:
    """The loss of ``gains``, and what makes its batches."""
    lm, tokenizer, folder = language_model(parts)
    loss = GainsLoss(
        parts.model,
        lm,
        start=Start.of(parts),
        tau=settings.tau,
        gates_LH=gates(settings, parts, lm, tokenizer, folder),
        v_norm=False,
        epsilon=EPSILON,
        kernel=settings.kernel,
        **parts.batching,
    )
    return loss, ChunkBatches(parts, tokenizer, settings.query_side)


class GainsLoss(RevelaLoss):
    """The loss of a batch of groups.

    Args:
        model, lm, arguments: as for ``RevelaLoss``; of Sim only ``tau`` and ``learn_tau`` count.
        start: what ``model`` was before training.
    """

    def __init__(
        self,
        model: nn.Module,
        lm: Any,
        *,
        start: Start,
        **arguments: Any,
    ) -> None:
        super().__init__(model, lm, **arguments)
        self.start = start

    def forward(self, features: Sequence[Side]) -> Tensor:
        """Loss in nats per chunk; ``features`` as for ``RevelaLoss``."""
        query, passage, chunk = features
        cosines = self.cosines(query, passage)
        start = self.cosines_of(*(self.start.unit(self, side) for side in (query, passage)))
        gains_BB = self.gains(self.lm.pack(chunk["input_ids"], chunk["attention_mask"]))
        losses = []
        places = self.places(len(gains_BB))
        for group, cosine_nn, start_nn in zip(places, cosines, start, strict=True):
            gain_nn = gains_BB[group, group]
            teacher, before, now = others(gain_nn + gain_nn.T), others(start_nn), others(cosine_nn)
            losses.append(ranking_loss(now, self.tau, teacher, before))
        return torch.stack(losses).mean()

    def gains(self, packed: Any) -> Tensor:
        """g, (B, B): ``signal`` where all scores are equal."""
        device = next(self.model.parameters()).device
        places = self.places(len(packed.lengths))
        sizes = [len(packed.lengths[group]) for group in places]
        return self.signal(packed, [torch.zeros(size, size, device=device) for size in sizes])
