"""Document attention: each query row attends to each document separately; the outputs are weighted.

    b = sum_j w_j * softmax(Q K_j^T * scale) V_j                             (Revela, eqs. 5-7)

Q are the query rows, K_j and V_j the keys and values of document j, and w_j is a row's weight of
document j. There is no causal mask: a row attends to all tokens of a document. V-norm divides each
document's output by the attention-weighted mean norm of its values (Revela, eq. 6, as in the
authors' code):

    softmax(..) V_j / (softmax(..) |V_j| + 1e-6)

A run is a sequence of rows with the same weights: in Revela a chunk, with w_j = Sim; in DREAM a
question about the candidates.

``reference_attention`` computes the equation line by line; the tests compare the others with it:
- document_attention_recomputed.py, the default on a CPU and in fp32: one document at a time, with
  only the rows that give it a weight. The backward pass computes the attention again, so memory
  grows with the tokens and not with the (row, document) pairs;
- document_attention_varlen.py, the default on a GPU in bf16: flash attention over all
  (run, document) pairs at once.

Shapes: A runs of rows, T rows in all; B documents packed into S tokens, L of a document (Revela: A
= B, T = S); H query heads, G key-value heads, K selected heads, D head width.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from revela.training.lm.document_weights import DocumentWeights

Kernel = Literal["auto", "reference", "torch", "varlen"]
V_NORM_EPS = 1e-6  # as in the authors' code
EPSILON = 1e-4  # objectives skip pairs with at most this weight


def reference_attention(
    query_HTD: Tensor,
    key_GSD: Tensor,
    value_GSD: Tensor,
    documents: DocumentWeights,
    scale: float,
    norm_eps: float | None,
) -> Tensor:
    """b as the equation reads, (H, T, D); arguments as for ``document_attention``, ``norm_eps``
    None for no V-norm.
    """
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


def document_attention(
    query_HTD: Tensor,
    key_GSD: Tensor,
    value_GSD: Tensor,
    documents: DocumentWeights,
    *,
    scale: float | None = None,
    v_norm: bool = False,
    kernel: Kernel = "auto",
) -> Tensor:
    """The weighted sum over documents of the attention within each document, b of the equation.

    Args:
        query_HTD: with rotary positions applied.
        key_GSD, value_GSD: with the positions of their own document. H is a multiple of G.
        documents: where the documents are, and their weights.
        scale: factor on the scores; None: D ** -0.5.
        v_norm: divide each document's output by its attention-weighted mean value norm.
        kernel: "varlen" needs a GPU and bf16; "auto" is "varlen" where it runs, else "torch".

    Returns:
        (H, T, D), in query_HTD's dtype, or that of autocast.
    """
    device = query_HTD.device.type
    if torch.is_autocast_enabled(device):  # cast here: autocast ends before the backward pass
        dtype = torch.get_autocast_dtype(device)
        query_HTD, key_GSD, value_GSD = (t.to(dtype) for t in (query_HTD, key_GSD, value_GSD))
    scale = query_HTD.shape[-1] ** -0.5 if scale is None else scale
    if kernel == "auto":
        kernel = "varlen" if has_varlen(query_HTD.device, query_HTD.dtype) else "torch"
    if kernel == "varlen":
        from revela.training.lm.document_attention_varlen import varlen_document_attention as attend
    elif kernel == "torch":
        from revela.training.lm.document_attention_recomputed import (
            recomputed_document_attention as attend,
        )
    else:
        attend = reference_attention
    return attend(query_HTD, key_GSD, value_GSD, documents, scale, V_NORM_EPS if v_norm else None)


def has_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether variable-length flash attention runs here."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def select_heads(
    heads_K: Tensor, query_HTD: Tensor, key_GSD: Tensor, value_GSD: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The queries of these heads, and the keys and values of each, (K, ...)."""
    group_K = heads_K // (len(query_HTD) // len(key_GSD))
    return query_HTD[heads_K], key_GSD[group_K], value_GSD[group_K]
