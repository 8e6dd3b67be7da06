"""An objective of your own: chunks of one document should be near to each other.

    python examples/own_objective.py docs/ my-retriever

An objective is its settings (a frozen dataclass), how a batch is made, and a loss.
docs/objectives.md explains the parts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from revela import Retriever
from revela.objectives.base import Parts, RetrieverLoss, Row
from revela.settings import Objective, setting


@dataclass(frozen=True)
class Neighbours(Objective):
    """A chunk should be nearer to the chunks of its document than to others."""

    name = "neighbours"
    learned_from = "{model} learned which chunks are of one document."

    tau: float = setting(0.1, above=0)
    "Temperature of the cosines."

    def build(self, parts: Parts) -> tuple[Any, Any]:
        def batch(rows: Sequence[Row]) -> dict[str, Tensor]:
            texts = [row["text"] for row in rows]
            documents = torch.tensor([row["document"] for row in rows])
            return {**parts.sides(texts, texts), "query_document": documents}

        size = parts.recipe.groups.group_size
        return NeighboursLoss(parts.model, tau=self.tau, group_size=size), batch


class NeighboursLoss(RetrieverLoss):
    def forward(self, sides: Sequence[dict[str, Tensor]]) -> Tensor:
        query, passage = ({**side} for side in sides)
        documents, losses = self.groups(query.pop("document")), []
        for cosine, document in zip(self.cosines(query, passage), documents, strict=True):
            same = (document[:, None] == document).float().fill_diagonal_(0)
            scores = (cosine / self.tau).fill_diagonal_(-1e4)
            losses.append(-(F.log_softmax(scores, dim=1) * same).sum() / same.sum().clamp(min=1))
        return torch.stack(losses).mean()


if __name__ == "__main__":
    Retriever.train(sys.argv[1], sys.argv[2], objective=Neighbours(tau=0.05), max_minutes=5)
