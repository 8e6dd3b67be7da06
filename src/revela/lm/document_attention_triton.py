"""Document attention as Triton kernels: the sum of document_attention.py, without a host loop.

Forward, one program per block of query rows and head goes over the documents that any of its rows
attends to, and over each document's keys with a running softmax; each document's output is weighted
and added. Backward, the same loop gives the gradients of queries and weights; one program per block
of keys goes over the rows that attend to it and gives those of keys and values. Each loop computes
the scores again, so memory is that of inputs and outputs, whatever the number of pairs.

Chosen by ``document_attention(..., kernel="triton")``. The tests run the kernels on a CPU by
TRITON_INTERPRET=1.

Shapes: A runs of rows, T rows in all; B documents packed into S tokens; H query heads, G key-value
heads (H a multiple of G), D head width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from revela.device import sent
from revela.lm.document_weights import DocumentWeights

ROWS, KEYS = 32, 64  # block sizes


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
def _weights(pointer, run, document, rows, n_rows, n_documents, epsilon, EXACT: tl.constexpr):
    """Each row's weight of a document; 0 if it is at most epsilon."""
    places = run * n_documents + document
    weight = tl.load(pointer + places, mask=rows < n_rows, other=0.0).to(EXACT)
    return tl.where(weight > epsilon, weight, 0.0)


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

    Returns (output, greatest score, sum of exponentials, attention-weighted value norm).
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
    return output / total[:, None], greatest, total, norm / total


@triton.jit
def _forward(
    query_pointer, key_pointer, value_pointer, weight_pointer, owner_pointer, bound_pointer,
    mixed_pointer,
    n_rows, n_keys, n_documents, scale, epsilon, norm_eps,
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
        weight = _weights(weight_pointer, run, document, rows, n_rows, n_documents, epsilon, EXACT)
        if tl.max(weight) > 0:
            begin, end = tl.load(bound_pointer + document), tl.load(bound_pointer + document + 1)
            output, _, _, norm = _attend(
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

    Returns those of (the weight, the output, the norm), and the mean that the softmax subtracts.
    """
    if V_NORM:
        unit = output / (norm + norm_eps)[:, None]
        to_weight = tl.sum(gradient * unit, axis=1)
        to_output = gradient * (weight / (norm + norm_eps))[:, None]
        to_norm = -weight * to_weight / (norm + norm_eps)
        mean = tl.sum(to_output * output, axis=1) + to_norm * norm
    else:
        to_weight = tl.sum(gradient * output, axis=1)
        to_output = gradient * weight[:, None]
        to_norm = to_weight * 0
        mean = weight * to_weight
    return to_weight, to_output, to_norm, mean


@triton.jit
def _score_gradients(
    query, key, value, inside, greatest, total, to_output, to_norm, mean, scale,
    V_NORM: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """(attention, gradient of the scores) of a block of rows over a block of keys."""
    scores = _dot(query, tl.trans(key), EXACT) * scale
    attention = tl.exp(scores - greatest[:, None]) / total[:, None]
    attention = tl.where(inside[None, :], attention, 0.0)
    slope = _dot(to_output.to(value.dtype), tl.trans(value), EXACT)
    if V_NORM:
        slope += to_norm[:, None] * _norms(value)[None, :]
    return attention, attention * (slope - mean[:, None]) * scale


@triton.jit
def _backward_rows(
    query_pointer, key_pointer, value_pointer, weight_pointer, owner_pointer, bound_pointer,
    gradient_pointer, to_query_pointer, to_weight_pointer,
    n_rows, n_keys, n_documents, scale, epsilon, norm_eps,
    SHARED: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, V_NORM: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of queries and, added atomically over rows and heads, of weights."""
    head = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDE)
    query = _load(query_pointer, head, rows, columns, n_rows, n_rows, WIDTH)
    gradient = _load(gradient_pointer, head, rows, columns, n_rows, n_rows, WIDTH).to(EXACT)
    run = tl.load(owner_pointer + rows, mask=rows < n_rows, other=0)
    to_query = tl.zeros([ROWS, WIDE], dtype=EXACT)
    for document in range(0, n_documents):
        weight = _weights(weight_pointer, run, document, rows, n_rows, n_documents, epsilon, EXACT)
        if tl.max(weight) > 0:
            begin, end = tl.load(bound_pointer + document), tl.load(bound_pointer + document + 1)
            output, greatest, total, norm = _attend(
                query, key_pointer, value_pointer, head // SHARED, begin, end, n_keys, scale,
                WIDTH, WIDE, KEYS, V_NORM, EXACT,
            )  # fmt: skip
            to_weight, to_output, to_norm, mean = _output_gradients(
                output, norm, gradient, weight, norm_eps, V_NORM
            )
            is_kept = (rows < n_rows) & (weight > 0)
            tl.atomic_add(to_weight_pointer + run * n_documents + document, to_weight, mask=is_kept)
            for start in range(begin, end, KEYS):
                places = start + tl.arange(0, KEYS)
                key = _load(key_pointer, head // SHARED, places, columns, end, n_keys, WIDTH)
                value = _load(value_pointer, head // SHARED, places, columns, end, n_keys, WIDTH)
                _, to_scores = _score_gradients(
                    query, key, value, places < end, greatest, total, to_output, to_norm, mean,
                    scale, V_NORM, EXACT,
                )  # fmt: skip
                to_query += _dot(to_scores.to(key.dtype), key, EXACT)
    _store(to_query_pointer, head, rows, columns, n_rows, n_rows, to_query, WIDTH)


@triton.jit
def _backward_keys(
    query_pointer, key_pointer, value_pointer, weight_pointer, owner_pointer, bound_pointer,
    gradient_pointer, block_document_pointer, block_start_pointer, to_key_pointer, to_value_pointer,
    n_rows, n_keys, n_documents, scale, epsilon, norm_eps,
    SHARED: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, V_NORM: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of a document's keys and values, over all rows of the heads that share
    them.
    """
    key_head = tl.program_id(1)
    document = tl.load(block_document_pointer + tl.program_id(0))
    begin, end = tl.load(bound_pointer + document), tl.load(bound_pointer + document + 1)
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
        weight = _weights(weight_pointer, run, document, rows, n_rows, n_documents, epsilon, EXACT)
        if tl.max(weight) > 0:
            for i in range(0, SHARED):
                head = key_head * SHARED + i
                query = _load(query_pointer, head, rows, columns, n_rows, n_rows, WIDTH)
                gradient = _load(gradient_pointer, head, rows, columns, n_rows, n_rows, WIDTH)
                output, greatest, total, norm = _attend(
                    query, key_pointer, value_pointer, key_head, begin, end, n_keys, scale,
                    WIDTH, WIDE, KEYS, V_NORM, EXACT,
                )  # fmt: skip
                _, to_output, to_norm, mean = _output_gradients(
                    output, norm, gradient.to(EXACT), weight, norm_eps, V_NORM
                )
                attention, to_scores = _score_gradients(
                    query, key, value, places < end, greatest, total, to_output, to_norm, mean,
                    scale, V_NORM, EXACT,
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
        query_HTD, key_GSD, value_GSD, weights_AB = (
            t.contiguous() for t in (query_HTD, key_GSD, value_GSD, weights_AB)
        )
        heads, n_rows, width = query_HTD.shape
        sizes = n_rows, key_GSD.shape[1], len(documents.lengths)
        ctx.numbers = *sizes, scale, documents.epsilon, norm_eps or 0.0
        ctx.constants = dict(
            SHARED=heads // len(key_GSD),
            WIDTH=width,
            WIDE=max(16, triton.next_power_of_2(width)),
            ROWS=ROWS,
            KEYS=KEYS,
            V_NORM=norm_eps is not None,
            EXACT=tl.float64 if query_HTD.dtype == torch.float64 else tl.float32,
        )
        mixed_HTD = torch.empty_like(query_HTD)
        inputs = query_HTD, key_GSD, value_GSD, weights_AB, documents.run_T, documents.bounds
        grid = (triton.cdiv(n_rows, ROWS), heads)
        _forward[grid](*inputs, mixed_HTD, *ctx.numbers, **ctx.constants)
        ctx.save_for_backward(*inputs)
        ctx.lengths = documents.lengths
        return mixed_HTD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs = *ctx.saved_tensors, gradients[0].contiguous()
        query_HTD, key_GSD, value_GSD, weights_AB = inputs[:4]
        to_query, to_key, to_value = None, None, None
        exact = torch.promote_types(weights_AB.dtype, torch.float32)
        to_weights = torch.zeros_like(weights_AB, dtype=exact)
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[3]:
            to_query = torch.empty_like(query_HTD)
            grid = (triton.cdiv(query_HTD.shape[1], ROWS), len(query_HTD))
            _backward_rows[grid](*inputs, to_query, to_weights, *ctx.numbers, **ctx.constants)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            to_key, to_value = torch.empty_like(key_GSD), torch.empty_like(value_GSD)
            blocks, begin = [], 0
            for j, length in enumerate(ctx.lengths):
                blocks += [(j, start) for start in range(begin, begin + length, KEYS)]
                begin += length
            document, start = sent(torch.tensor(blocks).T.contiguous(), query_HTD.device)
            _backward_keys[len(blocks), len(key_GSD)](
                *inputs, document, start, to_key, to_value, *ctx.numbers, **ctx.constants
            )
        return to_query, to_key, to_value, to_weights.to(weights_AB.dtype), None, None, None
