"""Gain distillation: the retriever learns how an LM ranks the chunks of a group by how much each
would help to predict each other one.

Under Revela's loss a pair is told W_ij (G_ij - sum_k W_ik G_ik), with W = Sim and G_ij = - d L / d
W_ij: what a chunk has to gain, times the weight that it has. A retriever that already leans to some
chunks is told to lean to the best of these, and away from good ones with some weight more than from
bad ones with none (docs/results.md, "Near-duplicates"). Where all weights are equal, the same
derivative is the gain and nothing else, and it tells chunks of one document from others far better
(docs/log.md). So it is taken there, and learned:

    g   = - d L / d s  at s = 0, W = softmax_{j != i}(s)        one forward and one backward pass
    for all pairs t_i = z( z(g_i + g^T_i) + prior * z(cos_0(i, .)) )          a chunk helps where it
    is helped; cos_0: the retriever's before training L   = KL( softmax(sharpness * t_i) ||
    softmax_j(cos(i, j) / tau) ),   mean over i

z takes the mean off and divides by the standard deviation, over the others of a group. To first
order g is what REPLUG reads every pair for. No gradient but g itself leaves the LM.

Shapes: B chunks of a batch, n of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from revela.objectives.attention_distillation import ranking_loss
from revela.objectives.gradcache import embed
from revela.objectives.revela import Revela, others


class GainDistillation(Revela):
    """The objective as Sentence Transformers' trainer hosts it.

    Args:
        model, lm, settings: as for ``Revela``, in its gated form; of Sim only ``tau`` and
            ``learn_tau`` count.
        as_it_began: a context inside which ``model`` is what it was before training.
        sharpness: factor of the target's standard scores.
        prior: weight of the retriever's own start in the target; 0: the LM's gains alone.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        lm: Any,
        *,
        as_it_began: Callable[[], AbstractContextManager[None]],
        sharpness: float,
        prior: float,
        **settings: Any,
    ) -> None:
        super().__init__(model, lm, **settings)
        self.as_it_began, self.sharpness, self.prior = as_it_began, sharpness, prior

    def forward(
        self, features: Sequence[dict[str, Tensor]], labels: Tensor | None = None
    ) -> Tensor:
        """Loss (nats a chunk); ``features`` as for ``Revela``."""
        query, passage, chunk = features
        cosines = self._cosines(query, passage)
        began: Sequence[Tensor] = [torch.zeros_like(cosine) for cosine in cosines]
        if self.prior:
            with self.as_it_began(), torch.no_grad():
                began = self._cosines(query, passage)
        gains_BB = self.gains(self.lm.pack(chunk["input_ids"], chunk["attention_mask"]))
        losses, start = [], 0
        for cosine, cosine_0 in zip(cosines, began, strict=True):
            group = slice(start, start := start + len(cosine))
            gain = gains_BB[group, group]
            said, was, now = others(gain + gain.T), others(cosine_0), others(cosine)
            losses.append(
                ranking_loss(now, self.log_tau.exp(), said, was, self.prior, self.sharpness)
            )
        return torch.stack(losses).mean()

    def gains(self, packed: Any) -> Tensor:
        """g, (B, B): ``signal`` where all scores are equal."""
        device = next(self.model.parameters()).device
        sizes = [len(rows) for rows in self.groups(torch.arange(len(packed.lengths)))]
        return self.signal(packed, [torch.zeros(size, size, device=device) for size in sizes])

    def _cosines(self, query: dict[str, Tensor], passage: dict[str, Tensor]) -> list[Tensor]:
        """(n, n) of each group."""
        query_BD, passage_BD = (
            F.normalize(embed(self.model, side, self.retriever_batch), dim=-1)
            for side in (query, passage)
        )
        with torch.autocast(query_BD.device.type, enabled=False):
            return [
                q @ p.T for q, p in zip(self.groups(query_BD), self.groups(passage_BD), strict=True)
            ]
