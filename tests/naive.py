"""The equations written out one query row at a time; what the fast path is held to."""

from __future__ import annotations

import torch
from torch import Tensor


def document_attention(
    query_HTD, key_GTD, value_GTD, weights_AB, lengths, scale, v_norm=False, heads=None, rows=None
) -> Tensor:
    """RevelaLoss, eqs. 5-7, for each head, run of rows, row and document in turn."""
    repeats = query_HTD.shape[0] // key_GTD.shape[0]
    bounds, runs = _bounds(lengths), _bounds(rows or lengths)
    found = []
    for head in range(query_HTD.shape[0]) if heads is None else heads:
        key_TD, value_TD = key_GTD[int(head) // repeats], value_GTD[int(head) // repeats]
        for i, (a, b) in enumerate(runs):
            for row in range(a, b):
                total = torch.zeros(value_GTD.shape[-1], dtype=query_HTD.dtype)
                for j, (c, d) in enumerate(bounds):
                    scores = [query_HTD[head, row] @ key_TD[m] * scale for m in range(c, d)]
                    attention = torch.stack(scores).softmax(0)
                    pairs = list(zip(attention, value_TD[c:d], strict=True))
                    output = sum(share * value_D for share, value_D in pairs)
                    if v_norm:
                        norms = [share * value_D.pow(2).sum().sqrt() for share, value_D in pairs]
                        output = output / (sum(norms) + 1e-6)
                    total = total + weights_AB[i, j] * output
                found.append(total)
    return torch.stack(found).view(-1, query_HTD.shape[1], value_GTD.shape[-1])


def _bounds(lengths):
    """Where each of them begins and ends."""
    return [(sum(lengths[:i]), sum(lengths[: i + 1])) for i in range(len(lengths))]


def own_attention(query_HTD, key_GTD, value_GTD, lengths, scale) -> Tensor:
    """Causal attention inside each document, row by row."""
    repeats = query_HTD.shape[0] // key_GTD.shape[0]
    out = []
    for start, end in _bounds(lengths):
        rows = []
        for row in range(start, end):
            heads = []
            for head in range(query_HTD.shape[0]):
                both = (x_GTD[head // repeats, start : row + 1] for x_GTD in (key_GTD, value_GTD))
                key_MD, value_MD = both
                heads.append((key_MD @ query_HTD[head, row] * scale).softmax(0) @ value_MD)
            rows.append(torch.stack(heads))
        out.append(torch.stack(rows, dim=1))
    return torch.cat(out, dim=1)
