"""Document attention as variable-length flash attention, for a GPU in bf16.

The sum of document_attention.py with one sequence per (run, document) pair that has weight: its
queries are the rows of the run, its keys and values the tokens of the document. With V-norm, the
norm of each value is one more column of the values, so that the same call gives its
attention-weighted mean. Outputs are V-normalised, weighted and added up in fp32.

The backward pass computes the pairs again, so memory grows with the tokens and not with the pairs.

Shapes: A runs of rows, T rows in all; B documents packed into S tokens; R rows and K tokens of all
pairs; H query heads, G key-value heads, D head width, W a multiple of 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from revela.training.device import sent


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


def pairs_of(
    is_kept_AB: Tensor, rows: Sequence[int], lengths: Sequence[int], device: torch.device
) -> Pairs:
    """The pairs that have weight.

    Args:
        is_kept_AB: whether a pair has weight, on the CPU.
        rows: rows per run, A numbers that sum to T.
        lengths: tokens per document, B numbers that sum to S.
        device: of the result.
    """
    run_P, document_P = is_kept_AB.nonzero().unbind(1)
    rows_A, tokens_B = torch.tensor(rows), torch.tensor(lengths)
    row_R, row_bounds = _ranges(rows_A, run_P)
    token_K, token_bounds = _ranges(tokens_B, document_P)
    cell_R = (run_P * len(lengths) + document_P).repeat_interleave(rows_A[run_P])
    return Pairs(
        *(sent(row_R, device), sent(cell_R, device), sent(token_K, device)),
        *(sent(row_bounds.int(), device), sent(token_bounds.int(), device)),
        *(max(rows), max(lengths)),
    )


def _ranges(lengths: Tensor, chosen_P: Tensor) -> tuple[Tensor, Tensor]:
    """The indices of these sequences, one sequence after another, and the bounds of each (P + 1,).

    >>> _ranges(torch.tensor([2, 3, 1]), torch.tensor([2, 1, 2]))
    (tensor([5, 2, 3, 4, 5]), tensor([0, 1, 4, 5]))
    """
    starts_P = (lengths.cumsum(0) - lengths)[chosen_P]
    bounds = F.pad(lengths[chosen_P].cumsum(0), (1, 0))
    offsets = (starts_P - bounds[:-1]).repeat_interleave(lengths[chosen_P])
    return torch.arange(int(bounds[-1])) + offsets, bounds


def varlen_document_attention(
    query_HTD: Tensor,
    key_GSD: Tensor,
    value_GSD: Tensor,
    weights_AB: Tensor,
    pairs: Pairs,
    scale: float,
    norm_eps: float | None,
) -> Tensor:
    """(H, T, D); ``weights_AB`` of ``pairs``, the other arguments as in ``document_attention``.

    With ``norm_eps``, None for no V-norm, the last column of the values is their norm.
    """
    exact = torch.promote_types(query_HTD.dtype, torch.float32)
    n_heads, n_rows = query_HTD.shape[:2]
    n_columns = value_GSD.shape[-1] - (norm_eps is not None)
    width = -(-max(query_HTD.shape[-1], value_GSD.shape[-1]) // 8) * 8

    def of_pairs(all_XTD: Tensor, index: Tensor) -> Tensor:
        # In fp32, in which the backward pass then adds up a row's gradients of all its pairs.
        rows_RXD = all_XTD.to(exact).transpose(0, 1).index_select(0, index)
        rows_RXW = F.pad(rows_RXD, (0, width - all_XTD.shape[-1])).to(all_XTD.dtype)
        return rows_RXW.repeat_interleave(n_heads // len(all_XTD), dim=1)

    key_KHW, value_KHW = (of_pairs(t_GSD, pairs.token_K) for t_GSD in (key_GSD, value_GSD))
    output_RHW = attend_pairs(of_pairs(query_HTD, pairs.row_R), key_KHW, value_KHW, pairs, scale)
    output_RHD = output_RHW[..., :n_columns].to(exact)
    if norm_eps is not None:
        output_RHD = output_RHD / (output_RHW[..., n_columns, None].to(exact) + norm_eps)
    weight_R11 = weights_AB.flatten().index_select(0, pairs.cell_R)[:, None, None]
    total_THD = output_RHD.new_zeros(n_rows, n_heads, n_columns)
    total_THD = total_THD.index_add(0, pairs.row_R, output_RHD * weight_R11)
    return total_THD.transpose(0, 1).to(query_HTD.dtype)


def attend_pairs(
    query_RHW: Tensor, key_KHW: Tensor, value_KHW: Tensor, pairs: Pairs, scale: float
) -> Tensor:
    """Softmax attention within each pair, (R, H, W)."""
    from torch.nn.attention.varlen import varlen_attn

    bounds = pairs.row_bounds, pairs.token_bounds, pairs.most_rows, pairs.most_tokens
    output_RHW: Any = varlen_attn(query_RHW, key_KHW, value_KHW, *bounds, scale=scale)
    return output_RHW  # type: ignore[no-any-return]
