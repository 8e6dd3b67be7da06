"""Document attention as Triton kernels: the sum of ../document_attention.py, without a host loop.

Forward: one program per block of query rows and head loops over the documents that any of its rows
attends to, and over each document's keys with a running softmax. It weights each document's output
and adds it.

Backward: the same loop gives the gradients of queries and weights, and saves four numbers per head,
row and document. With these, one program per block of keys loops over the rows that attend to it
and gives the gradients of keys and values. Each loop computes the scores again, so memory grows
with the rows and the documents that they attend to, not with the documents' tokens.

The gradients of weights are summed in the order in which programs end, so two runs on a GPU differ
in the last bits; so do those of ../document_attention_recomputed.py, by ``index_add_``.

The tests run the kernels on a CPU by TRITON_INTERPRET=1.

Shapes: A runs of rows, T rows in all; B documents packed into S tokens; H query heads, G key-value
heads (H a multiple of G), D head width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from revela.device import sent

if TYPE_CHECKING:
    from revela.lm.document_weights import DocumentWeights


def block_sizes(wide: int, bytes_each: int) -> tuple[int, int]:
    """Rows and keys of a block, of ``wide`` numbers each: as many as fit into 8 and 16 KiB.

    A program then keeps within the 99 KiB of shared memory of an RTX 3090 or 4090. In fp32 with
    heads of 256 numbers it needs 115 KiB, which an A100 has.
    """
    rows, keys = (2**power // (wide * bytes_each) for power in (13, 14))
    return max(16, min(32, rows)), max(16, min(64, keys))


@triton.jit
def _dot(a, b, EXACT: tl.constexpr):
    return tl.dot(a, b, input_precision="ieee", out_dtype=EXACT)


@triton.jit
def _load(pointer, head, rows, columns, end, length, WIDTH: tl.constexpr):
    """(len(rows), len(columns)) of a head's (length, WIDTH) block; 0 from row ``end`` on."""
    places = head * length * WIDTH + rows[:, None] * WIDTH + columns[None, :]
    inside = (rows[:, None] < end) & (columns[None, :] < WIDTH)
    return tl.load(pointer + places, mask=inside, other=0.0)


@triton.jit
def _store(pointer, head, rows, columns, end, length, block, WIDTH: tl.constexpr):
    """The inverse of ``_load``."""
    places = head * length * WIDTH + rows[:, None] * WIDTH + columns[None, :]
    inside = (rows[:, None] < end) & (columns[None, :] < WIDTH)
    tl.store(pointer + places, block.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _weights(pointer, run, document, rows, n_rows, n_documents, EXACT: tl.constexpr):
    """Each row's weight of a document."""
    places = run * n_documents + document
    return tl.load(pointer + places, mask=rows < n_rows, other=0.0).to(EXACT)


@triton.jit
def _norms(value):
    wide = value.to(tl.float32) if value.dtype != tl.float64 else value
    return tl.sqrt(tl.sum(wide * wide, axis=1))


@triton.jit
def _attend(
    query, key_pointer, value_pointer, key_head, begin, end, n_keys, scale,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, KEYS: tl.constexpr,
    V_NORM: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Attention of these rows over one document.

    Returns (output, log-sum-exp of the scores, attention-weighted value norm).
    """
    columns = tl.arange(0, WIDE)
    greatest = tl.full([query.shape[0]], float("-inf"), dtype=EXACT)
    total = tl.zeros([query.shape[0]], dtype=EXACT)
    norm = tl.zeros([query.shape[0]], dtype=EXACT)
    output = tl.zeros([query.shape[0], WIDE], dtype=EXACT)
    for start in range(begin, end, KEYS):
        rows = start + tl.arange(0, KEYS)
        key = _load(key_pointer, key_head, rows, columns, end, n_keys, WIDTH)
        value = _load(value_pointer, key_head, rows, columns, end, n_keys, WIDTH)
        scores = _dot(query, tl.trans(key), EXACT) * scale
        scores = tl.where(rows[None, :] < end, scores, float("-inf"))
        higher = tl.maximum(greatest, tl.max(scores, axis=1))
        rescale = tl.exp(greatest - higher)
        shares = tl.exp(scores - higher[:, None])
        total = total * rescale + tl.sum(shares, axis=1)
        output = output * rescale[:, None] + _dot(shares.to(value.dtype), value, EXACT)
        if V_NORM:
            norm = norm * rescale + tl.sum(shares * _norms(value)[None, :], axis=1)
        greatest = higher
    return output / total[:, None], greatest + tl.log(total), norm / total


@triton.jit
def _forward(
    query_pointer, key_pointer, value_pointer, weight_pointer, owner_pointer, bound_pointer,
    mixed_pointer,
    n_rows, n_keys, n_documents, scale, norm_eps,
    SHARED: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, V_NORM: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The weighted sum of a block of rows."""
    head = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDE)
    query = _load(query_pointer, head, rows, columns, n_rows, n_rows, WIDTH)
    run = tl.load(owner_pointer + rows, mask=rows < n_rows, other=0)
    mixed = tl.zeros([ROWS, WIDE], dtype=EXACT)
    for document in range(0, n_documents):
        weight = _weights(weight_pointer, run, document, rows, n_rows, n_documents, EXACT)
        if tl.max(weight) > 0:
            begin, end = tl.load(bound_pointer + document), tl.load(bound_pointer + document + 1)
            output, _, norm = _attend(
                query, key_pointer, value_pointer, head // SHARED, begin, end, n_keys, scale,
                WIDTH, WIDE, KEYS, V_NORM, EXACT,
            )  # fmt: skip
            if V_NORM:
                output = output / (norm + norm_eps)[:, None]
            mixed += weight[:, None] * output
    _store(mixed_pointer, head, rows, columns, n_rows, n_rows, mixed, WIDTH)


@triton.jit
def _output_gradients(output, norm, gradient, weight, norm_eps, V_NORM: tl.constexpr):
    """Gradients of one document's part of the sum, by row.

    Returns (gradient of the weight, share of the gradient for the output, gradient of the norm,
    mean that the softmax subtracts).
    """
    to_weight = tl.sum(gradient * output, axis=1)
    if V_NORM:
        to_weight = to_weight / (norm + norm_eps)
        share = weight / (norm + norm_eps)
        to_norm = -share * to_weight
        mean = weight * to_weight + to_norm * norm
    else:
        share = weight
        to_norm = to_weight * 0
        mean = weight * to_weight
    return to_weight, share, to_norm, mean


@triton.jit
def _score_gradients(
    query, key, value, inside, log_sum, to_output, to_norm, mean, scale,
    V_NORM: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """(attention, gradient of the scores) of a block of rows over a block of keys."""
    scores = _dot(query, tl.trans(key), EXACT) * scale
    attention = tl.exp(scores - log_sum[:, None])
    attention = tl.where(inside[None, :], attention, 0.0)
    slope = _dot(to_output.to(value.dtype), tl.trans(value), EXACT)
    if V_NORM:
        slope += to_norm[:, None] * _norms(value)[None, :]
    return attention, attention * (slope - mean[:, None]) * scale


@triton.jit
def _saved(slot_pointer, head, rows, run, document, n_slots, n_rows, n_documents):
    """Offset of the four numbers saved for these rows and a document, which they must keep."""
    slot = tl.load(slot_pointer + run * n_documents + document)
    return ((head.to(tl.int64) * n_rows + rows) * n_slots + slot) * 4


@triton.jit
def _backward_rows(
    query_pointer, key_pointer, value_pointer, weight_pointer, owner_pointer, bound_pointer,
    gradient_pointer, slot_pointer, saved_pointer, to_query_pointer, to_weight_pointer,
    n_slots, n_rows, n_keys, n_documents, scale, norm_eps,
    SHARED: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, V_NORM: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of queries and, added atomically over rows and heads, of weights.

    Saves log-sum-exp, mean, share and norm gradient of each row and document for
    ``_backward_keys``.
    """
    head = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDE)
    query = _load(query_pointer, head, rows, columns, n_rows, n_rows, WIDTH)
    gradient = _load(gradient_pointer, head, rows, columns, n_rows, n_rows, WIDTH).to(EXACT)
    run = tl.load(owner_pointer + rows, mask=rows < n_rows, other=0)
    to_query = tl.zeros([ROWS, WIDE], dtype=EXACT)
    for document in range(0, n_documents):
        weight = _weights(weight_pointer, run, document, rows, n_rows, n_documents, EXACT)
        if tl.max(weight) > 0:
            begin, end = tl.load(bound_pointer + document), tl.load(bound_pointer + document + 1)
            output, log_sum, norm = _attend(
                query, key_pointer, value_pointer, head // SHARED, begin, end, n_keys, scale,
                WIDTH, WIDE, KEYS, V_NORM, EXACT,
            )  # fmt: skip
            to_weight, share, to_norm, mean = _output_gradients(
                output, norm, gradient, weight, norm_eps, V_NORM
            )
            to_output = gradient * share[:, None]
            is_kept = (rows < n_rows) & (weight > 0)
            tl.atomic_add(to_weight_pointer + run * n_documents + document, to_weight, mask=is_kept)
            saved = saved_pointer + _saved(
                slot_pointer, head, rows, run, document, n_slots, n_rows, n_documents
            )
            tl.store(saved, log_sum, mask=is_kept)
            tl.store(saved + 1, mean, mask=is_kept)
            if V_NORM:
                tl.store(saved + 2, share, mask=is_kept)
                tl.store(saved + 3, to_norm, mask=is_kept)
            for start in range(begin, end, KEYS):
                places = start + tl.arange(0, KEYS)
                key = _load(key_pointer, head // SHARED, places, columns, end, n_keys, WIDTH)
                value = _load(value_pointer, head // SHARED, places, columns, end, n_keys, WIDTH)
                _, to_scores = _score_gradients(
                    query, key, value, places < end, log_sum, to_output, to_norm, mean, scale,
                    V_NORM, EXACT,
                )  # fmt: skip
                to_query += _dot(to_scores.to(key.dtype), key, EXACT)
    _store(to_query_pointer, head, rows, columns, n_rows, n_rows, to_query, WIDTH)


@triton.jit
def _backward_keys(
    query_pointer, key_pointer, value_pointer, weight_pointer, owner_pointer, bound_pointer,
    gradient_pointer, slot_pointer, saved_pointer, block_document_pointer, block_start_pointer,
    to_key_pointer, to_value_pointer,
    n_slots, n_rows, n_keys, n_documents, scale, norm_eps,
    SHARED: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, V_NORM: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of a document's keys and values, over all rows of the heads that share
    them.
    """
    key_head = tl.program_id(1)
    document = tl.load(block_document_pointer + tl.program_id(0))
    end = tl.load(bound_pointer + document + 1)
    places = tl.load(block_start_pointer + tl.program_id(0)) + tl.arange(0, KEYS)
    columns = tl.arange(0, WIDE)
    key = _load(key_pointer, key_head, places, columns, end, n_keys, WIDTH)
    value = _load(value_pointer, key_head, places, columns, end, n_keys, WIDTH)
    to_key = tl.zeros([KEYS, WIDE], dtype=EXACT)
    to_value = tl.zeros([KEYS, WIDE], dtype=EXACT)
    to_norms = tl.zeros([KEYS], dtype=EXACT)
    for first in range(0, n_rows, ROWS):
        rows = first + tl.arange(0, ROWS)
        run = tl.load(owner_pointer + rows, mask=rows < n_rows, other=0)
        weight = _weights(weight_pointer, run, document, rows, n_rows, n_documents, EXACT)
        if tl.max(weight) > 0:
            for i in range(0, SHARED):
                head = key_head * SHARED + i
                query = _load(query_pointer, head, rows, columns, n_rows, n_rows, WIDTH)
                gradient = _load(gradient_pointer, head, rows, columns, n_rows, n_rows, WIDTH)
                saved = saved_pointer + _saved(
                    slot_pointer, head, rows, run, document, n_slots, n_rows, n_documents
                )
                log_sum = tl.load(saved, mask=weight > 0, other=float("inf"))
                mean = tl.load(saved + 1, mask=weight > 0, other=0.0)
                share, to_norm = weight, mean
                if V_NORM:
                    share = tl.load(saved + 2, mask=weight > 0, other=0.0)
                    to_norm = tl.load(saved + 3, mask=weight > 0, other=0.0)
                to_output = gradient.to(EXACT) * share[:, None]
                attention, to_scores = _score_gradients(
                    query, key, value, places < end, log_sum, to_output, to_norm, mean, scale,
                    V_NORM, EXACT,
                )  # fmt: skip
                if V_NORM:
                    to_norms += tl.sum(attention * to_norm[:, None], axis=0)
                to_key += _dot(tl.trans(to_scores).to(query.dtype), query, EXACT)
                shares = tl.trans(attention).to(value.dtype)
                to_value += _dot(shares, to_output.to(value.dtype), EXACT)
    if V_NORM:
        norms = _norms(value)
        per_norm = tl.where(norms > 0, to_norms / tl.where(norms > 0, norms, 1.0), 0.0)
        to_value += per_norm[:, None] * value.to(EXACT)
    _store(to_key_pointer, key_head, places, columns, end, n_keys, to_key, WIDTH)
    _store(to_value_pointer, key_head, places, columns, end, n_keys, to_value, WIDTH)


def triton_document_attention(
    query_HTD: Tensor,
    key_GSD: Tensor,
    value_GSD: Tensor,
    documents: DocumentWeights,
    scale: float,
    norm_eps: float | None,
) -> Tensor:
    """(H, T, D); arguments as in ``document_attention``, ``norm_eps`` None for no V-norm."""
    return _Triton.apply(
        query_HTD, key_GSD, value_GSD, documents.weights_AB, documents, scale, norm_eps
    )


class _Triton(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_HTD: Tensor,
        key_GSD: Tensor,
        value_GSD: Tensor,
        weights_AB: Tensor,
        documents: DocumentWeights,
        scale: float,
        norm_eps: float | None,
    ) -> Tensor:
        query_HTD, key_GSD, value_GSD = (t.contiguous() for t in (query_HTD, key_GSD, value_GSD))
        heads, n_rows, width = query_HTD.shape
        sizes = n_rows, key_GSD.shape[1], len(documents.lengths)
        ctx.numbers = *sizes, scale, norm_eps or 0.0
        wide = max(16, triton.next_power_of_2(width))
        rows_of_block, keys_of_block = block_sizes(wide, query_HTD.element_size())
        ctx.constants = dict(
            SHARED=heads // len(key_GSD),
            WIDTH=width,
            WIDE=wide,
            ROWS=rows_of_block,
            KEYS=keys_of_block,
            V_NORM=norm_eps is not None,
            EXACT=tl.float64 if query_HTD.dtype == torch.float64 else tl.float32,
        )
        mixed_HTD = torch.empty_like(query_HTD)
        of_documents = documents.kept_AB, documents.run_T, documents.bounds
        inputs = query_HTD, key_GSD, value_GSD, *of_documents
        grid = (triton.cdiv(n_rows, rows_of_block), heads)
        _forward[grid](*inputs, mixed_HTD, *ctx.numbers, **ctx.constants)
        ctx.save_for_backward(*inputs)
        ctx.documents = documents
        return mixed_HTD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs = *ctx.saved_tensors, gradients[0].contiguous()
        query_HTD, key_GSD, value_GSD, kept_AB = inputs[:4]
        documents, (heads, rows, _) = ctx.documents, query_HTD.shape
        to_key, to_value = None, None
        exact = torch.promote_types(query_HTD.dtype, torch.float32)
        to_weights = torch.zeros_like(kept_AB, dtype=exact)
        to_query = torch.empty_like(query_HTD)
        saved = kept_AB.new_empty(heads, rows, documents.slots, 4, dtype=exact)
        inputs = *inputs, documents.slot_AB, saved
        numbers = documents.slots, *ctx.numbers
        grid = (triton.cdiv(rows, ctx.constants["ROWS"]), heads)
        _backward_rows[grid](*inputs, to_query, to_weights, *numbers, **ctx.constants)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            to_key, to_value = torch.empty_like(key_GSD), torch.empty_like(value_GSD)
            blocks, begin = [], 0
            for j, length in enumerate(documents.lengths):
                starts = range(begin, begin + length, ctx.constants["KEYS"])
                blocks += [(j, start) for start in starts]
                begin += length
            document, start = sent(torch.tensor(blocks).T.contiguous(), query_HTD.device)
            _backward_keys[len(blocks), len(key_GSD)](
                *inputs, document, start, to_key, to_value, *numbers, **ctx.constants
            )
        return to_query, to_key, to_value, to_weights.to(kept_AB.dtype), None, None, None
