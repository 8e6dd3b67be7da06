"""Gain distillation: the retriever learns how an LM ranks the chunks of a group, by how much each
would help to predict each other one.

    g   = - d L / d s   at s = 0, with Sim = softmax_{j != i}(s)     one forward, one backward pass
    t_i = z( z(g_i + g^T_i) + z(cos_0(i, .)) )
    loss = mean_i KL( softmax(2 t_i) || softmax_j(cos(i, j) / tau) )

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

from revela.lm.language_model import LanguageModel, Packed
from revela.objectives.base import (
    BuildContext,
    ChunkBatches,
    Collate,
    Side,
    language_model,
    off_diagonal,
    softmax_of_others,
)
from revela.objectives.distillation import Start, distillation_loss
from revela.objectives.revela import RevelaLoss, block_diagonal, gates
from revela.settings import Gains


def build(settings: Gains, parts: BuildContext) -> tuple[nn.Module, Collate]:
    """The loss of ``gains``, and what makes its batches."""
    lm, tokenizer, folder = language_model(parts)
    gates_LH = gates(settings, parts, lm, tokenizer, folder)
    how: dict[str, Any] = dict(tau=settings.tau, kernel=settings.kernel, **parts.batching)
    loss = GainsLoss(parts.model, lm, start=Start.of(parts), gates_LH=gates_LH, **how)
    return loss, ChunkBatches(parts, tokenizer, settings.query_side)


class GainsLoss(RevelaLoss):
    """The loss of a batch of groups.

    Args:
        model, lm, arguments: as for ``RevelaLoss``; ``tau`` is that of the cosines.
        start: what ``model`` was before training.
    """

    def __init__(
        self, model: nn.Module, lm: LanguageModel, *, start: Start, **arguments: Any
    ) -> None:
        super().__init__(model, lm, **arguments)
        self.start = start

    def forward(self, features: Sequence[Side]) -> Tensor:
        """Loss in nats per chunk; ``features`` as for ``RevelaLoss``."""
        query, passage, chunk = features
        gains_BB = self.gains(self.lm.pack(chunk["input_ids"], chunk["attention_mask"]))
        gains = [gains_BB[group, group] for group in self.places(len(gains_BB))]
        teachers = [off_diagonal(gain_nn + gain_nn.T) for gain_nn in gains]
        return distillation_loss(self, self.start, (query, passage), self._others, teachers)

    def _others(self, query_ND: Tensor, passage_ND: Tensor) -> list[Tensor]:
        return [off_diagonal(cosine_nn) for cosine_nn in self.cosines_of(query_ND, passage_ND)]

    def gains(self, packed: Packed) -> Tensor:
        """g, (B, B): 0 between groups, on the diagonal, and in sum over a row."""
        places, device = self.places(len(packed.lengths)), packed.ids_1T.device
        with torch.enable_grad():
            scores = [
                torch.zeros(size, size, device=device, requires_grad=True)
                for size in (len(packed.lengths[group]) for group in places)
            ]
            loss = self.lm_loss(packed, block_diagonal(map(softmax_of_others, scores)))
        return block_diagonal(-slope_nn for slope_nn in torch.autograd.grad(loss, scores))
