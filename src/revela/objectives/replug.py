"""REPLUG's batch form (Revela, appendix A.3): the retriever learns to rank chunks as an LM's
likelihood does.

    P_LM(j | i)        = softmax over j != i of log P(D_i | D_j) / tau_lm
    P_retriever(j | i) = softmax over j != i of cos(q_i, d_j) / tau_r
    L                  = mean_i KL(P_LM || P_retriever)

A chunk in front of itself would win trivially, so j = i is left out.

Cost: the frozen LM reads every D_i after every D_j: B^2 readings, where Revela needs two. D_j is
read once, and what it leaves is continued by all D_i, some at a time.
When to use it: as a reference; ``gains`` gives nearly the same signal for two readings.

Shapes: B chunks of a group, T tokens in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revela.device import on_cpu, sent
from revela.lm.language_model import LanguageModel
from revela.objectives.base import (
    BuildContext,
    ChunkBatches,
    Collate,
    RetrieverLoss,
    Side,
    language_model,
    off_diagonal,
)
from revela.settings import Replug


def build(settings: Replug, parts: BuildContext) -> tuple[nn.Module, Collate]:
    """The loss of ``replug``, and what makes its batches."""
    lm, tokenizer, _ = language_model(parts)
    plain, full = (
        tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True)
    )
    how: dict[str, Any] = dict(tau=settings.tau, tau_lm=settings.tau_lm, **parts.batching)
    loss = ReplugLoss(parts.model, lm, lead=full.index(plain[0]), **how)
    return loss, ChunkBatches(parts, tokenizer, settings.query_side)


class ReplugLoss(RetrieverLoss):
    """The loss of a batch of groups.

    Args:
        model: the retriever.
        lm: the language model, frozen.
        tau_lm: temperature of the mean log-likelihoods of a chunk's tokens, in nats.
        lead: special tokens that begin every chunk; they are not repeated when it follows another.
        shared: see RetrieverLoss.
    """

    def __init__(
        self,
        model: nn.Module,
        lm: LanguageModel,
        *,
        tau_lm: float,
        lead: int = 0,
        **shared: Any,
    ) -> None:
        super().__init__(model, **shared)
        self.lm, self.tau_lm, self.lead = lm, tau_lm, lead

    def forward(self, features: Sequence[Side]) -> Tensor:
        """Loss in nats per chunk; ``features`` are the chunks as queries, as passages, and as the
        LM reads them.
        """
        query, passage, chunk = features
        losses = []
        ids, masks = (self.groups(on_cpu(chunk[k])) for k in ("input_ids", "attention_mask"))
        for cosine_BB, ids_BL, mask_BL in zip(
            self.cosines(query, passage), ids, masks, strict=True
        ):
            likelihoods_BB = likelihoods(self.lm, ids_BL, mask_BL, self.lead)
            losses.append(ranking_divergence(likelihoods_BB / self.tau_lm, cosine_BB / self.tau))
        return torch.stack(losses).mean()


def ranking_divergence(teacher_BB: Tensor, student_BB: Tensor) -> Tensor:
    """Mean over rows of KL(softmax(teacher) || softmax(student)) over j != i (Revela, A.3)."""
    student, teacher = (
        off_diagonal(scores).log_softmax(dim=-1) for scores in (student_BB, teacher_BB)
    )
    return F.kl_div(student, teacher.to(student.dtype), reduction="batchmean", log_target=True)


@torch.no_grad()
def likelihoods(lm: LanguageModel, ids_BL: Tensor, mask_BL: Tensor, lead: int = 0) -> Tensor:
    """log P(D_i | D_j) in nats per token, row i, column j, (B, B); the diagonal is 0 and means
    nothing.

    Padding is at the right; ``lead`` as for ReplugLoss.
    """
    lengths = mask_BL.sum(dim=1).tolist()
    packed = lm.pack(ids_BL, mask_BL)
    memory = lm.prefill(packed, range(lm.n_layers))
    found_BB = torch.zeros(len(lengths), len(lengths), device=packed.ids_1T.device)
    start = 0
    for j, length in enumerate(lengths):
        # The last token of D_j stands in front of each D_i, whose first token it has to predict.
        last = ids_BL[j, length - 1]
        before = memory.part(start, start + length - 1) if length > 1 else None
        start += length
        some = torch.tensor([i for i in range(len(lengths)) if i != j])
        tails_BL = torch.cat([last.expand(len(some), 1), ids_BL[some, lead:]], dim=1)
        tail_mask_BL = torch.cat([mask_BL.new_ones(len(some), 1), mask_BL[some, lead:]], dim=1)
        tails = lm.pack(tails_BL, tail_mask_BL)
        losses_R = lm.token_losses(tails, tails.layout.with_next_R, prefix=before)
        parts = torch.split(losses_R, [n - 1 for n in tails.lengths])
        means = torch.stack([part.mean() for part in parts])
        found_BB[:, j].index_copy_(0, sent(some, means.device), -means.to(found_BB.dtype))
    return found_BB
