"""Contrastive objectives: a query and its passage against the other passages.

    L = -mean_i log softmax_j( cos(q_i, d_j) / tau )  at j = target(i)

- InfoNCE on queries that were written or taken from the text (DREAM's control): a chunk's query
  should find the chunk among the chunks of its group.
- Random crops (Contriever; Izacard et al., TMLR 2022; Dwell in the Beginning, eq. 1): one crop of a
  text should find another.

For those who have some labels, InfoNCE also takes judged queries (``--pairs``); passages are whole
documents then. Beside its group's passages a query may get hard negatives, which BM25, and later
the retriever itself, ranks high for it and which do not answer it (``--negatives``; ANCE; stage 3
of Dwell in the Beginning): training/negatives.py mines them.

Passages of the same query are left out of the softmax (the chunks of a document, asked for by its
title; all documents that are judged relevant), and so may be those that a surrogate model finds as
near to a query as its own (false negatives; CDE, section 4.1).

Cost: the retriever reads both sides; no LM. Texts are embedded a few at a time (gradcache.py), so a
batch is limited by time, not by memory; every process sees the crops of all.
When to use it: InfoNCE on docstrings and titles for code (preset ``pairs``), or where queries are
judged; crops as a baseline.

Shapes: Q queries, B passages, D width of a vector, S width of a surrogate's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revela.corpus.words import joined, words
from revela.objectives.base import Batch, BuildContext, Collate, RetrieverLoss, Row, row_random
from revela.queries.from_text import query_hash
from revela.settings import Crop, InfoNCE
from revela.types import Encoder

MIN_WORDS = 3  # of a crop


def build(settings: InfoNCE | Crop, parts: BuildContext) -> tuple[nn.Module, Collate]:
    """The loss of ``infonce`` or ``crop``, and what makes its batches."""
    batch = parts.recipe.training.retriever_batch
    loss = ContrastiveLoss(parts.model, tau=settings.tau, retriever_batch=batch)
    if isinstance(settings, Crop):
        return loss, CropBatches(parts, surrogate(parts), settings)
    return loss, QueryBatches(parts, surrogate(parts))


def surrogate(parts: BuildContext) -> Encoder | None:
    """What finds false negatives, if the recipe names it."""
    from revela.model_files import find_weights
    from revela.retriever.load import load_encoder

    groups = parts.recipe.groups
    if not groups.surrogate:
        return None
    folder = find_weights(groups.surrogate, "")
    return load_encoder(folder, parts.recipe.training.precision, groups.surrogate_tokens)


@dataclass(frozen=True)
class PairBatches:
    """Both sides of pairs, with their vectors by a ``surrogate`` if there is one."""

    parts: BuildContext
    surrogate: Encoder | None

    def sides(self, queries: Sequence[str], passages: Sequence[str]) -> Batch:
        batch = self.parts.sides(queries, passages)
        if self.surrogate is not None:
            batch["query_surrogate"] = torch.from_numpy(self.surrogate.encode_queries(queries))
            batch["passage_surrogate"] = torch.from_numpy(self.surrogate.encode_passages(passages))
        return batch


class QueryBatches(PairBatches):
    """The queries of a batch, each with the index of its passage and what it is compared with; and
    all passages: those of the groups, then those mined for their queries.
    """

    def __call__(self, rows: Sequence[Row]) -> Batch:
        size = self.parts.recipe.groups.group_size
        mined = list(self._mined(rows, size))
        passages = [*rows, *(row for _, row in mined)]
        having = [i for i, row in enumerate(rows) if row["query"]]
        batch = self.sides([rows[i]["query"] for i in having], [row["text"] for row in passages])
        target_Q = torch.tensor(having)
        group_B = [*(i // size for i in range(len(rows))), *(group for group, _ in mined)]
        number_B = torch.tensor([query_hash(row["query"]) for row in passages])
        allowed_QB = compared(target_Q, torch.tensor(group_B), number_B)
        if self.parts.relevant:
            allowed_QB &= ~self._answers(number_B[having], passages).scatter(
                1, target_Q[:, None], False
            )
        return {**batch, "query_target": target_Q, "query_allowed": allowed_QB}

    def _mined(self, rows: Sequence[Row], size: int) -> Iterator[tuple[int, Row]]:
        """(group, row) of what is mined for the queries of each group, a text once per group."""
        if self.parts.mined is None:
            return
        found = self.parts.mined(rows)
        for start in range(0, len(rows), size):
            known = {row["text"] for row in rows[start : start + size]}
            for index in chain.from_iterable(found[start : start + size]):
                chunk = self.parts.rows[index]
                if chunk.text not in known:
                    known.add(chunk.text)
                    row = {"document": chunk.document, "text": chunk.text, "query": chunk.query}
                    yield start // size, row

    def _answers(self, number_Q: Tensor, passages: Sequence[Row]) -> Tensor:
        """Which passages are of a document that is relevant to a query, (Q, B)."""
        relevant = [self.parts.relevant.get(number, ()) for number in number_Q.tolist()]
        return torch.tensor([[row["document"] in found for row in passages] for found in relevant])


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
        first, second = (crop(row["text"], *s.crop_shares, s.crop_deletion, draw) for _ in range(2))
        return first, second


def crop(text: str, least: float, most: float, deletion: float, rng: random.Random) -> str:
    """A random run of a text's words, some of them left out.

    Args:
        text: its words are those of corpus/words.py.
        least, most: the run's share of the words is uniform between these; it has ``MIN_WORDS``
            words at least.
        deletion: chance of each word to be left out.
    """
    some = words(text)
    length = min(len(some), max(MIN_WORDS, round(rng.uniform(least, most) * len(some))))
    start = rng.randint(0, len(some) - length)
    run = some[start : start + length]
    return joined([word for word in run if rng.random() >= deletion] or run)


def info_nce(
    query_QD: Tensor,
    passage_BD: Tensor,
    target_Q: Tensor,
    tau: float | Tensor,
    allowed_QB: Tensor | None = None,
) -> Tensor:
    """Mean cross-entropy (nats) of finding each query's passage, ``target_Q``, by cosine, among
    those that it is compared with, ``allowed_QB`` or all; vectors of any norm.
    """
    scores_QB = F.normalize(query_QD, dim=-1) @ F.normalize(passage_BD, dim=-1).T / tau
    if allowed_QB is not None:
        scores_QB = scores_QB.masked_fill(~allowed_QB, -torch.inf)
    return F.cross_entropy(scores_QB, target_Q)


def true_negatives(query_QS: Tensor, passage_BS: Tensor, target_Q: Tensor) -> Tensor:
    """Which passages a query is compared with, (Q, B): its own, and every j with f(q, d_j) < f(q,
    d_own), where f is the dot product of the surrogate's vectors (CDE).
    """
    scores_QB = query_QS @ passage_BS.T
    own_Q1 = target_Q[:, None]
    return (scores_QB < scores_QB.gather(1, own_Q1)).scatter(1, own_Q1, True)


def compared(target_Q: Tensor, group_B: Tensor, number_B: Tensor) -> Tensor:
    """Which passages a query is compared with, (Q, B): its own, and those of its group that are of
    another query, or of none; ``number_B`` tells the queries of passages apart.
    """
    own_Q1 = target_Q[:, None]
    return ((group_B[own_Q1] == group_B) & (number_B[own_Q1] != number_B)).scatter(1, own_Q1, True)


class ContrastiveLoss(RetrieverLoss):
    """The loss of a batch of pairs; arguments as for RetrieverLoss."""

    def forward(self, features: Sequence[dict[str, Any]]) -> Tensor:
        """Loss in nats per query; ``features`` are queries, with the ``target`` index of each, and
        passages. Both may have vectors of a ``surrogate``. The queries may have ``allowed``, which
        passages each is compared with, (Q, B); without it, with all, of all processes.
        """
        query, passage = ({**side} for side in features)
        target_Q, allowed_QB = query.pop("target"), query.pop("allowed", None)
        near_QS, near_BS = (side.pop("surrogate", None) for side in (query, passage))
        query_QD, passage_BD = self.embed(query), self.embed(passage)
        with torch.autocast(query_QD.device.type, enabled=False):
            if allowed_QB is None:
                passage_BD, first = of_all_processes(passage_BD)
                target_Q = target_Q + first
                near_BS = None if near_BS is None else of_all_processes(near_BS)[0]
            if near_QS is not None and near_BS is not None:
                true_QB = true_negatives(near_QS, near_BS, target_Q)
                allowed_QB = true_QB if allowed_QB is None else allowed_QB & true_QB
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
