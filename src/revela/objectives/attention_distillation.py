"""Attention distillation: the retriever learns where a frozen LM looks for an answer.

    t_i = z( z(sum_k z(a_ki)) + z(cos_0(q, d_i)) )
    L   = mean over q of KL( softmax(2 t) || softmax_i(cos(q, d_i) / tau) )

- a_ki: the score of candidate i by query-focused head k, from its attention (lm/heads.py).
- cos_0: the retriever's cosine before training.
- z: standard scores over the candidates of a question.

The LM reads the candidates, then the question. Its heads rank the candidates better than a fitted
retriever, and both together rank best. After Izacard & Grave (ICLR 2021), whose reader was trained
on answers; this LM is not trained.

Cost: the LM reads candidates and questions once, without a graph, up to its highest selected head.
When to use it: on queries taken from the text (preset ``attention``); none has to be written.

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
from revela.objectives.distillation import InitialRetriever, distillation_loss, zscore
from revela.objectives.dream import PromptBatches, load_query_focused_lm
from revela.settings import Attention


def build(settings: Attention, parts: BuildContext) -> tuple[nn.Module, Collate]:
    """The loss of ``attention`` and its collator."""
    lm, heads, prompts = load_query_focused_lm(settings, parts, answers=0)
    initial = InitialRetriever.of(parts)
    loss = AttentionLoss(parts.model, lm, heads, initial, tau=settings.tau, **parts.batching)
    return loss, PromptBatches(parts, prompts.with_null_question)


class AttentionLoss(RetrieverLoss):
    """The loss of a batch of groups.

    Args:
        model: the retriever.
        lm: the frozen language model.
        heads: (layer, head) pairs to learn from.
        initial: ``model`` before training.
        shared: see RetrieverLoss.
    """

    def __init__(
        self,
        model: nn.Module,
        lm: LanguageModel,
        heads: Sequence[tuple[int, int]],
        initial: InitialRetriever,
        **shared: Any,
    ) -> None:
        super().__init__(model, **shared)
        self.lm, self.heads, self.initial = lm, list(heads), initial

    def forward(self, features: Sequence[Side]) -> Tensor:
        """Loss in nats per question.

        Args:
            features: as for ``DreamLoss``, without answers; the last question of each group is
                "N/A". Groups without a question are skipped.
        """
        question, passage, prompt, tail = features
        group_Q = on_cpu(tail["group"])
        groups = sorted(set(group_Q.tolist()))
        teachers = [self.head_scores(*of_group(prompt, tail, group)) for group in groups]
        compare = partial(self.group_cosines, group_Q=group_Q)
        return distillation_loss(self, self.initial, (question, passage), compare, teachers)

    def head_scores(self, prompt: dict[str, Tensor], tail: dict[str, Tensor]) -> Tensor:
        """(Q, B) sums of the heads' standard scores; arguments as for ``candidate_scores``."""
        return zscore(candidate_scores(self.lm, prompt, tail, self.heads)).sum(dim=0)

    def group_cosines(
        self, question_QD: Tensor, passage_ND: Tensor, group_Q: Tensor
    ) -> list[Tensor]:
        """(Q, B) cosines of each group's questions (without "N/A") and candidates."""
        passages = self.groups(passage_ND)
        counts = (group_Q.bincount(minlength=len(passages)) - 1).clamp(min=0).tolist()
        pairs = zip(torch.split(question_QD, counts), passages, strict=True)
        return [own_QD @ passage_BD.T for own_QD, passage_BD in pairs if len(own_QD)]
