"""Pack texts of different lengths into one row without padding, with attention within each text.

Every layer but attention treats tokens independently, so a packed row costs only its own tokens.
Attention pads the texts on the right to the longest: causal attention never looks there, and other
attention is masked. A CPU, on which padding costs as much as tokens, reads long texts one by one.

Used by the LM, to which training/lm/language_model.py adds its streams, and by the retriever in
training and encoding (``packed``), through transformers' ``AttentionInterface``.

Shapes: B texts of up to L tokens, T tokens in all, P tokens of a prefix, H query heads, G key-value
heads, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from revela.training.device import on_cpu, sent

PACKED = "revela-packed"
# A CPU pads texts of up to this many tokens, and reads longer ones one by one: 32 texts of 200 to
# 1,024 tokens in bf16 with 4 heads take 532 ms forward and backward padded, and 282 one by one.
SIDE_BY_SIDE = 256
# A CPU computes the scores of up to this many tokens explicitly: 16 texts of 100 to 512 tokens in
# bf16 with 12 heads take 42 ms, and 92 by SDPA; in fp32 both take as long.
EXPLICIT_SCORES = 512


@dataclass(frozen=True)
class Layout:
    """The position of each text in a packed row of T tokens; computing it never waits for a GPU."""

    lengths: tuple[int, ...]
    device: torch.device

    @property
    def is_even(self) -> bool:
        """Whether all texts have the same length, so that none is padded."""
        return min(self.lengths) == max(self.lengths)

    @cached_property
    def valid_BL(self) -> Tensor:
        """Whether each position of the padded form holds a token."""
        lengths_B = torch.tensor(self.lengths)
        return sent(torch.arange(max(self.lengths)) < lengths_B[:, None], self.device)

    @cached_property
    def positions_T(self) -> Tensor:
        """Each token's position in its own text, from 0."""
        return sent(on_cpu(self.valid_BL).nonzero()[:, 1], self.device)

    @cached_property
    def places_T(self) -> Tensor:
        """Each token's index in the flattened padded form."""
        return sent(on_cpu(self.valid_BL).flatten().nonzero().squeeze(1), self.device)

    @cached_property
    def with_next_R(self) -> Tensor:
        """Indices, among the T, of the tokens that are not the last of their text."""
        has_next_T = torch.ones(sum(self.lengths), dtype=torch.bool)
        has_next_T[torch.tensor(self.lengths).cumsum(0) - 1] = False
        return sent(has_next_T.nonzero().squeeze(1), self.device)

    def pad(self, packed_TX: Tensor) -> Tensor:
        """(T, X) -> (B, L, X), 0 in the padding."""
        shape = (*self.valid_BL.shape, *packed_TX.shape[1:])
        if self.is_even:
            return packed_TX.view(shape)
        padded = packed_TX.new_zeros(shape[0] * shape[1], *shape[2:])
        return padded.index_copy(0, self.places_T, packed_TX).view(shape)

    def pack(self, padded_BLX: Tensor) -> Tensor:
        """(B, L, X) -> (T, X)."""
        flat = padded_BLX.flatten(0, 1)
        return flat if self.is_even else flat.index_select(0, self.places_T)


def layout_of(mask_BL: Tensor, device: torch.device) -> tuple[Layout, Tensor]:
    """The layout of a batch without its padding.

    Args:
        mask_BL: 1 for tokens, 0 for padding, which may be on either side.
        device: for the layout.

    Returns:
        The layout, and each token's index in the flattened batch, (T,) on the CPU.
    """
    keep_BL = on_cpu(mask_BL).bool()
    layout = Layout(tuple(keep_BL.sum(dim=1).tolist()), device)
    return layout, keep_BL.flatten().nonzero().squeeze(1)


def attention(
    query_HTD: Tensor,
    key_GTD: Tensor,
    value_GTD: Tensor,
    layout: Layout,
    *,
    causal: bool,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Softmax attention within each text, (T, H, D).

    H is a multiple of G: each H / G query heads in a row share a key head.

    Args:
        causal: whether a token attends only to earlier ones and itself.
        scale: factor of the scores; None: D ** -0.5.
        dropout: probability, on the attention weights.
    """
    rows = query_HTD, key_GTD, value_GTD
    if not query_HTD.is_cuda and max(layout.lengths) > SIDE_BY_SIDE:
        texts = zip(*(torch.split(t[None], list(layout.lengths), 2) for t in rows), strict=True)
        outs = [_side_by_side(q, k, v, None, causal, scale, dropout) for q, k, v in texts]
        return torch.cat(outs, dim=2)[0].transpose(0, 1)
    query_BHLD, key_BGLD, value_BGLD = (layout.pad(t.transpose(0, 1)).transpose(1, 2) for t in rows)
    valid_B11L = None if causal or layout.is_even else layout.valid_BL[:, None, None, :]
    inputs = query_BHLD, key_BGLD, value_BGLD, valid_B11L
    return layout.pack(_side_by_side(*inputs, causal, scale, dropout).transpose(1, 2))


def _side_by_side(
    query_BHLD: Tensor,
    key_BGLD: Tensor,
    value_BGLD: Tensor,
    visible: Tensor | None,
    causal: bool,
    scale: float | None,
    dropout: float,
) -> Tensor:
    """Attention within each of B padded texts, (B, H, L, D).

    ``visible``: which keys are read, broadcast to scores of (B, G, H / G * L, keys); None: all.
    """
    heads, groups, length = query_BHLD.shape[1], key_BGLD.shape[1], query_BHLD.shape[2]
    width = query_BHLD.shape[-1]
    if query_BHLD.is_cuda or length > EXPLICIT_SCORES:
        # A fused kernel takes either a mask or shared keys: heads that share keys become rows.
        rows_BHLD = query_BHLD if causal else query_BHLD.reshape(len(query_BHLD), groups, -1, width)
        out_BHLD = F.scaled_dot_product_attention(
            *(rows_BHLD, key_BGLD, value_BGLD, visible, dropout, causal),
            scale=scale,
            enable_gqa=causal and heads != groups,
        )
        return out_BHLD.reshape(len(query_BHLD), heads, length, -1)
    scale = width**-0.5 if scale is None else scale
    # The rows of heads that share keys, one head after another.
    rows_BGRD = (query_BHLD * scale).reshape(len(query_BHLD), groups, -1, width)
    scores_BGRL = rows_BGRD @ key_BGLD.transpose(2, 3)
    if causal:
        future_LL = torch.ones(length, length, dtype=torch.bool, device=scores_BGRL.device).triu(1)
        scores_BGRL = scores_BGRL.masked_fill(future_LL.repeat(heads // groups, 1), -torch.inf)
    elif visible is not None:
        scores_BGRL = scores_BGRL.masked_fill(~visible, -torch.inf)
    out_BGRD = F.dropout(scores_BGRL.softmax(dim=-1), dropout) @ value_BGLD
    return out_BGRD.view(len(query_BHLD), heads, length, -1)


def attention_with_prefix(
    query_HTD: Tensor,
    key_GTD: Tensor,
    value_GTD: Tensor,
    layout: Layout,
    prefix: tuple[Tensor, Tensor],
    scale: float | None = None,
) -> Tensor:
    """Causal attention of texts after a shared prefix, (T, H, D).

    ``prefix``: keys and values of the prefix, (G, P, D) each.
    """
    rows = query_HTD, key_GTD, value_GTD
    query_BHLD, *own = (layout.pad(t.transpose(0, 1)).transpose(1, 2) for t in rows)
    texts, heads, length, _ = query_BHLD.shape
    groups, prefix_length = prefix[0].shape[:2]
    key_BGSD, value_BGSD = (
        torch.cat([before.to(after.dtype).expand(texts, -1, -1, -1), after], dim=2)
        for before, after in zip(prefix, own, strict=True)
    )
    visible_LS = torch.ones(
        length, prefix_length + length, dtype=torch.bool, device=query_HTD.device
    ).tril(prefix_length)
    visible_RS = visible_LS.repeat(heads // groups, 1)
    inputs = query_BHLD, key_BGSD, value_BGSD, visible_RS
    return layout.pack(_side_by_side(*inputs, False, scale, 0.0).transpose(1, 2))


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    layout: Layout,
    **given: Any,
) -> tuple[Tensor, None]:
    causal = given.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    scale, dropout = given.get("scaling"), given.get("dropout", 0.0)
    rows = query[0], key[0], value[0]
    out_THD = attention(*rows, layout, causal=causal, scale=scale, dropout=dropout)
    return out_THD[None].contiguous(), None  # some models take a view of it


def packed(model: Any) -> AbstractContextManager[None]:
    """Run a transformers model without padding inside; inputs and outputs stay (B, L, ...).

    A model whose output would differ is not changed (``can_pack``).
    """
    is_padded = not can_pack(model) or "forward" in model.__dict__
    return nullcontext() if is_padded else _running_packed(model)


@contextmanager
def _running_packed(model: Any) -> Iterator[None]:
    original, forward = model.config._attn_implementation, model.forward

    def run_packed(input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        layout, places_T = layout_of(attention_mask, input_ids.device)
        places_T = sent(places_T, input_ids.device)
        for name, value in kwargs.items():
            if isinstance(value, Tensor) and value.shape == input_ids.shape:
                kwargs[name] = value.flatten()[places_T][None]
        output = forward(
            input_ids=input_ids.flatten()[places_T][None],
            position_ids=layout.positions_T[None],
            layout=layout,
            **{**kwargs, "use_cache": False},
        )
        hidden_TD = output.last_hidden_state[0]
        flat = hidden_TD.new_zeros(input_ids.numel(), hidden_TD.shape[-1])
        padded = flat.index_copy(0, places_T, hidden_TD).view(*input_ids.shape, -1)
        output.last_hidden_state = padded
        return output

    from transformers import AttentionInterface

    # transformers builds no mask, as no mask function has this name: the layout keeps texts apart.
    AttentionInterface.register(PACKED, _attention)
    model.set_attn_implementation(PACKED)
    model.forward = run_packed
    try:
        yield
    finally:
        del model.forward
        model.set_attn_implementation(original)


def can_pack(model: Any) -> bool:
    """Whether a model gives the same packed; not with windows shorter than the text, or positions
    counted in another way. It is tried once per model, on two short texts.
    """
    if model.__dict__.get("_packs") is None:
        model.__dict__["_packs"] = _packs(model)
    return bool(model.__dict__["_packs"])


@torch.no_grad()
def _packs(model: Any) -> bool:
    """Whether this model gives two packed texts the same hidden states as padded ones."""
    config = model.config
    if not getattr(model, "_supports_attention_backend", False) or config.is_encoder_decoder:
        return False
    if getattr(config, "sliding_window", None) or getattr(config, "local_attention", None):
        return False
    inner = getattr(config, "encoder", config)  # T5Gemma's, which may have windows
    if any(kind != "full_attention" for kind in getattr(inner, "layer_types", None) or ()):
        return False
    if getattr(inner, "attn_logit_softcapping", None):
        return False
    ids = torch.tensor([[5, 6, 7, 8, 9], [9, 8, 0, 0, 0]], device=model.device) % config.vocab_size
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]], device=model.device)

    def hidden() -> Tensor:
        states: Tensor = model(input_ids=ids, attention_mask=mask).last_hidden_state
        return states[mask.bool()].float()

    was_training = model.training
    model.eval()
    try:
        padded = hidden()
        with _running_packed(model):
            found = hidden()
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError):
        return False
    finally:
        model.train(was_training)
    return bool((padded - found).norm() <= 0.02 * padded.norm())
