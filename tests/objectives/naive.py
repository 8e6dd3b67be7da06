"""The equations written out one query row at a time; what the fast path is held to."""

from __future__ import annotations

import torch
from torch import Tensor


def document_attention(
    query_HTD, key_GTD, value_GTD, weights_AB, lengths, scale, v_norm=False, heads=None, rows=None
) -> Tensor:
    """RevelaLoss, eqs. 5-7, for each head, run of rows, row and document in turn."""
    n_heads, n_groups = query_HTD.shape[0], key_GTD.shape[0]
    bounds = [(sum(lengths[:i]), sum(lengths[: i + 1])) for i in range(len(lengths))]
    runs = (
        bounds if rows is None else [(sum(rows[:i]), sum(rows[: i + 1])) for i in range(len(rows))]
    )
    found = []
    for head in range(n_heads) if heads is None else heads:
        group = int(head) // (n_heads // n_groups)
        for i, (a, b) in enumerate(runs):
            for row in range(a, b):
                total = torch.zeros(value_GTD.shape[-1], dtype=query_HTD.dtype)
                for j, (c, d) in enumerate(bounds):
                    attention = torch.stack(
                        [query_HTD[head, row] @ key_GTD[group, m] * scale for m in range(c, d)]
                    ).softmax(0)
                    output = sum(attention[m - c] * value_GTD[group, m] for m in range(c, d))
                    if v_norm:
                        norm = sum(
                            attention[m - c] * value_GTD[group, m].pow(2).sum().sqrt()
                            for m in range(c, d)
                        )
                        output = output / (norm + 1e-6)
                    total = total + weights_AB[i, j] * output
                found.append(total)
    return torch.stack(found).view(-1, query_HTD.shape[1], value_GTD.shape[-1])


def own_attention(query_HTD, key_GTD, value_GTD, lengths, scale) -> Tensor:
    """Causal attention inside each document, row by row."""
    group = query_HTD.shape[0] // key_GTD.shape[0]
    out, start = [], 0
    for length in lengths:
        rows = []
        for row in range(start, start + length):
            heads = []
            for head in range(query_HTD.shape[0]):
                keys, values = (
                    key_GTD[head // group, start : row + 1],
                    value_GTD[head // group, start : row + 1],
                )
                heads.append((keys @ query_HTD[head, row] * scale).softmax(0) @ values)
            rows.append(torch.stack(heads))
        out.append(torch.stack(rows, dim=1))
        start += length
    return torch.cat(out, dim=1)
