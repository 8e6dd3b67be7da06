"""Causal attention one query row at a time, and document attention as its equation reads: what the
fast paths are held to.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from revela.training.lm.document_attention import DocumentWeights


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


def reference_attention(
    query_HTD: Tensor,
    key_GSD: Tensor,
    value_GSD: Tensor,
    documents: DocumentWeights,
    scale: float,
    norm_eps: float | None,
) -> Tensor:
    """``document_attention`` as its equation reads; ``norm_eps`` None for no V-norm."""
    is_kept_AB = documents.weights_AB > documents.epsilon
    weights_TB = (documents.weights_AB * is_kept_AB)[documents.run_T]
    shared = len(query_HTD) // len(key_GSD)
    key_HSD, value_HSD = (x_GSD.repeat_interleave(shared, dim=0) for x_GSD in (key_GSD, value_GSD))
    keys, values = (
        torch.split(x_HSD, list(documents.lengths), 1) for x_HSD in (key_HSD, value_HSD)
    )
    b_HTD = query_HTD.new_zeros(*query_HTD.shape[:2], value_GSD.shape[-1])
    for key_HLD, value_HLD, weight_T in zip(keys, values, weights_TB.unbind(dim=1), strict=True):
        attention_HTL = (query_HTD @ key_HLD.transpose(1, 2) * scale).softmax(dim=-1)
        output_HTD = attention_HTL @ value_HLD
        if norm_eps is not None:
            norm_HT1 = attention_HTL @ value_HLD.norm(dim=-1, keepdim=True)
            output_HTD = output_HTD / (norm_HT1 + norm_eps)
        b_HTD = b_HTD + weight_T[:, None] * output_HTD
    return b_HTD
