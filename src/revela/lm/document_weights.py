"""Who reads which document, and by what weight: for all layers of a step, found once.

Shapes: A runs of rows, T rows in all; B documents packed into S tokens; R rows that attend to one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from revela.device import on_cpu, sent

EPSILON = 1e-4  # objectives skip pairs with no more weight
NEARLY_ALL = 0.8  # of the runs: from this share on, all rows are computed and none are picked out


@dataclass(frozen=True)
class Readers:
    """One document, and the rows that attend to it.

    ``rows_R`` is None if all rows are computed, which saves picking them out; those that are not
    kept have a weight of 0.
    """

    index: int
    tokens: slice
    rows_R: Tensor | None
    run_R: Tensor
    is_kept_R: Tensor
    weight_R1: Tensor


class DocumentWeights:
    """How much each run of rows takes of each document: made once for all layers of a step, as
    finding who takes how much waits for a GPU.

    Args:
        weights_AB: weight of document j for every row of run i. Carries the gradient to the
            retriever.
        lengths: tokens per document, B numbers that sum to S.
        rows: rows per run, A numbers that sum to T. None: the runs are the documents.
        epsilon: skip pairs with a weight <= epsilon; they get no gradient. 0 skips exact zeros.
    """

    def __init__(
        self,
        weights_AB: Tensor,
        lengths: Sequence[int],
        rows: Sequence[int] | None = None,
        epsilon: float = 0.0,
    ) -> None:
        self.weights_AB, self.epsilon = weights_AB, epsilon
        self.lengths, self.rows = tuple(lengths), tuple(lengths if rows is None else rows)

    @cached_property
    def run_T(self) -> Tensor:
        """The run of each row."""
        return sent(torch.repeat_interleave(torch.tensor(self.rows)), self.weights_AB.device)

    @cached_property
    def bounds(self) -> Tensor:
        """Where each document begins among the S tokens, and where the last one ends, (B + 1,)."""
        return sent(torch.tensor([0, *self.lengths]).cumsum(0), self.weights_AB.device)

    @cached_property
    def kept_AB(self) -> Tensor:
        """The weights above ``epsilon``, without a gradient, and 0 for the others."""
        weights_AB = self.weights_AB.detach()
        return (weights_AB * (weights_AB > self.epsilon)).contiguous()

    @cached_property
    def slot_AB(self) -> Tensor:
        """The place of each document among those that its run keeps."""
        return (self.kept_AB > 0).cumsum(dim=1) - 1

    @cached_property
    def slots(self) -> int:
        """The most documents that a run keeps, or 1; it waits for a GPU."""
        return max(1, int(on_cpu(self.slot_AB.max())) + 1)

    @cached_property
    def readers(self) -> list[Readers]:
        """The documents that some run gives a weight above ``epsilon``, and the rows that read
        them.
        """
        kept_AB = self.kept_AB
        is_kept_AB = kept_AB > 0
        on_host_AB = on_cpu(is_kept_AB)  # the one wait
        runs_B = on_host_AB.sum(dim=0).tolist()
        nearly_all = NEARLY_ALL * len(self.rows)
        few = [j for j, n in enumerate(runs_B) if 0 < n < nearly_all]
        of_few = [on_host_AB[on_cpu(self.run_T), j].nonzero().squeeze(1) for j in few]
        rows_of = {}
        if few:
            flat = sent(torch.cat(of_few), kept_AB.device)
            rows_of = dict(zip(few, torch.split(flat, list(map(len, of_few))), strict=True))
        found, end = [], 0
        for j, length in enumerate(self.lengths):
            start, end = end, end + length
            if runs_B[j]:
                rows_R = rows_of.get(j)
                run_R = self.run_T if rows_R is None else self.run_T[rows_R]
                kept_R, weight_R1 = is_kept_AB[:, j][run_R], kept_AB[:, j][run_R][:, None]
                found.append(Readers(j, slice(start, end), rows_R, run_R, kept_R, weight_R1))
        return found
