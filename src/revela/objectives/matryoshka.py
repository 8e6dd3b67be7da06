"""Vectors whose first numbers are vectors as well (matryoshka representations; Kusupati et al.,
NeurIPS 2022), for any objective here.

Each batch trains one width, drawn from those that are wanted and the whole one: the objective reads
vectors that end there. Kusupati et al. add the losses at all widths. What is drawn has that sum's
gradient on average, up to a factor, and costs nothing, where the sum would have the LM read
everything once per width. The price is a loss that jumps from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Matryoshka(nn.Module):
    """An objective on vectors cut to one of these widths, drawn anew per batch. The whole width
    should be among them; the objective brings vectors to unit length itself, as all here do.
    """

    def __init__(self, objective: nn.Module, widths: Sequence[int]) -> None:
        super().__init__()
        self.objective, self.widths = objective, list(widths)
        objective.model = Shortened(objective.model)  # type: ignore[arg-type]

    def forward(self, features: Sequence[dict[str, Any]]) -> Tensor:
        """The objective's loss of this batch at one width."""
        model: Any = self.objective.model
        # Until the next batch: a backward pass may read again.
        model.width = self.widths[int(torch.randint(len(self.widths), ()))]
        loss: Tensor = self.objective(features)
        return loss


class Shortened(nn.Module):
    """A retriever whose vectors end after ``width`` numbers."""

    width: int

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        out: dict[str, Any] = self.model(features)
        return {**out, "sentence_embedding": out["sentence_embedding"][..., : self.width]}
