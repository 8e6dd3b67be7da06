"""Document attention: every query row reads every document, each by its own softmax, mixed by given weights.

For query rows Q and documents j with keys K_j, values V_j and a weight w_j a row:

    b = sum_j w_j * softmax(Q K_j^T * scale) V_j            (Revela, eqs. 5-7; DREAM injects the same form)

There is no causal mask: a query position sees every token of every other document. With ``v_norm`` each document's
output is divided by the attention-weighted mean norm of its values (Revela, eq. 6, in the form of the authors' code):

    softmax(..) V_j / (softmax(..) |V_j| + eps)

computed by appending |v| to V as one more column, so that no score matrix is ever held by us.

Traded: a Python loop over documents instead of one large product. Each document then meets only the rows that give it a
weight above ``epsilon``, nothing is padded, and grouped-query heads need no copy of Q or K: the rows of all heads that
share a key head stand in one long list.

Shapes: B documents packed one after another into T tokens, H query heads, G key-value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

V_NORM_EPS = 1e-6  # the constant of the authors' code


def document_attention(
    query_HTD: Tensor,
    key_GTD: Tensor,
    value_GTD: Tensor,
    weights_BB: Tensor,
    lengths: Sequence[int],
    *,
    heads: Tensor | None = None,
    scale: float | None = None,
    v_norm: bool = False,
    epsilon: float = 0.0,
) -> Tensor:
    """Weighted sum over documents of attention within each document.

    Args:
        query_HTD: queries of all H heads, rotary positions already applied.
        key_GTD: keys of the G key-value heads (H is a multiple of G), with the positions of their own document.
        value_GTD: values.
        weights_BB: weight of document j for every row of document i. Carries the gradient to the retriever.
        lengths: tokens of each document, B numbers that sum to T.
        heads: indices of the query heads to compute, in the order of the output. None: all H.
        scale: factor on the scores, D ** -0.5 unless given.
        v_norm: divide each document's output by its attention-weighted mean value norm.
        epsilon: pairs with a weight <= epsilon are skipped. At 0 only exact zeros are.

    Returns:
        The mixed outputs, (len(heads), T, D), in query_HTD's dtype.
    """
    n_heads, n_groups = query_HTD.shape[0], key_GTD.shape[0]
    width = value_GTD.shape[-1]
    if v_norm:
        value_GTD = torch.cat([value_GTD, value_GTD.norm(dim=-1, keepdim=True)], dim=-1)
    whole = heads is None or len(heads) == n_heads  # then the rows of one key head are contiguous and share its keys
    if heads is not None:
        query_HTD = query_HTD[heads]
        if not whole:
            shared = heads // (n_heads // n_groups)
            key_GTD, value_GTD = key_GTD[shared], value_GTD[shared]

    owner_T = torch.repeat_interleave(torch.tensor(lengths)).to(query_HTD.device)
    wanted_BB = (weights_BB.detach() > epsilon).cpu()
    mixed_HTD = query_HTD.new_zeros(*query_HTD.shape[:2], width)
    start = 0
    for j, length in enumerate(lengths):
        key, value = key_GTD[:, start : start + length], value_GTD[:, start : start + length]
        start += length
        readers_B = wanted_BB[:, j]
        if not readers_B.any():
            continue
        rows_R = readers_B.to(owner_T.device)[owner_T].nonzero().squeeze(1)
        query = query_HTD.index_select(1, rows_R)
        if whole:
            query = query.reshape(n_groups, -1, query.shape[-1])
        output = F.scaled_dot_product_attention(query[None], key[None], value[None], scale=scale)[0]
        if v_norm:
            output = output[..., :-1] / (output[..., -1:] + V_NORM_EPS)
        weight_R1 = weights_BB[:, j].to(output.dtype)[owner_T[rows_R]][:, None]
        mixed_HTD = mixed_HTD.index_add(1, rows_R, output.reshape(-1, len(rows_R), width) * weight_R1)
    return mixed_HTD
