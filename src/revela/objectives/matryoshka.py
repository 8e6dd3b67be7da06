"""Matryoshka representations (Kusupati et al., NeurIPS 2022), for any objective: vectors that may
be truncated.

    L = L_m( first m numbers of each vector ),   m drawn uniformly from the widths per batch

- L_m: the objective's loss.
- widths: those requested, and the full one.

Kusupati et al. sum the losses at all widths. The drawn loss has the gradient of that sum on
average, divided by the number of widths. It costs nothing, whereas the sum has the LM read
everything once per width. In return the loss jumps from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Matryoshka(nn.Module):
    """An objective on vectors truncated to one of ``widths``, drawn per batch.

    The widths include the full one. The objective normalises the vectors itself.
    """

    def __init__(self, objective: nn.Module, widths: Sequence[int]) -> None:
        super().__init__()
        self.objective, self.widths = objective, list(widths)
        objective.model = Truncated(objective.model)  # type: ignore[arg-type]

    def forward(self, features: Sequence[dict[str, Any]]) -> Tensor:
        """The objective's loss at one width."""
        model: Any = self.objective.model
        # Kept until the next batch: a backward pass may run the retriever again.
        model.width = self.widths[int(torch.randint(len(self.widths), ()))]
        loss: Tensor = self.objective(features)
        return loss


class Truncated(nn.Module):
    """A retriever with vectors truncated to ``width``."""

    width: int

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        out: dict[str, Any] = self.model(features)
        return {**out, "sentence_embedding": out["sentence_embedding"][..., : self.width]}
