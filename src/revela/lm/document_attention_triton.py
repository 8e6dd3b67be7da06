"""Document attention as Triton kernels: what ``lm/document_attention.py`` computes, without its
loop on the host.

One program a block of query rows and head walks over the documents that any of its rows reads, and
over each document's keys with a running softmax; what it has found of one document is weighted,
added, and forgotten. Backward, the same walk gives the gradients to the queries and to the weights,
and one over the readers of a block of keys gives those to keys and values. Each walk computes the
scores of a pair again, so that memory is that of inputs and outputs, whatever the number of pairs.

Chosen by ``document_attention(..., kernel="triton")``. On a CPU the kernels run under
TRITON_INTERPRET=1, which is how they are tested.

Shapes: T rows in A runs, S tokens in B documents, H query heads, G key-value heads (H a multiple of
G), D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from revela.lm.document_attention import V_NORM_EPS

ROWS, KEYS = 32, 64  # of a block


@triton.jit
def _rows(pointer, head, rows, columns, n_rows, WIDTH: tl.constexpr):
    """(len(rows), len(columns)) of a head's (T, D) block; 0 outside."""
    places = head * n_rows * WIDTH + rows[:, None] * WIDTH + columns[None, :]
    return tl.load(
        pointer + places, mask=(rows[:, None] < n_rows) & (columns[None, :] < WIDTH), other=0.0
    )


@triton.jit
def _within(pointer, head, rows, columns, end, n_keys, WIDTH: tl.constexpr):
    """The same of an (S, D) block, cut at row ``end``."""
    places = head * n_keys * WIDTH + rows[:, None] * WIDTH + columns[None, :]
    return tl.load(
        pointer + places, mask=(rows[:, None] < end) & (columns[None, :] < WIDTH), other=0.0
    )


@triton.jit
def _weights(pointer, owner, document, rows, n_rows, n_documents, epsilon, EXACT: tl.constexpr):
    """What each row gives to a document; 0 if that is no more than epsilon."""
    weight = tl.load(pointer + owner * n_documents + document, mask=rows < n_rows, other=0.0).to(
        EXACT
    )
    return tl.where(weight > epsilon, weight, 0.0)


@triton.jit
def _norms(value):
    wide = value.to(tl.float32) if value.dtype != tl.float64 else value
    return tl.sqrt(tl.sum(wide * wide, axis=1))


@triton.jit
def _read_document(
    query, key_pointer, value_pointer, key_head, begin, end, n_keys, scale,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, KEYS: tl.constexpr, V_NORM: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Attention of these rows over one document: (output, greatest score, sum of exponentials,
    attention-weighted value norm).
    """
    columns = tl.arange(0, WIDE)
    greatest = tl.full([query.shape[0]], float("-inf"), dtype=EXACT)
    total = tl.zeros([query.shape[0]], dtype=EXACT)
    norm = tl.zeros([query.shape[0]], dtype=EXACT)
    output = tl.zeros([query.shape[0], WIDE], dtype=EXACT)
    for start in range(begin, end, KEYS):
        rows = start + tl.arange(0, KEYS)
        key = _within(key_pointer, key_head, rows, columns, end, n_keys, WIDTH)
        value = _within(value_pointer, key_head, rows, columns, end, n_keys, WIDTH)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee", out_dtype=EXACT) * scale
        scores = tl.where(rows[None, :] < end, scores, float("-inf"))
        higher = tl.maximum(greatest, tl.max(scores, axis=1))
        rescale = tl.exp(greatest - higher)
        shares = tl.exp(scores - higher[:, None])
        total = total * rescale + tl.sum(shares, axis=1)
        output = output * rescale[:, None] + tl.dot(
            shares.to(value.dtype), value, input_precision="ieee", out_dtype=EXACT
        )
        if V_NORM:
            norm = norm * rescale + tl.sum(shares * _norms(value)[None, :], axis=1)
        greatest = higher
    return output / total[:, None], greatest, total, norm / total


@triton.jit
def _forward(
    query_pointer, key_pointer, value_pointer, weight_pointer, owner_pointer, bound_pointer, mixed_pointer,
    n_rows, n_keys, n_documents, scale, epsilon, norm_eps,
    SHARED: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    V_NORM: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDE)
    query = _rows(query_pointer, head, rows, columns, n_rows, WIDTH)
    owner = tl.load(owner_pointer + rows, mask=rows < n_rows, other=0)
    mixed = tl.zeros([ROWS, WIDE], dtype=EXACT)
    for document in range(0, n_documents):
        weight = _weights(
            weight_pointer, owner, document, rows, n_rows, n_documents, epsilon, EXACT
        )
        if tl.max(weight) > 0:
            begin, end = tl.load(bound_pointer + document), tl.load(bound_pointer + document + 1)
            output, _, _, norm = _read_document(
                query,
                key_pointer,
                value_pointer,
                head // SHARED,
                begin,
                end,
                n_keys,
                scale,
                WIDTH,
                WIDE,
                KEYS,
                V_NORM,
                EXACT,
            )
            if V_NORM:
                output = output / (norm + norm_eps)[:, None]
            mixed += weight[:, None] * output
    places = head * n_rows * WIDTH + rows[:, None] * WIDTH + columns[None, :]
    tl.store(
        mixed_pointer + places,
        mixed.to(mixed_pointer.dtype.element_ty),
        mask=(rows[:, None] < n_rows) & (columns[None, :] < WIDTH),
    )


@triton.jit
def _slopes(output, norm, gradient, weight, norm_eps, V_NORM: tl.constexpr):
    """What the gradient of the sum is to one document: (to its weight, to its output, to its norm,
    the softmax's mean slope), by row.
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
def _backward_rows(
    query_pointer, key_pointer, value_pointer, weight_pointer, owner_pointer, bound_pointer, gradient_pointer,
    to_query_pointer, to_weight_pointer,
    n_rows, n_keys, n_documents, scale, epsilon, norm_eps,
    SHARED: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    V_NORM: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Gradients to a block of queries and, summed atomically over rows and heads, to the weights."""
    head = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDE)
    query = _rows(query_pointer, head, rows, columns, n_rows, WIDTH)
    gradient = _rows(gradient_pointer, head, rows, columns, n_rows, WIDTH).to(EXACT)
    owner = tl.load(owner_pointer + rows, mask=rows < n_rows, other=0)
    to_query = tl.zeros([ROWS, WIDE], dtype=EXACT)
    for document in range(0, n_documents):
        weight = _weights(
            weight_pointer, owner, document, rows, n_rows, n_documents, epsilon, EXACT
        )
        if tl.max(weight) > 0:
            begin, end = tl.load(bound_pointer + document), tl.load(bound_pointer + document + 1)
            output, greatest, total, norm = _read_document(
                query,
                key_pointer,
                value_pointer,
                head // SHARED,
                begin,
                end,
                n_keys,
                scale,
                WIDTH,
                WIDE,
                KEYS,
                V_NORM,
                EXACT,
            )
            to_weight, to_output, to_norm, mean = _slopes(
                output, norm, gradient, weight, norm_eps, V_NORM
            )
            tl.atomic_add(
                to_weight_pointer + owner * n_documents + document,
                to_weight,
                mask=(rows < n_rows) & (weight > 0),
            )
            for start in range(begin, end, KEYS):
                places = start + tl.arange(0, KEYS)
                key = _within(key_pointer, head // SHARED, places, columns, end, n_keys, WIDTH)
                value = _within(value_pointer, head // SHARED, places, columns, end, n_keys, WIDTH)
                scores = (
                    tl.dot(query, tl.trans(key), input_precision="ieee", out_dtype=EXACT) * scale
                )
                shares = tl.where(
                    places[None, :] < end, tl.exp(scores - greatest[:, None]) / total[:, None], 0.0
                )
                slope = tl.dot(
                    to_output.to(value.dtype),
                    tl.trans(value),
                    input_precision="ieee",
                    out_dtype=EXACT,
                )
                if V_NORM:
                    slope += to_norm[:, None] * _norms(value)[None, :]
                to_scores = shares * (slope - mean[:, None]) * scale
                to_query += tl.dot(
                    to_scores.to(key.dtype), key, input_precision="ieee", out_dtype=EXACT
                )
    places = head * n_rows * WIDTH + rows[:, None] * WIDTH + columns[None, :]
    inside = (rows[:, None] < n_rows) & (columns[None, :] < WIDTH)
    tl.store(to_query_pointer + places, to_query.to(to_query_pointer.dtype.element_ty), mask=inside)


@triton.jit
def _backward_keys(
    query_pointer, key_pointer, value_pointer, weight_pointer, owner_pointer, bound_pointer, gradient_pointer,
    block_document_pointer, block_start_pointer, to_key_pointer, to_value_pointer,
    n_rows, n_keys, n_documents, scale, epsilon, norm_eps,
    SHARED: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    V_NORM: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Gradients to a block of one document's keys and values, over all rows of all heads that share
    them.
    """
    key_head = tl.program_id(1)
    document = tl.load(block_document_pointer + tl.program_id(0))
    begin, end = tl.load(bound_pointer + document), tl.load(bound_pointer + document + 1)
    places = tl.load(block_start_pointer + tl.program_id(0)) + tl.arange(0, KEYS)
    columns = tl.arange(0, WIDE)
    key = _within(key_pointer, key_head, places, columns, end, n_keys, WIDTH)
    value = _within(value_pointer, key_head, places, columns, end, n_keys, WIDTH)
    to_key = tl.zeros([KEYS, WIDE], dtype=EXACT)
    to_value = tl.zeros([KEYS, WIDE], dtype=EXACT)
    to_norms = tl.zeros([KEYS], dtype=EXACT)
    for first in range(0, n_rows, ROWS):
        rows = first + tl.arange(0, ROWS)
        owner = tl.load(owner_pointer + rows, mask=rows < n_rows, other=0)
        weight = _weights(
            weight_pointer, owner, document, rows, n_rows, n_documents, epsilon, EXACT
        )
        if tl.max(weight) > 0:
            for i in range(0, SHARED):
                head = key_head * SHARED + i
                query = _rows(query_pointer, head, rows, columns, n_rows, WIDTH)
                gradient = _rows(gradient_pointer, head, rows, columns, n_rows, WIDTH).to(EXACT)
                output, greatest, total, norm = _read_document(
                    query,
                    key_pointer,
                    value_pointer,
                    key_head,
                    begin,
                    end,
                    n_keys,
                    scale,
                    WIDTH,
                    WIDE,
                    KEYS,
                    V_NORM,
                    EXACT,
                )
                _, to_output, to_norm, mean = _slopes(
                    output, norm, gradient, weight, norm_eps, V_NORM
                )
                scores = (
                    tl.dot(query, tl.trans(key), input_precision="ieee", out_dtype=EXACT) * scale
                )
                shares = tl.where(
                    places[None, :] < end, tl.exp(scores - greatest[:, None]) / total[:, None], 0.0
                )
                slope = tl.dot(
                    to_output.to(value.dtype),
                    tl.trans(value),
                    input_precision="ieee",
                    out_dtype=EXACT,
                )
                if V_NORM:
                    slope += to_norm[:, None] * _norms(value)[None, :]
                    to_norms += tl.sum(shares * to_norm[:, None], axis=0)
                to_scores = shares * (slope - mean[:, None]) * scale
                to_key += tl.dot(
                    tl.trans(to_scores).to(query.dtype),
                    query,
                    input_precision="ieee",
                    out_dtype=EXACT,
                )
                to_value += tl.dot(
                    tl.trans(shares).to(value.dtype),
                    to_output.to(value.dtype),
                    input_precision="ieee",
                    out_dtype=EXACT,
                )
    if V_NORM:
        norms = _norms(value)
        to_value += tl.where(norms > 0, to_norms / tl.where(norms > 0, norms, 1.0), 0.0)[
            :, None
        ] * value.to(EXACT)
    cells = key_head * n_keys * WIDTH + places[:, None] * WIDTH + columns[None, :]
    inside = (places[:, None] < end) & (columns[None, :] < WIDTH)
    tl.store(to_key_pointer + cells, to_key.to(to_key_pointer.dtype.element_ty), mask=inside)
    tl.store(to_value_pointer + cells, to_value.to(to_value_pointer.dtype.element_ty), mask=inside)


class TritonDocumentAttention(torch.autograd.Function):
    """(queries (H, T, D), keys and values (G, S, D), weights (A, B), lengths, rows, scale,
    V-normalise, epsilon) -> (H, T, D).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query_HTD: Tensor,
        key_GSD: Tensor,
        value_GSD: Tensor,
        weights_AB: Tensor,
        lengths: Sequence[int],
        rows: Sequence[int],
        scale: float,
        v_norm: bool,
        epsilon: float,
    ) -> Tensor:
        query_HTD, key_GSD, value_GSD, weights_AB = (
            t.contiguous() for t in (query_HTD, key_GSD, value_GSD, weights_AB)
        )
        device = query_HTD.device
        lengths_B = torch.tensor(lengths)
        owner_T = torch.repeat_interleave(torch.tensor(rows)).to(device, non_blocking=True)
        bounds = torch.cat([torch.zeros(1, dtype=torch.long), lengths_B.cumsum(0)]).to(
            device, non_blocking=True
        )
        heads, n_rows, width = query_HTD.shape
        ctx.numbers = n_rows, key_GSD.shape[1], len(lengths), scale, epsilon, V_NORM_EPS
        ctx.constants = dict(
            SHARED=heads // len(key_GSD),
            WIDTH=width,
            WIDE=max(16, triton.next_power_of_2(width)),
            ROWS=ROWS,
            KEYS=KEYS,
            V_NORM=v_norm,
            EXACT=tl.float64 if query_HTD.dtype == torch.float64 else tl.float32,
        )
        mixed_HTD = torch.empty_like(query_HTD)
        inputs = query_HTD, key_GSD, value_GSD, weights_AB, owner_T, bounds
        _forward[(triton.cdiv(n_rows, ROWS), heads)](
            *inputs, mixed_HTD, *ctx.numbers, **ctx.constants
        )
        ctx.save_for_backward(*inputs)
        ctx.lengths = tuple(lengths)
        return mixed_HTD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient_HTD = gradients[0].contiguous()
        inputs = ctx.saved_tensors
        query_HTD, key_GSD, value_GSD, weights_AB, *_ = inputs
        n_rows = query_HTD.shape[1]
        to_query, to_key, to_value = None, None, None
        to_weights = torch.zeros_like(
            weights_AB, dtype=torch.promote_types(weights_AB.dtype, torch.float32)
        )
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[3]:
            to_query = torch.empty_like(query_HTD)
            grid = (triton.cdiv(n_rows, ROWS), len(query_HTD))
            _backward_rows[grid](
                *inputs, gradient_HTD, to_query, to_weights, *ctx.numbers, **ctx.constants
            )
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            to_key, to_value = torch.empty_like(key_GSD), torch.empty_like(value_GSD)
            bounds = [0, *torch.tensor(ctx.lengths).cumsum(0).tolist()]
            blocks = [
                (j, start)
                for j, length in enumerate(ctx.lengths)
                for start in range(bounds[j], bounds[j] + length, KEYS)
            ]
            document, start = (
                torch.tensor(blocks).T.contiguous().to(query_HTD.device, non_blocking=True)
            )
            grid = (len(blocks), len(key_GSD))
            _backward_keys[grid](
                *inputs,
                gradient_HTD,
                document,
                start,
                to_key,
                to_value,
                *ctx.numbers,
                **ctx.constants,
            )
        return (
            to_query,
            to_key,
            to_value,
            to_weights.to(weights_AB.dtype),
            None,
            None,
            None,
            None,
            None,
        )
