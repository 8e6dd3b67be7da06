"""Causal attention written out one query row at a time; what the fast path is held to."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


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


def _bounds(lengths):
    """Where each of them begins and ends."""
    return [(sum(lengths[:i]), sum(lengths[: i + 1])) for i in range(len(lengths))]


def attention_by_sdpa(query, key, value, pairs, scale):
    """``attend_pairs`` where flash attention does not run: on a CPU, and in fp64."""
    bounds = (pairwise(b.tolist()) for b in (pairs.row_bounds, pairs.token_bounds))
    outputs = []
    for (a, b), (c, d) in zip(*bounds, strict=True):
        assert b - a <= pairs.most_rows and d - c <= pairs.most_tokens
        inputs = (t.transpose(0, 1) for t in (query[a:b], key[c:d], value[c:d]))
        outputs.append(F.scaled_dot_product_attention(*inputs, scale=scale).transpose(0, 1))
    assert query.shape[-1] == key.shape[-1] == value.shape[-1] and query.shape[-1] % 8 == 0
    assert query.shape[1] == key.shape[1] == value.shape[1]
    return torch.cat(outputs)
