"""Gain distillation: the retriever learns how much each chunk helps an LM to predict another.

    g    = - d L / d s   at s = 0, with Sim = softmax_{j != i}(s)
    t_i  = z( z(g_i + g^T_i) + z(cos_0(i, .)) )
    loss = mean_i KL( softmax(2 t_i) || softmax_{j != i}(cos(i, j) / tau) )

- L: Revela's next-token loss.
- g_ij: the gain, how much a higher weight of chunk j lowers the loss on chunk i.
- g + g^T: symmetric, because a chunk helps where it is helped.
- cos_0: the retriever's cosines before training.
- z: standard scores over the other chunks of a group.

Why at equal weights: with W = Sim and G_ij = - d L / d W_ij, Revela's gradient to a pair is
W_ij (G_ij - sum_k W_ik G_ik). It mostly repeats the weights that the retriever already gives. At
equal weights it is the gain alone: it tells chunks of one document from others with an AUC of .83
instead of .69 (docs/results.md). To first order, g is the signal for which REPLUG reads every pair.

Cost: one forward and one backward pass of the frozen LM.
When to use it: on prose in clusters of similar chunks (preset ``gains``).

Shapes: B chunks of a batch, n of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from revela.training.lm.language_model import LanguageModel, Packed
from revela.training.methods.base import (
    BuildContext,
    ChunkBatches,
    Collate,
    Side,
    load_lm,
    off_diagonal,
    off_diagonal_softmax,
)
from revela.training.methods.distillation import InitialRetriever, ranking_loss
from revela.training.methods.revela import RevelaLoss, block_diagonal, gates
from revela.training.settings import Gains


def build(settings: Gains, parts: BuildContext) -> tuple[nn.Module, Collate]:
    """The loss of ``gains`` and its collator."""
    lm, tokenizer, folder = load_lm(parts)
    gates_LH = gates(settings, parts, lm, tokenizer, folder)
    initial, tau, kernel = InitialRetriever.of(parts), settings.tau, settings.kernel
    loss = GainsLoss(
        parts.model, lm, initial, gates_LH=gates_LH, tau=tau, kernel=kernel, **parts.batching
    )
    return loss, ChunkBatches(parts, tokenizer, settings.query_side)


class GainsLoss(RevelaLoss):
    """The loss of a batch of groups.

    Args:
        model, lm, options: as for ``RevelaLoss``.
        initial: ``model`` before training.
    """

    exact_logits = True  # gains are differences of likelihoods

    def __init__(
        self, model: nn.Module, lm: LanguageModel, initial: InitialRetriever, **options: Any
    ) -> None:
        super().__init__(model, lm, **options)
        self.initial = initial

    def forward(self, features: Sequence[Side]) -> Tensor:
        """Loss in nats per chunk; ``features`` as for ``RevelaLoss``."""
        query, passage, chunk = features
        gains_BB = self.gains(self.lm.pack(chunk["input_ids"], chunk["attention_mask"]))
        gains = [gains_BB[group, group] for group in self.places(len(gains_BB))]
        teachers = [off_diagonal(gain_nn + gain_nn.T) for gain_nn in gains]
        cosines = self.cosines(query, passage)
        initial = self.cosines_of(*(self.initial.embed(self, side) for side in (query, passage)))
        students, begun = (map(off_diagonal, groups) for groups in (cosines, initial))
        groups = zip(students, teachers, begun, strict=True)
        return torch.stack([ranking_loss(*group, self.tau) for group in groups]).mean()

    def gains(self, packed: Packed) -> Tensor:
        """(B, B) gains g; 0 between groups and on the diagonal, and rows sum to 0."""
        places, device = self.places(len(packed.lengths)), packed.ids_1T.device
        with torch.enable_grad():
            scores = [
                torch.zeros(size, size, device=device, requires_grad=True)
                for size in (len(packed.lengths[group]) for group in places)
            ]
            loss = self.lm_loss(packed, block_diagonal(map(off_diagonal_softmax, scores)))
        return block_diagonal(-slope_nn for slope_nn in torch.autograd.grad(loss, scores))
