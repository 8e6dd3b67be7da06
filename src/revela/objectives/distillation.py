"""The KL of a retriever's ranking from that of an LM and its own before training: the loss that
gains and attention distillation share.

    t = z( z(teacher) + z(cos_0) )
    L = mean over rows of KL( softmax(2 t) || softmax(cos / tau) )

cos_0 are the retriever's cosines before training, and z standard scores over a row. An LM ranks
best together with a fitted retriever, so that is the target.

Shapes: Q rows, B candidates of each; N texts, D width of a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from hashlib import blake2b

import torch
import torch.nn.functional as F
from torch import Tensor

from revela.device import on_cpu
from revela.objectives.base import BuildContext, RetrieverLoss, Side

TARGET_SCALE = 2.0  # factor of the target's standard scores, before their softmax
KEPT = 2**26  # numbers in the vectors of a retriever's start that are kept: 256 MiB

Compare = Callable[[Tensor, Tensor], list[Tensor]]
"""From unit vectors of queries and passages to the cosines that are ranked, (Q, B) a group."""


class Start:
    """What a retriever was before training: its vectors then, without dropout.

    Args:
        at_start: a context in which the objective's model is what it was.
        keep: keep the vector of each text, so that it is computed once; only for a model whose
            vector of a text depends on nothing else.
    """

    def __init__(
        self, at_start: Callable[[], AbstractContextManager[None]], keep: bool = False
    ) -> None:
        self.at_start, self.keep = at_start, keep
        self.kept: dict[bytes, Tensor] = {}

    @classmethod
    def of(cls, parts: BuildContext) -> Start:
        """The retriever without its LoRA, or its rows as they were."""
        from revela.retriever.lora import without_adapters

        keep = parts.context_encoder is None and not parts.recipe.retriever.matryoshka
        return cls(partial(without_adapters, parts.model), keep)

    @torch.no_grad()
    def unit(self, objective: RetrieverLoss, side: Side) -> Tensor:
        """(N, D) vectors of tokenized texts, of length one."""
        read = zip(on_cpu(side["input_ids"]), on_cpu(side["attention_mask"]).bool(), strict=True)
        texts = [blake2b(ids[mask].numpy(), digest_size=16).digest() for ids, mask in read]
        if self.kept.keys() >= set(texts):
            return torch.stack([self.kept[text] for text in texts])
        model = objective.model
        was_training = model.training
        model.eval()
        with self.at_start():
            unit_ND = objective.unit(side)
        model.train(was_training)
        if self.keep and len(self.kept) * unit_ND.shape[1] < KEPT:
            self.kept.update(zip(texts, unit_ND, strict=True))
        return unit_ND


def distillation_loss(
    objective: RetrieverLoss,
    start: Start,
    sides: tuple[Side, Side],
    compare: Compare,
    teachers: Sequence[Tensor],
) -> Tensor:
    """Mean over groups of ``ranking_loss``.

    Args:
        objective: has the retriever and the temperature.
        start: the retriever before training.
        sides: queries and passages.
        compare: gives the cosines of each group.
        teachers: the LM's scores of the same pairs, by group.
    """
    query, passage = sides
    cosines = compare(objective.unit(query), objective.unit(passage))
    before = compare(start.unit(objective, query), start.unit(objective, passage))
    groups = zip(cosines, teachers, before, strict=True)
    return torch.stack([ranking_loss(*group, objective.tau) for group in groups]).mean()


def ranking_loss(
    cosine_QB: Tensor, teacher_QB: Tensor, start_QB: Tensor, tau: float | Tensor
) -> Tensor:
    """The equation above, in nats, for one group."""
    with torch.autocast(cosine_QB.device.type, enabled=False):
        target_QB = TARGET_SCALE * zscore(zscore(teacher_QB) + zscore(start_QB))
        return F.kl_div(
            (cosine_QB / tau).log_softmax(dim=-1), target_QB.softmax(dim=-1), reduction="batchmean"
        )


def zscore(scores: Tensor) -> Tensor:
    """Standard scores over the last dimension; 0 where all are equal."""
    centred = scores - scores.mean(dim=-1, keepdim=True)
    return centred / centred.square().mean(dim=-1, keepdim=True).sqrt().clamp(min=1e-9)
