"""Gain distillation: the retriever learns how an LM ranks the chunks of a group by how much each would help to predict each other one.

Under Revela's loss a pair is told W_ij (G_ij - sum_k W_ik G_ik), with W = Sim and G_ij = - d L / d W_ij: what a chunk has to gain, times
the weight that it has. A retriever that already leans to some chunks is told to lean to the best of these, and away from good ones with
some weight more than from bad ones with none (docs/results.md, "Near-duplicates"). Where all weights are equal, the same derivative is
the gain and nothing else, and it tells chunks of one document from others far better (docs/log.md). So it is taken there, and learned:

    g   = - d L / d s  at s = 0, W = softmax_{j != i}(s)        one forward and one backward pass for all pairs
    t_i = z( z(g_i + g^T_i) + prior * z(cos_0(i, .)) )          a chunk helps where it is helped; cos_0: the retriever's before training
    L   = KL( softmax(sharpness * t_i) || softmax_j(cos(i, j) / tau) ),   mean over i

z takes the mean off and divides by the standard deviation, over the others of a group. To first order g is what REPLUG reads every
pair for. No gradient but g itself leaves the LM.

Shapes: B chunks of a batch, n of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from revela.objectives.attention import standard
from revela.objectives.gradcache import embed
from revela.objectives.revela import Revela, others


class GainDistillation(Revela):
    """The objective as Sentence Transformers' trainer hosts it.

    Args:
        model, lm, settings: as for ``Revela``, in its gated form; of Sim only ``tau`` and ``learn_tau`` count.
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

    def forward(self, features: Sequence[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
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
            with torch.autocast(cosine.device.type, enabled=False):
                target = standard(standard(others(gain + gain.T)) + self.prior * standard(others(cosine_0)))
                log_probability = (others(cosine) / self.log_tau.exp()).log_softmax(dim=-1)
                losses.append(F.kl_div(log_probability, (self.sharpness * target).softmax(dim=-1), reduction="batchmean"))
        return torch.stack(losses).mean()

    def gains(self, packed: Any) -> Tensor:
        """g, (B, B): 0 between groups and on the diagonal, and in sum over a row."""
        device = next(self.model.parameters()).device
        with torch.enable_grad():
            scores_BB = torch.zeros(len(packed.lengths), len(packed.lengths), device=device, requires_grad=True)
            size = self.group_size or len(scores_BB)
            blocks = (scores_BB[i : i + size, i : i + size] for i in range(0, len(scores_BB), size))
            weights_BB = torch.block_diag(*(_softmax_of_others(block) for block in blocks))  # type: ignore[no-untyped-call]
            loss = self.lm_loss(packed, weights_BB, None if self.gates_LH is None else self.gates_LH.detach())
        (gradient_BB,) = torch.autograd.grad(loss, scores_BB)
        return -gradient_BB

    def _cosines(self, query: dict[str, Tensor], passage: dict[str, Tensor]) -> list[Tensor]:
        """(n, n) of each group."""
        query_BD, passage_BD = (F.normalize(embed(self.model, side, self.retriever_batch), dim=-1) for side in (query, passage))
        size = self.group_size or len(query_BD)
        with torch.autocast(query_BD.device.type, enabled=False):
            return [q @ p.T for q, p in zip(torch.split(query_BD, size), torch.split(passage_BD, size), strict=True)]


def _softmax_of_others(scores: Tensor) -> Tensor:
    diagonal = torch.eye(len(scores), dtype=torch.bool, device=scores.device)
    return scores.masked_fill(diagonal, -torch.inf).softmax(dim=-1)
