"""Attention distillation: where a frozen LM looks for what answers a question, the retriever learns
to look too.

The LM reads candidates and a question. What its query-focused heads (query_heads.py) attend to
ranks the candidates better than a fitted retriever does, and best together with it (docs/log.md);
so that is the target, in the manner of Izacard & Grave (ICLR 2021), whose reader was trained on
answers, where this LM is trained on nothing:

    t_i = z( z(sum_k z(a_ki)) + prior * z(cos_0(q, d_i)) )    a_ki: head k's score of candidate i;
    cos_0: the retriever's at the start L   = KL( softmax(sharpness * t) || softmax_i(cos(q, d_i) /
    tau) )

z takes the mean off and divides by the standard deviation, over the candidates of a question. No
gradient enters the LM, and it runs no higher than the last of these heads.

Shapes: Q questions, B candidates, K heads, D width of a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revela.lm.prompts import of_group
from revela.lm.query_heads import candidate_scores
from revela.objectives.gradcache import embed


class AttentionDistillation(nn.Module):
    """The objective as Sentence Transformers' trainer hosts it.

    Args:
        model: the retriever; called on tokenized features, gives ``sentence_embedding``.
        lm: the language model, frozen.
        heads: (layer, head) pairs to learn from.
        as_it_began: a context inside which ``model`` is what it was before training.
        tau: temperature of the cosines.
        sharpness: factor of the target's standard scores.
        prior: weight of the retriever's own start in the target.
        group_size: candidates a group; a batch may hold several groups.
        retriever_batch: texts that the retriever reads at a time; see gradcache.embed.
    """

    def __init__(
        self,
        model: nn.Module,
        lm: Any,
        heads: Sequence[tuple[int, int]],
        as_it_began: Callable[[], AbstractContextManager[None]],
        *,
        tau: float,
        sharpness: float,
        prior: float = 1.0,
        group_size: int,
        retriever_batch: int = 0,
    ) -> None:
        super().__init__()
        self.model, self.lm, self.heads, self.as_it_began = model, lm, list(heads), as_it_began
        self.tau, self.sharpness, self.prior = tau, sharpness, prior
        self.group_size, self.retriever_batch = group_size, retriever_batch

    def forward(
        self, features: Sequence[dict[str, Tensor]], labels: Tensor | None = None
    ) -> Tensor:
        """Loss (nats a question); ``features`` as for ``Dream``, but no answers, and each group's
        last question is "N/A".
        """
        question, passage, prompt, tail = features
        cosines = self._cosines(question, passage, tail["group"])
        with self.as_it_began(), torch.no_grad():
            began = self._cosines(question, passage, tail["group"])
        losses = []
        for i, (cosine_QB, began_QB) in enumerate(zip(cosines, began, strict=True)):
            if not len(cosine_QB):
                continue
            said_QB = attended(self.lm, *of_group(prompt, tail, i), self.heads)
            losses.append(
                ranking_loss(cosine_QB, self.tau, said_QB, began_QB, self.prior, self.sharpness)
            )
        return torch.stack(losses).mean()

    def _cosines(
        self, question: dict[str, Tensor], passage: dict[str, Tensor], group_Q: Tensor
    ) -> list[Tensor]:
        """(Q, B) of each group."""
        question_QD, passage_ND = (
            F.normalize(embed(self.model, side, self.retriever_batch), dim=-1)
            for side in (question, passage)
        )
        passages = torch.split(passage_ND, self.group_size)
        counts = [
            max(0, n - 1) for n in group_Q.bincount(minlength=len(passages)).tolist()
        ]  # without "N/A"
        with torch.autocast(question_QD.device.type, enabled=False):
            return [
                question @ passage.T
                for question, passage in zip(
                    torch.split(question_QD, counts), passages, strict=True
                )
            ]


def attended(
    lm: Any, prompt: dict[str, Tensor], tail: dict[str, Tensor], heads: Sequence[tuple[int, int]]
) -> Tensor:
    """What the heads say of each candidate, (Q, B): their standard scores, added; arguments as of
    ``candidate_scores``.
    """
    return standard(candidate_scores(lm, prompt, tail, heads)).sum(dim=0)


def ranking_loss(
    cosine_QB: Tensor,
    tau: float | Tensor,
    said_QB: Tensor,
    began_QB: Tensor,
    prior: float,
    sharpness: float,
) -> Tensor:
    """KL of the retriever's ranking from what an LM said of it and its own start, mean over rows
    (nats).

    Args:
        cosine_QB: the retriever's cosines, now.
        tau: their temperature.
        said_QB: the LM's scores of the same pairs.
        began_QB: the cosines before training.
        prior: weight of these beside the LM's.
        sharpness: factor of the target's standard scores.
    """
    with torch.autocast(cosine_QB.device.type, enabled=False):
        target_QB = sharpness * standard(standard(said_QB) + prior * standard(began_QB))
        return F.kl_div(
            (cosine_QB / tau).log_softmax(dim=-1), target_QB.softmax(dim=-1), reduction="batchmean"
        )


def standard(scores: Tensor) -> Tensor:
    """Standard scores over the last dimension; 0 where all are equal."""
    centred = scores - scores.mean(dim=-1, keepdim=True)
    return centred / centred.square().mean(dim=-1, keepdim=True).sqrt().clamp(min=1e-9)
