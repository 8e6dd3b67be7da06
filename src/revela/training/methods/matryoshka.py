"""Matryoshka representations (Kusupati et al., NeurIPS 2022), for any objective: vectors that may
be truncated.

    L = L_m( first m numbers of each vector ),   m drawn uniformly from the widths per batch

- L_m: the objective's loss.
- widths: those requested, and the full one.

Kusupati et al. sum the losses at all widths. The drawn loss has the gradient of that sum on
average, divided by the number of widths. It costs nothing; the sum would run the LM once per width.
In return the loss jumps from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from revela.training.methods.base import Side
from revela.training.retriever.module import RetrieverModule


class Matryoshka(nn.Module):
    """An objective whose retriever's vectors are truncated to one of ``widths``, drawn per batch.

    The widths include the full one.
    """

    def __init__(
        self, objective: nn.Module, retriever: RetrieverModule, widths: Sequence[int]
    ) -> None:
        super().__init__()
        self.objective, self.retriever, self.widths = objective, retriever, list(widths)

    def forward(self, features: Sequence[Side]) -> Tensor:
        """The objective's loss at one width."""
        # Kept until the next batch: a backward pass may run the retriever again.
        self.retriever.width = self.widths[int(torch.randint(len(self.widths), ()))]
        loss: Tensor = self.objective(features)
        return loss
