"""Matryoshka representations (Kusupati et al., NeurIPS 2022), for any method: vectors that may be
truncated.

    L = L_m( first m numbers of each vector ),   m drawn uniformly from the widths per batch

- L_m: the method's loss.
- widths: those requested, and the full one.

Kusupati et al. sum the losses at all widths. The drawn loss has the gradient of that sum on
average, divided by the number of widths. It costs nothing; the sum would run the LM once per width.
In return the loss jumps from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from revela.errors import RevelaError
from revela.training.methods.base import Side

if TYPE_CHECKING:
    from revela.training.retriever.module import RetrieverModule


def at_widths(loss: nn.Module, retriever: RetrieverModule, widths: Sequence[int]) -> Matryoshka:
    """The loss at these widths and the full one.

    Raises:
        RevelaError: a width is not narrower, or the retriever is a table of words.
    """
    if retriever.is_table:
        raise RevelaError(
            "--matryoshka has no use for a static retriever, whose vectors begin with the rows "
            "that are not trained: leave it out"
        )
    full = retriever.dimension
    if bad := [width for width in widths if not 0 < width < full]:
        raise RevelaError(
            f"--matryoshka {bad[0]}: the vectors of this retriever have {full} numbers, "
            f"give widths from 1 to {full - 1}"
        )
    return Matryoshka(loss, retriever, [*widths, full])


class Matryoshka(nn.Module):
    """The loss of vectors that are truncated to one of ``widths``, drawn per batch.

    The widths include the full one.
    """

    def __init__(self, loss: nn.Module, retriever: RetrieverModule, widths: Sequence[int]) -> None:
        super().__init__()
        self.loss, self.retriever, self.widths = loss, retriever, list(widths)

    def forward(self, features: Sequence[Side]) -> Tensor:
        """The loss at one width."""
        # Kept until the next batch: a backward pass may run the retriever again.
        self.retriever.width = self.widths[int(torch.randint(len(self.widths), ()))]
        loss: Tensor = self.loss(features)
        return loss
