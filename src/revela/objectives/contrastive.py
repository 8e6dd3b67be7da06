"""Contrastive objectives without labels: a query and its passage against the other passages.

    L = -mean_i log softmax_j( cos(q_i, d_j) / tau )  at j = target(i)

- InfoNCE on queries that were written or taken from the text (DREAM's control): a chunk's query
  should find the chunk among the chunks of its group.
- Random crops (Contriever; Izacard et al., TMLR 2022; Dwell in the Beginning, eq. 1): one crop of a
  text should find another.

Passages of the same query are left out of the softmax (the chunks of a document, asked for by its
title), and so may be those that a surrogate model finds as near to a query as its own (false
negatives; CDE, section 4.1).

Cost: the retriever reads both sides; no LM. Texts are embedded a few at a time (gradcache.py), so a
batch is limited by time, not by memory, and every process sees the passages of all.
When to use it: InfoNCE on docstrings and titles for code (preset ``pairs``); crops as a baseline.

Shapes: Q queries, B passages, D width of a vector, S width of a surrogate's.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revela.corpus.text_queries import number_of_query
from revela.errors import RevelaError
from revela.objectives.base import Batch, Collate, Parts, RetrieverLoss, Row, row_random
from revela.settings import Objective, setting, share
from revela.types import Encoder

MIN_WORDS = 3  # of a crop


@dataclass(frozen=True)
class Contrast(Objective):
    """Settings that both contrastive objectives read."""

    loss_is: ClassVar[str] = "contrastive loss (nats)"

    tau: float = setting(0.05, above=0)
    "Temperature of the cosines."
    learn_tau: bool = setting(False, rare=True)
    "Train the temperature."
    drop_false_negatives: bool = False
    "Compare a query with no passage that --surrogate finds as near to it as its own."
    margin: float = setting(0.0, least=None, rare=True)
    "Nor with one that comes this close to that, in cosine."

    def contrastive_loss(self, parts: Parts, group_size: int) -> ContrastiveLoss:
        return ContrastiveLoss(
            parts.model,
            tau=self.tau,
            learn_tau=self.learn_tau,
            retriever_batch=parts.recipe.training.retriever_batch,
            group_size=group_size,
            margin=self.margin,
        )

    def surrogate(self, parts: Parts) -> Encoder | None:
        """What finds false negatives, if the recipe asks for it."""
        from revela.retriever.encode import load_encoder
        from revela.weights import find_weights

        if not self.drop_false_negatives:
            return None
        groups = parts.recipe.groups
        if not groups.surrogate:
            raise RevelaError(
                "--drop-false-negatives needs a model that finds them: "
                "give --surrogate, embedded:minilm-l6 for example"
            )
        folder = find_weights(groups.surrogate, "")
        return load_encoder(folder, parts.recipe.training.precision, groups.surrogate_tokens)


@dataclass(frozen=True)
class InfoNCE(Contrast):
    """Learn to find the chunk that a query was made for."""

    name: ClassVar[str] = "infonce"
    reads: ClassVar[Literal["chunks", "queries", "windows"]] = "queries"
    learned_from: ClassVar[str] = (
        "{model} learned to tell the text that a query was made for from others"
        " (queries: {queries})."
    )

    def build(self, parts: Parts) -> tuple[nn.Module, Collate]:
        loss = self.contrastive_loss(parts, parts.recipe.groups.group_size)
        return loss, QueryBatches(parts, self.surrogate(parts))


@dataclass(frozen=True)
class Crop(Contrast):
    """Learn to find another crop of the same text."""

    name: ClassVar[str] = "crop"
    reads: ClassVar[Literal["chunks", "queries", "windows"]] = "windows"
    across_groups: ClassVar[bool] = True
    learned_from: ClassVar[str] = (
        "{model} learned to tell another crop of the same text from crops of others."
    )

    crop_window: int = setting(240, least=2)
    "Maximum words of a document that two crops are taken from."
    crop_least: float = share(0.1)
    "Shortest crop, as a share of the text's words."
    crop_most: float = share(0.5)
    "Longest crop."
    crop_deletion: float = share(0.0, rare=True)
    "Probability of each word of a crop to be left out."

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.crop_least <= self.crop_most:
            raise RevelaError(
                f"--crop-least {self.crop_least} and --crop-most {self.crop_most} must be shares, "
                "the first the smaller"
            )

    def window_words(self, recipe: Any) -> int:
        return self.crop_window

    def build(self, parts: Parts) -> tuple[nn.Module, Collate]:
        loss = self.contrastive_loss(parts, group_size=0)
        return loss, CropBatches(parts, self.surrogate(parts), self)


@dataclass(frozen=True)
class PairBatches:
    """Both sides of pairs, with their vectors by a ``surrogate`` if there is one."""

    parts: Parts
    surrogate: Encoder | None

    def sides(self, queries: Sequence[str], passages: Sequence[str]) -> Batch:
        batch = self.parts.sides(queries, passages)
        if self.surrogate is not None:
            batch["query_surrogate"] = torch.from_numpy(self.surrogate.encode_queries(queries))
            batch["passage_surrogate"] = torch.from_numpy(self.surrogate.encode_passages(passages))
        return batch


class QueryBatches(PairBatches):
    """The queries of a batch, with the index of each one's passage, and all its passages; each with
    the number of its query.
    """

    def __call__(self, rows: Sequence[Row]) -> Batch:
        having = [i for i, row in enumerate(rows) if row["query"]]
        batch = self.sides([rows[i]["query"] for i in having], [row["text"] for row in rows])
        number_B = torch.tensor([number_of_query(row["query"]) for row in rows])
        return {
            **batch,
            "query_target": torch.tensor(having),
            "query_number": number_B[having],
            "passage_number": number_B,
        }


@dataclass(frozen=True)
class CropBatches(PairBatches):
    """Two crops of each text, independent of each other, the same for the same row and epoch."""

    settings: Crop

    def __call__(self, rows: Sequence[Row]) -> Batch:
        crops = [self._crops(row) for row in rows]
        first, second = zip(*crops, strict=True)
        return {**self.sides(first, second), "query_target": torch.arange(len(rows))}

    def _crops(self, row: Row) -> tuple[str, str]:
        draw = row_random(row, self.parts.recipe.training.seed)
        s = self.settings
        first, second = (
            crop(row["text"], s.crop_least, s.crop_most, s.crop_deletion, draw) for _ in range(2)
        )
        return first, second


def crop(text: str, least: float, most: float, deletion: float, rng: random.Random) -> str:
    """A random run of a text's words, some of them left out.

    Args:
        text: words are separated by white space.
        least, most: the run's share of the words is uniform between these; it has ``MIN_WORDS``
            words at least.
        deletion: chance of each word to be left out.
    """
    words = text.split()
    length = min(len(words), max(MIN_WORDS, round(rng.uniform(least, most) * len(words))))
    start = rng.randint(0, len(words) - length)
    run = words[start : start + length]
    return " ".join([w for w in run if rng.random() >= deletion] or run)


def info_nce(
    query_QD: Tensor,
    passage_BD: Tensor,
    target_Q: Tensor,
    tau: float | Tensor,
    allowed_QB: Tensor | None = None,
) -> Tensor:
    """Mean cross-entropy (nats) of finding each query's passage by cosine.

    Args:
        query_QD: query vectors; any norm.
        passage_BD: passage vectors; any norm.
        target_Q: index of each query's passage.
        tau: temperature.
        allowed_QB: which passages a query is compared with; must allow its own. None: all.
    """
    scores_QB = F.normalize(query_QD, dim=-1) @ F.normalize(passage_BD, dim=-1).T / tau
    if allowed_QB is not None:
        scores_QB = scores_QB.masked_fill(~allowed_QB, -torch.inf)
    return F.cross_entropy(scores_QB, target_Q)


def true_negatives(query_QS: Tensor, passage_BS: Tensor, target_Q: Tensor, margin: float) -> Tensor:
    """Which passages a query is compared with, (Q, B): its own, and every j with f(q, d_j) < f(q,
    d_own) - margin.

    Args:
        query_QS, passage_BS: vectors of the surrogate, whose dot product is f.
        target_Q: index of each query's own passage.
        margin: 0 leaves out what f finds as near as the own one (CDE); above 0, also what comes
            that close.
    """
    scores_QB = query_QS @ passage_BS.T
    own_Q1 = target_Q[:, None]
    return (scores_QB < scores_QB.gather(1, own_Q1) - margin).scatter(1, own_Q1, True)


def other_queries(number_Q: Tensor, number_B: Tensor, target_Q: Tensor) -> Tensor:
    """Which passages a query is compared with, (Q, B): its own, and those of other queries.

    Args:
        number_Q: tells queries apart.
        number_B: the number of each passage's query.
        target_Q: index of each query's own passage.
    """
    return (number_Q[:, None] != number_B).scatter(1, target_Q[:, None], True)


class ContrastiveLoss(RetrieverLoss):
    """The loss of a batch of pairs.

    Args:
        model: the retriever; called on tokenized texts, gives ``sentence_embedding``.
        group_size: passages per group: a query is compared with those of its own group only. 0:
            with all, of all processes.
        margin: of ``true_negatives``, where the sides have vectors of a ``surrogate``.
        tau, learn_tau, retriever_batch: see RetrieverLoss.
    """

    def __init__(self, model: nn.Module, *, margin: float = 0.0, **shared: Any) -> None:
        super().__init__(model, **shared)
        self.margin = margin

    def forward(self, features: Sequence[dict[str, Any]]) -> Tensor:
        """Loss in nats per query; ``features`` are queries, with the ``target`` index of each, and
        passages. Both may have the ``number`` of their query, and vectors of a ``surrogate``.
        """
        query, passage = ({**side} for side in features)
        target_Q = query.pop("target")
        number_Q, number_B = (side.pop("number", None) for side in (query, passage))
        near_QS, near_BS = (side.pop("surrogate", None) for side in (query, passage))
        query_QD, passage_BD = self.embed(query), self.embed(passage)
        with torch.autocast(query_QD.device.type, enabled=False):
            rules = []
            if self.group_size:
                group_B = torch.arange(len(passage_BD), device=target_Q.device) // self.group_size
                rules.append(group_B == group_B[target_Q][:, None])
            else:
                passage_BD, first = of_all_processes(passage_BD)
                target_Q = target_Q + first
                near_BS = None if near_BS is None else of_all_processes(near_BS)[0]
                number_B = None if number_B is None else of_all_processes(number_B)[0]
            if number_Q is not None and number_B is not None:
                rules.append(other_queries(number_Q, number_B, target_Q))
            if near_QS is not None and near_BS is not None:
                rules.append(true_negatives(near_QS, near_BS, target_Q, self.margin))
            allowed_QB = torch.stack(rules).all(dim=0) if rules else None
            return info_nce(query_QD, passage_BD, target_Q, self.tau, allowed_QB)


def of_all_processes(vectors_BD: Tensor) -> tuple[Tensor, int]:
    """Everyone's vectors, in the order of processes and with their gradient, and where one's own
    begin; each process must bring B.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return vectors_BD, 0
    from torch.distributed.nn.functional import all_gather

    gathered = all_gather(vectors_BD)  # type: ignore[no-untyped-call]
    return torch.cat(gathered), distributed.get_rank() * len(vectors_BD)
