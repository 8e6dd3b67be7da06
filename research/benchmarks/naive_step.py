"""The training step as its equations say it, for comparison.

Two full passes over padded batches: stream e runs to the end, its logits computed and thrown away;
keys and values of every layer are kept; in each mixed layer the scores of all B x B pairs of chunks
and all heads stand in memory; the softmax runs over all logits at once.

Shapes: B chunks of L tokens, H query heads, G key-value heads, D head width; i reads j.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from revela.objectives.revela import in_batch_weights

NAME = "naive"


class NaiveStep:
    """Loss of one group by retriever and causal LM, stock modules both.

    Args:
        retriever: gives ``sentence_embedding``.
        lm: a causal LM of transformers; switched to the naive attention.
        gates_LH: as for ``revela.objectives.revela.Revela``; None: the paper's V-normalised sum.
        tau, standardise: of Sim.
        everywhere: compute the in-batch attention where no gate of the layer is open, too, as the
            equation with a gate of 0 says.
    """

    def __init__(
        self,
        retriever: nn.Module,
        lm: Any,
        gates_LH: Tensor | None,
        tau: float,
        standardise: bool,
        everywhere: bool = True,
    ) -> None:
        self.retriever, self.lm, self.gates_LH, self.tau, self.standardise = (
            retriever,
            lm,
            gates_LH,
            tau,
            standardise,
        )
        self.everywhere = everywhere
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}
        self.weights_BB: Tensor | None = None
        self.mask_BL: Tensor
        AttentionInterface.register(NAME, self._attention)
        AttentionMaskInterface.register(NAME, lambda *_, **__: None)
        inner = lm.get_base_model() if hasattr(lm, "get_base_model") else lm
        inner.set_attn_implementation(NAME)

    def __call__(self, features: Sequence[dict[str, Tensor]]) -> Tensor:
        query, passage, chunk = features
        ids_BL, self.mask_BL = chunk["input_ids"], chunk["attention_mask"].bool()
        query_BD, passage_BD = (
            self.retriever(dict(f))["sentence_embedding"].float() for f in (query, passage)
        )
        weights_BB = in_batch_weights(query_BD, passage_BD, self.tau, standardise=self.standardise)
        self.cache, self.weights_BB = {}, None
        _unused = self.lm(input_ids=ids_BL, use_cache=False).logits
        self.weights_BB = weights_BB
        logits_BLV = self.lm(input_ids=ids_BL, use_cache=False).logits
        keep = self.mask_BL[:, 1:]
        return F.cross_entropy(logits_BLV[:, :-1][keep].float(), ids_BL[:, 1:][keep])

    def _attention(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        _mask: Any,
        scaling: float,
        **_: Any,
    ) -> tuple[Tensor, None]:
        layer, repeats = int(module.layer_idx), query.shape[1] // key.shape[1]
        if self.weights_BB is None:
            self.cache[layer] = key, value
        length = query.shape[2]
        keys_BHLD, values_BHLD = (
            key.repeat_interleave(repeats, 1),
            value.repeat_interleave(repeats, 1),
        )
        future_LL = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        scores = (query @ keys_BHLD.transpose(2, 3) * scaling).masked_fill(future_LL, -torch.inf)
        own_BHLD = scores.softmax(-1).to(values_BHLD.dtype) @ values_BHLD
        gates_H = None if self.gates_LH is None else self.gates_LH[layer]
        closed = gates_H is not None and not self.everywhere and not gates_H.any()
        if self.weights_BB is None or closed:
            return own_BHLD.transpose(1, 2).contiguous(), None
        keys, values = (t.repeat_interleave(repeats, 1).to(query.dtype) for t in self.cache[layer])
        pairs = torch.einsum("ihld,jhmd->ijhlm", query, keys) * scaling
        attention = pairs.masked_fill(~self.mask_BL[None, :, None, None, :], -torch.inf).softmax(-1)
        outputs = torch.einsum("ijhlm,jhmd->ijhld", attention, values)
        if gates_H is None:
            outputs = outputs / (
                torch.einsum("ijhlm,jhm->ijhl", attention, values.norm(dim=-1))[..., None] + 1e-6
            )
        cross_BHLD = torch.einsum("ij,ijhld->ihld", self.weights_BB.to(outputs.dtype), outputs)
        if gates_H is None:
            mixed = own_BHLD + cross_BHLD
        else:
            gate = gates_H[:, None, None].to(own_BHLD.dtype)
            mixed = (1 - gate) * own_BHLD + gate * cross_BHLD
        return mixed.transpose(1, 2).contiguous(), None
