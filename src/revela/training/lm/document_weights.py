"""Weights of documents by run of query rows, and the rows that attend to each document
(document_attention.py).

Shapes: A runs of rows, T rows in all; B documents packed into S tokens; R rows that attend to a
document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from revela.training.device import fetched, on_cpu, sent

DENSE = 0.8  # share of the runs; a document that more of them attend to is computed for all rows


@dataclass(frozen=True)
class AttendingRows:
    """A document's index and tokens, and the R rows that attend to it.

    ``rows_R`` None: all T rows. Rows that are not kept have a weight of 0.
    """

    index: int
    tokens: slice
    rows_R: Tensor | None
    run_R: Tensor
    is_kept_R: Tensor
    weight_R1: Tensor


@dataclass(frozen=True)
class Pairs:
    """The (run, document) pairs that have weight, one after another, for variable-length attention.

    row_R, cell_R: the row of each query, and its weight's index among the A x B; token_K: the token
    of each key. The bounds say where each pair starts among the R and the K, and where the last one
    ends; ``most_rows`` and ``most_tokens`` are the lengths of the longest.
    """

    row_R: Tensor
    cell_R: Tensor
    token_K: Tensor
    row_bounds: Tensor
    token_bounds: Tensor
    most_rows: int
    most_tokens: int


class DocumentWeights:
    """The weight of each document for each run of rows, made once for all layers of a step.

    Args:
        weights_AB: w_j for every row of run i. Carries the gradient to the retriever.
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
        # On its way to the host while the GPU computes what comes before the first mixed layer.
        self._is_kept_on_host = fetched(weights_AB.detach() > epsilon)

    @cached_property
    def run_T(self) -> Tensor:
        """The run of each row."""
        return sent(torch.repeat_interleave(torch.tensor(self.rows)), self.weights_AB.device)

    @cached_property
    def kept_AB(self) -> Tensor:
        """The weights above ``epsilon``, without a gradient, and 0 for the others."""
        weights_AB = self.weights_AB.detach()
        return (weights_AB * (weights_AB > self.epsilon)).contiguous()

    @cached_property
    def pairs(self) -> Pairs:
        """The pairs that have weight. Synchronises with a GPU."""
        run_P, document_P = self._is_kept_on_host().nonzero().unbind(1)
        rows_A, tokens_B = torch.tensor(self.rows), torch.tensor(self.lengths)
        row_R, row_bounds = _ranges(rows_A, run_P)
        token_K, token_bounds = _ranges(tokens_B, document_P)
        cell_R = (run_P * len(self.lengths) + document_P).repeat_interleave(rows_A[run_P])
        device = self.kept_AB.device
        return Pairs(
            *(sent(row_R, device), sent(cell_R, device), sent(token_K, device)),
            *(sent(row_bounds.int(), device), sent(token_bounds.int(), device)),
            *(max(self.rows), max(self.lengths)),
        )

    @cached_property
    def attending(self) -> list[AttendingRows]:
        """The documents that some run keeps, and their rows. Synchronises with a GPU."""
        is_kept_AB, on_host_AB = self.kept_AB > 0, self._is_kept_on_host()
        runs_B = on_host_AB.sum(dim=0).tolist()
        sparse = [j for j, runs in enumerate(runs_B) if 0 < runs < DENSE * len(self.rows)]
        selected_rows = dict[int, Tensor]()
        if sparse:
            rows = [on_host_AB[on_cpu(self.run_T), j].nonzero().squeeze(1) for j in sparse]
            flat = sent(torch.cat(rows), self.kept_AB.device)
            parts = torch.split(flat, [len(rows_R) for rows_R in rows])
            selected_rows = dict(zip(sparse, parts, strict=True))
        attending, end = [], 0
        for j, length in enumerate(self.lengths):
            start, end = end, end + length
            if runs_B[j]:
                rows_R = selected_rows.get(j)
                run_R = self.run_T if rows_R is None else self.run_T[rows_R]
                kept_R, weight_R1 = is_kept_AB[:, j][run_R], self.kept_AB[:, j][run_R][:, None]
                attending.append(
                    AttendingRows(j, slice(start, end), rows_R, run_R, kept_R, weight_R1)
                )
        return attending


def _ranges(lengths: Tensor, chosen_P: Tensor) -> tuple[Tensor, Tensor]:
    """The indices of these sequences, one sequence after another, and the bounds of each (P + 1,).

    >>> _ranges(torch.tensor([2, 3, 1]), torch.tensor([2, 1, 2]))
    (tensor([5, 2, 3, 4, 5]), tensor([0, 1, 4, 5]))
    """
    starts_P = (lengths.cumsum(0) - lengths)[chosen_P]
    bounds = F.pad(lengths[chosen_P].cumsum(0), (1, 0))
    offsets = (starts_P - bounds[:-1]).repeat_interleave(lengths[chosen_P])
    return torch.arange(int(bounds[-1])) + offsets, bounds
