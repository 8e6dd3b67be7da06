"""Contrastive objectives without labels: a query and its passage against the other passages of the
batch.

- InfoNCE on generated queries (DREAM's control): a chunk's question should find the chunk among the
  chunks of its group.
- Random crops (Contriever; Izacard et al., TMLR 2022; Dwell in the Beginning, eq. 1): one crop of a
  text should find another.

Both are L = -mean_i log softmax_j(cos(q_i, d_j) / tau) at j = target(i). The texts are embedded a
few at a time (gradcache.py), so a batch is limited by time, not by memory, and every process sees
the passages of all.

Passages that a surrogate model finds as near to a query as its own may be left out (false
negatives; CDE, section 4.1).

Shapes: Q queries, B passages, D width of a vector, S width of a surrogate's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revela.objectives.gradcache import embed


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


class Contrastive(nn.Module):
    """The objective as Sentence Transformers' trainer hosts it.

    Args:
        model: the retriever; called on tokenized features, gives ``sentence_embedding``.
        tau: temperature; ``learn_tau`` makes it a parameter (kept positive by its logarithm).
        retriever_batch: texts that the retriever reads at a time; see gradcache.embed.
        group_size: passages a group: a query is compared with those of its own group only. 0: with
            all, of all processes.
        margin: of ``true_negatives``, where the sides bring vectors of a ``surrogate``.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        tau: float,
        learn_tau: bool = False,
        retriever_batch: int = 0,
        group_size: int = 0,
        margin: float = 0.0,
    ) -> None:
        super().__init__()
        self.model = model
        self.retriever_batch, self.group_size, self.margin = retriever_batch, group_size, margin
        self.log_tau = nn.Parameter(torch.tensor(math.log(tau)), requires_grad=learn_tau)

    def forward(self, features: Sequence[dict[str, Any]], labels: Tensor | None = None) -> Tensor:
        """Loss (nats a query); ``features`` are queries, with the ``target`` index of each, and
        passages.
        """
        query, passage = features
        target_Q, near_QS, near_BS = (
            query["target"],
            query.get("surrogate"),
            passage.get("surrogate"),
        )
        query_QD, passage_BD = (
            embed(
                self.model,
                {k: v for k, v in side.items() if k not in ("target", "surrogate")},
                self.retriever_batch,
            )
            for side in (query, passage)
        )
        with torch.autocast(query_QD.device.type, enabled=False):
            rules = []
            if self.group_size:
                group_B = torch.arange(len(passage_BD), device=target_Q.device) // self.group_size
                rules.append(group_B == group_B[target_Q][:, None])
            else:
                passage_BD, first = of_all_processes(passage_BD)
                target_Q = target_Q + first
                near_BS = None if near_BS is None else of_all_processes(near_BS)[0]
            if near_QS is not None and near_BS is not None:
                rules.append(true_negatives(near_QS, near_BS, target_Q, self.margin))
            allowed_QB = torch.stack(rules).all(dim=0) if rules else None
            return info_nce(query_QD, passage_BD, target_Q, self.log_tau.exp(), allowed_QB)


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
