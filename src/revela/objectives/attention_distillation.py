"""Attention distillation: where a frozen LM looks for an answer, the retriever learns to look too.

The LM reads candidates and a question. The attention of its query-focused heads (heads.py)
ranks the candidates better than a fitted retriever does, and best together with it; so that is the
target, in the manner of Izacard & Grave (ICLR 2021), whose reader was trained on answers, where
this LM is trained on nothing:

    t_i = z( z(sum_k z(a_ki)) + z(cos_0(q, d_i)) )
    L   = KL( softmax(2 t) || softmax_i(cos(q, d_i) / tau) )

a_ki is head k's score of candidate i, cos_0 the retriever's cosine before training, and z standard
scores over the candidates of a question.

Cost: the LM reads the candidates and questions once, without a graph, up to the highest of its
heads.
When to use it: on queries taken from the text (preset ``attention``); no query has to be written.

Shapes: Q questions, B candidates, K heads, D width of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from revela.device import on_cpu
from revela.lm.heads import candidate_scores
from revela.lm.language_model import LanguageModel
from revela.lm.prompts import of_group
from revela.objectives.base import BuildContext, Collate, RetrieverLoss, Side
from revela.objectives.distillation import Start, distillation_loss, zscore
from revela.objectives.dream import PromptBatches, focused
from revela.settings import Attention


def build(settings: Attention, parts: BuildContext) -> tuple[nn.Module, Collate]:
    """The loss of ``attention``, and what makes its batches."""
    lm, heads, make = focused(settings, parts, answers=0)
    start = Start.of(parts)
    loss = AttentionLoss(parts.model, lm, heads, start, tau=settings.tau, **parts.batching)
    return loss, PromptBatches(parts, make.with_null_question)


class AttentionLoss(RetrieverLoss):
    """The loss of a batch of groups.

    Args:
        model: the retriever.
        lm: the language model, frozen.
        heads: (layer, head) pairs to learn from.
        start: what ``model`` was before training.
        shared: see RetrieverLoss.
    """

    def __init__(
        self,
        model: nn.Module,
        lm: LanguageModel,
        heads: Sequence[tuple[int, int]],
        start: Start,
        **shared: Any,
    ) -> None:
        super().__init__(model, **shared)
        self.lm, self.heads, self.start = lm, list(heads), start

    def forward(self, features: Sequence[Side]) -> Tensor:
        """Loss in nats per question; ``features`` as for ``DreamLoss``, but no answers, and each
        group's last question is "N/A". A group that asks nothing is left out.
        """
        question, passage, prompt, tail = features
        group_Q = on_cpu(tail["group"])
        asking = sorted(set(group_Q.tolist()))
        teachers = [self.attended(*of_group(prompt, tail, group)) for group in asking]
        compare = partial(self.question_cosines, group_Q=group_Q)
        return distillation_loss(self, self.start, (question, passage), compare, teachers)

    def attended(self, prompt: dict[str, Tensor], tail: dict[str, Tensor]) -> Tensor:
        """What the heads say of each candidate, (Q, B): their standard scores, added; arguments as
        for ``candidate_scores``.
        """
        return zscore(candidate_scores(self.lm, prompt, tail, self.heads)).sum(dim=0)

    def question_cosines(
        self, question_QD: Tensor, passage_ND: Tensor, group_Q: Tensor
    ) -> list[Tensor]:
        """(Q, B) cosines of each group's questions, without "N/A", and candidates."""
        passages = self.groups(passage_ND)
        counts = (group_Q.bincount(minlength=len(passages)) - 1).clamp(min=0).tolist()
        with torch.autocast(question_QD.device.type, enabled=False):
            pairs = zip(torch.split(question_QD, counts), passages, strict=True)
            return [mine_QD @ passage_BD.T for mine_QD, passage_BD in pairs if len(mine_QD)]
