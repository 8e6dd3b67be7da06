"""Contrastive objectives: a query should find its passage among other passages.

    L = -mean_i log softmax_j( cos(q_i, d_j) / tau )  at j = target(i)

- q_i, d_j: vectors of query i and passage j.
- target(i): the passage of query i. The other passages that the softmax is over are negatives.

InfoNCE (the control of DREAM): a query that was written for a chunk or taken from it should find it
among the chunks of its group. Groups weigh the same, however many queries they have. Queries may
also be judged (``--pairs``); passages are then whole documents. Hard negatives may be added
(``--negatives``; ANCE; stage 3 of Dwell in the Beginning): BM25, and later the retriever, ranks
them high for the query, but they do not answer it. training/negatives.py mines them.

Random crops (Contriever; Izacard et al., TMLR 2022; Dwell in the Beginning, eq. 1): a crop of a
text finds another crop of it among the crops of all texts of the batch.

False negatives are left out of the softmax: passages of the same query (the chunks of a document
with the title as query, all judged relevant documents), and those that a surrogate model scores at
least as high as the query's own (CDE, section 4.1).

Cost: the retriever reads both sides; no LM. Texts are embedded a few at a time (GradCache), so
time limits a batch, not memory. Crops are compared across processes.
When to use it: InfoNCE on docstrings and titles for code (preset ``pairs``), or with judged
queries; crops as a baseline.

Shapes: Q queries, B passages, D width of a vector, S width of a surrogate's vector.
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

from revela.encoders.base import TextEncoder
from revela.ranking.queries import query_hash
from revela.text.words import joined, words
from revela.training.distributed import rank, world_size
from revela.training.groups.order import load_surrogate
from revela.training.methods.base import (
    Batch,
    BuildContext,
    Collate,
    RetrieverLoss,
    Row,
    group_weights,
    row_random,
)
from revela.training.settings import Crop, InfoNCE

MIN_WORDS = 3  # of a crop


def build(settings: InfoNCE | Crop, parts: BuildContext) -> tuple[nn.Module, Collate]:
    """The loss of ``infonce`` or ``crop`` and its collator."""
    training, name = parts.recipe.training, parts.recipe.groups.surrogate
    loss = ContrastiveLoss(parts.model, tau=settings.tau, retriever_batch=training.retriever_batch)
    surrogate = load_surrogate(name, training.precision) if name else None
    if isinstance(settings, Crop):
        return loss, CropBatches(parts, surrogate, settings)
    return loss, QueryBatches(parts, surrogate)


@dataclass(frozen=True)
class PairBatches:
    """Tokenized pairs, with vectors by the ``surrogate`` if there is one."""

    parts: BuildContext
    surrogate: TextEncoder | None

    def sides(self, queries: Sequence[str], passages: Sequence[str]) -> Batch:
        batch = self.parts.sides(queries, passages)
        if self.surrogate is not None:
            batch["query_surrogate"] = torch.from_numpy(self.surrogate.encode_queries(queries))
            batch["passage_surrogate"] = torch.from_numpy(self.surrogate.encode_passages(passages))
        return batch


class QueryBatches(PairBatches):
    """Collates queries and passages: those of the groups, then the mined ones. A query has the
    index of its passage, and a mask of allowed passages.
    """

    def __call__(self, rows: Sequence[Row]) -> Batch:
        size = self.parts.recipe.groups.group_size
        mined = list(self._mined(rows, size))
        passages = [*rows, *(row for _, row in mined)]
        has_query = [i for i, row in enumerate(rows) if row["query"]]
        batch = self.sides([rows[i]["query"] for i in has_query], [row["text"] for row in passages])
        target_Q = torch.tensor(has_query)
        weight_Q = group_weights([i // size for i in has_query])
        group_B = [*(i // size for i in range(len(rows))), *(group for group, _ in mined)]
        hash_B = torch.tensor([query_hash(row["query"]) for row in passages])
        allowed_QB = comparison_mask(target_Q, torch.tensor(group_B), hash_B)
        if self.parts.relevant:
            allowed_QB &= ~self._answers(hash_B[has_query], passages).scatter(
                1, target_Q[:, None], False
            )
        own = {"target": target_Q, "weight": weight_Q, "allowed": allowed_QB}
        return {**batch, **{f"query_{name}": tensor for name, tensor in own.items()}}

    def _mined(self, rows: Sequence[Row], size: int) -> Iterator[tuple[int, Row]]:
        """(group, row) of the mined negatives of each group, each text once per group."""
        if self.parts.mined is None:
            return
        mined = self.parts.mined(rows)
        for start in range(0, len(rows), size):
            seen = {row["text"] for row in rows[start : start + size]}
            for index in chain.from_iterable(mined[start : start + size]):
                chunk = self.parts.rows[index]
                if chunk.text not in seen:
                    seen.add(chunk.text)
                    row = {"document": chunk.document, "text": chunk.text, "query": chunk.query}
                    yield start // size, row

    def _answers(self, hash_Q: Tensor, passages: Sequence[Row]) -> Tensor:
        """(Q, B) whether a passage is of a document that is relevant to a query."""
        relevant = [self.parts.relevant.get(query, ()) for query in hash_Q.tolist()]
        return torch.tensor([[row["document"] in ids for row in passages] for ids in relevant])


@dataclass(frozen=True)
class CropBatches(PairBatches):
    """Collates two independent crops of each text, drawn by row and epoch."""

    settings: Crop

    def __call__(self, rows: Sequence[Row]) -> Batch:
        crops = [self._crops(row) for row in rows]
        first, second = zip(*crops, strict=True)
        return {**self.sides(first, second), "query_target": torch.arange(len(rows))}

    def _crops(self, row: Row) -> tuple[str, str]:
        rng, s = row_random(row, self.parts.recipe.training.seed), self.settings
        first, second = (crop(row["text"], *s.crop_shares, s.crop_deletion, rng) for _ in range(2))
        return first, second


def crop(text: str, low: float, high: float, deletion: float, rng: random.Random) -> str:
    """A random run of a text's words, some of them deleted.

    Args:
        text: cut into words by text/words.py.
        low, high: the run's share of the words is uniform between these, but at least
            ``MIN_WORDS`` words.
        deletion: probability of each word to be deleted.
    """
    all_words = words(text)
    total = len(all_words)
    length = min(total, max(MIN_WORDS, round(rng.uniform(low, high) * total)))
    start = rng.randint(0, total - length)
    run = all_words[start : start + length]
    return joined([word for word in run if rng.random() >= deletion] or run)


def info_nce(
    query_QD: Tensor,
    passage_BD: Tensor,
    target_Q: Tensor,
    tau: float | Tensor,
    allowed_QB: Tensor | None = None,
    weight_Q: Tensor | None = None,
) -> Tensor:
    """L in nats, over the ``allowed_QB`` passages or all, of unit vectors. ``weight_Q`` is each
    query's share in the mean; None: all are equal.
    """
    scores_QB = query_QD @ passage_BD.T / tau
    if allowed_QB is not None:
        scores_QB = scores_QB.masked_fill(~allowed_QB, -torch.inf)
    if weight_Q is None:
        return F.cross_entropy(scores_QB, target_Q)
    return F.cross_entropy(scores_QB, target_Q, reduction="none") @ weight_Q


def true_negative_mask(query_QS: Tensor, passage_BS: Tensor, target_Q: Tensor) -> Tensor:
    """(Q, B) allowed passages: a query's own, and every j with f(q, d_j) < f(q, d_own), where f is
    the dot product of the surrogate's vectors (CDE).
    """
    scores_QB = query_QS @ passage_BS.T
    own_Q1 = target_Q[:, None]
    return (scores_QB < scores_QB.gather(1, own_Q1)).scatter(1, own_Q1, True)


def comparison_mask(target_Q: Tensor, group_B: Tensor, hash_B: Tensor) -> Tensor:
    """(Q, B) allowed passages: a query's own, and those of its group with another query or none.

    ``hash_B`` identifies the query of each passage.
    """
    own_Q1 = target_Q[:, None]
    return ((group_B[own_Q1] == group_B) & (hash_B[own_Q1] != hash_B)).scatter(1, own_Q1, True)


class ContrastiveLoss(RetrieverLoss):
    """The loss of a batch of pairs; arguments as for RetrieverLoss."""

    def forward(self, features: Sequence[dict[str, Any]]) -> Tensor:
        """Loss in nats per query.

        Args:
            features: queries, with ``target``, the index of each query's passage, and passages.
                Optional: vectors of both by a ``surrogate``; ``allowed``, a (Q, B) mask of the
                passages that the softmax is over, by default those of all processes; ``weight``,
                each query's share in the mean.
        """
        query, passage = ({**side} for side in features)
        target_Q, allowed_QB = query.pop("target"), query.pop("allowed", None)
        weight_Q = query.pop("weight", None)
        surrogate_QS, surrogate_BS = (side.pop("surrogate", None) for side in (query, passage))
        query_QD, passage_BD = self.embed(query), self.embed(passage)
        if allowed_QB is None:
            passage_BD, first = gather_from_ranks(passage_BD)
            target_Q = target_Q + first
            surrogate_BS = None if surrogate_BS is None else gather_from_ranks(surrogate_BS)[0]
        if surrogate_QS is not None and surrogate_BS is not None:
            true_QB = true_negative_mask(surrogate_QS, surrogate_BS, target_Q)
            allowed_QB = true_QB if allowed_QB is None else allowed_QB & true_QB
        return info_nce(query_QD, passage_BD, target_Q, self.tau, allowed_QB, weight_Q)


def gather_from_ranks(vectors_BD: Tensor) -> tuple[Tensor, int]:
    """The vectors of all processes by rank, with gradient, and the index of one's own first.

    Every process must have the same number of vectors.
    """
    if world_size() == 1:
        return vectors_BD, 0
    from torch.distributed.nn.functional import all_gather

    gathered = all_gather(vectors_BD)  # type: ignore[no-untyped-call]
    return torch.cat(gathered), rank() * len(vectors_BD)
