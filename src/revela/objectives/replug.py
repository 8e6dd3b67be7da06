"""REPLUG's batch form (Revela, appendix A.3): the retriever learns to rank chunks as an LM's
likelihood does.

    P_LM(j | i)        = softmax over j != i of log P(D_i | D_j) / tau_lm
    P_retriever(j | i) = softmax over j != i of cos(q_i, d_j) / tau_r
    L                  = mean_i KL(P_LM || P_retriever)

The LM is frozen and reads every D_i after every D_j: B^2 readings, where Revela needs two. D_j is
read once, and what it leaves is continued by all D_i, some at a time. A chunk in front of itself
would win trivially, so j = i is left out.

Shapes: B chunks of a group, T tokens in all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revela.objectives.gradcache import embed


class ContinuingLM(Protocol):
    """What the objective asks of an LM; ``revela.lm.language_model.LanguageModel`` answers it."""

    n_layers: int

    def pack(self, ids_BL: Tensor, mask_BL: Tensor) -> Any: ...

    def read(self, packed: Any, layers: Sequence[int]) -> Any: ...

    def token_losses(
        self, packed: Any, rows_R: Tensor, memory: Any = None, mix: Any = None, before: Any = None
    ) -> Tensor: ...


class Replug(nn.Module):
    """The objective as Sentence Transformers' trainer hosts it.

    Args:
        model: the retriever; called on tokenized features, gives ``sentence_embedding``.
        lm: the language model, frozen.
        tau: temperature of the cosines.
        tau_lm: temperature of the log-likelihoods, in nats (a token, if ``by_token``).
        by_token: take the mean log-likelihood of a chunk's tokens, not their sum.
        lead: special tokens that begin every chunk; they are not repeated when it follows another.
        group_size: chunks a group. 0: a batch is one group.
        retriever_batch: texts that the retriever reads at a time; see gradcache.embed.
        lm_batch: chunks that continue another at a time; 0: all.
    """

    def __init__(
        self,
        model: nn.Module,
        lm: ContinuingLM,
        *,
        tau: float,
        tau_lm: float,
        by_token: bool = True,
        lead: int = 0,
        group_size: int = 0,
        retriever_batch: int = 0,
        lm_batch: int = 0,
        learn_tau: bool = False,
    ) -> None:
        super().__init__()
        self.model, self.lm = model, lm
        self.tau_lm, self.by_token, self.lead = tau_lm, by_token, lead
        self.group_size, self.retriever_batch, self.lm_batch = group_size, retriever_batch, lm_batch
        self.log_tau = nn.Parameter(torch.tensor(math.log(tau)), requires_grad=learn_tau)

    def forward(
        self, features: Sequence[dict[str, Tensor]], labels: Tensor | None = None
    ) -> Tensor:
        """Loss (nats a chunk) of a batch; ``features`` are its chunks as queries, as passages, and
        as the LM reads them.
        """
        query, passage, chunk = features
        query_BD, passage_BD = (
            F.normalize(embed(self.model, side, self.retriever_batch), dim=-1)
            for side in (query, passage)
        )
        ids_BL, mask_BL = chunk["input_ids"], chunk["attention_mask"]
        size = self.group_size or len(ids_BL)
        losses = []
        for group in torch.split(torch.arange(len(ids_BL)), size):
            with torch.autocast(query_BD.device.type, enabled=False):
                scores_BB = query_BD[group] @ passage_BD[group].T / self.log_tau.exp()
            likelihoods_BB = likelihoods(
                self.lm, ids_BL[group], mask_BL[group], self.by_token, self.lead, self.lm_batch
            )
            losses.append(ranking_divergence(likelihoods_BB / self.tau_lm, scores_BB))
        return torch.stack(losses).mean()


def ranking_divergence(teacher_BB: Tensor, student_BB: Tensor) -> Tensor:
    """Mean over rows of KL(softmax(teacher) || softmax(student)), both over j != i; a scalar
    (Revela, A.3).
    """
    diagonal_BB = torch.eye(len(teacher_BB), dtype=torch.bool, device=teacher_BB.device)
    rows = len(teacher_BB), -1
    teacher, student = (
        scores_BB[~diagonal_BB].view(rows).log_softmax(dim=-1)
        for scores_BB in (teacher_BB, student_BB)
    )
    return F.kl_div(student, teacher.to(student.dtype), reduction="batchmean", log_target=True)


@torch.no_grad()
def likelihoods(
    lm: ContinuingLM, ids_BL: Tensor, mask_BL: Tensor, by_token: bool, lead: int = 0, batch: int = 0
) -> Tensor:
    """log P(D_i | D_j) in nats, row i, column j, (B, B); the diagonal is 0 and means nothing.

    Args:
        lm: a language model.
        ids_BL: the chunks' tokens.
        mask_BL: 1 where there is a token; padding is at the right.
        by_token: the mean over a chunk's tokens, not their sum.
        lead, batch: see Replug.
    """
    lengths = mask_BL.sum(dim=1).tolist()
    packed = lm.pack(ids_BL, mask_BL)
    memory = lm.read(packed, range(lm.n_layers))
    found_BB = torch.zeros(len(lengths), len(lengths), device=packed.ids_1T.device)
    start = 0
    for j, length in enumerate(lengths):
        # The last token of D_j stands in front of each D_i, whose first token it has to predict.
        last = ids_BL[j, length - 1]
        before = memory.part(start, start + length - 1) if length > 1 else None
        start += length
        others = torch.tensor([i for i in range(len(lengths)) if i != j])
        for some in torch.split(others, batch or len(others)):
            tails_BL = torch.cat([last.expand(len(some), 1), ids_BL[some, lead:]], dim=1)
            tail_mask_BL = torch.cat([mask_BL.new_ones(len(some), 1), mask_BL[some, lead:]], dim=1)
            tails = lm.pack(tails_BL, tail_mask_BL)
            rows_R = tails.layout.has_next_T.nonzero().squeeze(1)
            losses_R = lm.token_losses(tails, rows_R, before=before)
            sums = torch.stack(
                [
                    part.mean() if by_token else part.sum()
                    for part in torch.split(losses_R, [n - 1 for n in tails.lengths])
                ]
            )
            found_BB[some, j] = -sums.to(found_BB.dtype)
    return found_BB
