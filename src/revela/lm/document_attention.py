"""Document attention: each query row attends to each document separately; the outputs are weighted.

For query rows Q, and documents j with keys K_j, values V_j and a weight w_j per row:

    b = sum_j w_j * softmax(Q K_j^T * scale) V_j                             (Revela, eqs. 5-7)

There is no causal mask: a row attends to all tokens of a document. With ``v_norm`` the output of
each document is divided by the attention-weighted mean norm of its values (Revela, eq. 6, as in
the authors' code):

    softmax(..) V_j / (softmax(..) |V_j| + 1e-6)

Consecutive rows that share their weights form a run: a document in Revela, whose documents attend
to one another; a question about the documents in DREAM.

Three implementations of the same sum; the tests hold the others to the first:
- ``plain_document_attention``, the reference: one SDPA call with the documents as the batch. It
  keeps the output of every (row, document) pair for the backward pass;
- document_attention_recomputed.py, the default: one document at a time, only the rows that give it
  a weight, and recomputation in the backward pass. Memory grows with the tokens. On a CPU core
  (16 chunks of 72 tokens, 9 heads or 2 of them) the first takes 1.1 to 2.4 times as long;
- document_attention_triton.py: the same on a GPU, without a loop on the host.

Shapes: A runs of rows, T rows in all; B documents packed into S tokens, the longest of L (Revela:
A = B, T = S); H query heads, G key-value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from revela.lm.document_attention_recomputed import recomputed_document_attention
from revela.lm.document_weights import DocumentWeights

Kernel = Literal["plain", "torch", "triton"]
V_NORM_EPS = 1e-6  # as in the authors' code


def plain_document_attention(
    query_HTD: Tensor,
    key_GSD: Tensor,
    value_GSD: Tensor,
    weights_AB: Tensor,
    lengths: Sequence[int],
    rows: Sequence[int],
    scale: float,
    norm_eps: float | None,
) -> Tensor:
    """The equation as one SDPA call with the documents as the batch; (H, T, D)."""
    # |v| as one more column of the values: attention then averages the norms, too.
    if norm_eps is not None:
        value_GSD = torch.cat([value_GSD, value_GSD.norm(dim=-1, keepdim=True)], dim=-1)
    documents = (list(torch.split(t.transpose(0, 1), list(lengths))) for t in (key_GSD, value_GSD))
    key_BGLD, value_BGLD = (pad_sequence(d, batch_first=True).transpose(1, 2) for d in documents)
    lengths_B = torch.tensor(lengths, device=query_HTD.device)
    is_token_BL = torch.arange(max(lengths), device=query_HTD.device) < lengths_B[:, None]
    output_BHTD = F.scaled_dot_product_attention(
        query_HTD.expand(len(lengths), -1, -1, -1),
        key_BGLD,
        value_BGLD,
        attn_mask=is_token_BL[:, None, None, :],
        scale=scale,
        enable_gqa=True,
    )
    if norm_eps is not None:
        output_BHTD = output_BHTD[..., :-1] / (output_BHTD[..., -1:] + norm_eps)
    rows_A = torch.tensor(rows, device=query_HTD.device)
    weights_TB = weights_AB.repeat_interleave(rows_A, dim=0).to(output_BHTD.dtype)
    return torch.einsum("tb,bhtd->htd", weights_TB, output_BHTD)


def document_attention(
    query_HTD: Tensor,
    key_GSD: Tensor,
    value_GSD: Tensor,
    documents: DocumentWeights,
    *,
    heads: Tensor | None = None,
    scale: float | None = None,
    v_norm: bool = False,
    kernel: Kernel = "torch",
) -> Tensor:
    """Weighted sum over documents of the attention within each document.

    Args:
        query_HTD: queries of all H heads, rotary positions applied.
        key_GSD, value_GSD: of the G key-value heads (H is a multiple of G), with the positions of
            their own document.
        documents: their weights.
        heads: indices of the query heads to compute, in the order of the output, on the device.
            None: all H, which share keys as they are.
        scale: factor on the scores; None: D ** -0.5.
        v_norm: divide each document's output by its attention-weighted mean value norm.
        kernel: "plain" is the reference, "triton" needs the triton package and a GPU.

    Returns:
        (len(heads), T, D), in query_HTD's dtype, or that of autocast.
    """
    if heads is not None:
        shared = heads // (len(query_HTD) // len(key_GSD))
        query_HTD, key_GSD, value_GSD = query_HTD[heads], key_GSD[shared], value_GSD[shared]
    device = query_HTD.device.type
    if torch.is_autocast_enabled(device):  # cast here: autocast ends before the backward pass
        dtype = torch.get_autocast_dtype(device)
        query_HTD, key_GSD, value_GSD = (t.to(dtype) for t in (query_HTD, key_GSD, value_GSD))
    scale = query_HTD.shape[-1] ** -0.5 if scale is None else scale
    inputs = query_HTD, key_GSD, value_GSD
    norm_eps = V_NORM_EPS if v_norm else None
    if kernel == "plain":
        weights_AB = documents.weights_AB.masked_fill(
            documents.weights_AB <= documents.epsilon, 0.0
        )
        sizes = documents.lengths, documents.rows
        return plain_document_attention(*inputs, weights_AB, *sizes, scale, norm_eps)
    if kernel == "triton":
        from revela.lm.document_attention_triton import triton_document_attention as attend
    else:
        attend = recomputed_document_attention
    return attend(*inputs, documents, scale, norm_eps)
