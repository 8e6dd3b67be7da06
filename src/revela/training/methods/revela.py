"""Revela (ICLR 2026): a retriever learns from an LM's next-token loss which chunks help to predict
which.

    Sim_ij = softmax_{j != i}( cos(q_i, p_j) / tau )
    b_i    = sum_j Sim_ij * attention(Q_i, K_j, V_j)                       (eqs. 5-7)
    h_i    = (1 - g) s_i + g b_i    gated: a gate per head, the LM frozen (ours)
    h_i    = s_i + b_i              sum (eq. 8): V-normalised b, all heads, the LM trained by LoRA
    L      = mean over tokens of -log p(token | what precedes it)

- q_i, p_j: the retriever's vectors of chunk i as query and chunk j as passage, in one group.
- Q_i, K_j, V_j: the LM's attention queries of chunk i, keys and values of chunk j.
- s_i: the LM's own attention output within chunk i.
- h_i: the mixed output, from which the LM predicts chunk i.

A chunk that helps lowers the loss, so its weight grows. The gated form gives a frozen LM a signal
from the first step.

Cost: the LM reads each chunk once below the first gated layer and twice above it. Only d L / d Sim
(B x B numbers) leaves a frozen LM. It is computed at once (``detached_backward``), so memory
is the larger of the LM's and the retriever's, not the sum.
When to use it: to adapt an existing embedder to prose without any queries.

Shapes: B chunks of a batch, T tokens in all, L layers, H heads, G key-value heads, D width.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from revela.errors import RevelaError
from revela.training.lm.document_attention import EPSILON, InBatchAttention, Kernel, by_layer
from revela.training.lm.language_model import LanguageModel, Packed
from revela.training.methods.base import (
    BuildContext,
    ChunkBatches,
    Collate,
    Heads,
    RetrieverLoss,
    Side,
    detached_backward,
    load_lm,
    off_diagonal,
    off_diagonal_softmax,
)
from revela.training.methods.find_heads import heads_from_file, sibling_heads
from revela.training.settings import InBatch, Revela

log = logging.getLogger(__name__)

TINY = 1e-12  # added to the variance of cosines: the gradient at equal cosines is finite


def build(settings: Revela, parts: BuildContext) -> tuple[nn.Module, Collate]:
    """The loss of ``revela`` and its collator."""
    lm, tokenizer, folder = load_lm(parts, settings.lm_lora)
    gated = settings.mix == "gated"
    gates_LH = gates(settings, parts, lm, tokenizer, folder) if gated else None
    tau, kernel = settings.tau, settings.kernel
    loss = RevelaLoss(parts.model, lm, gates_LH=gates_LH, tau=tau, kernel=kernel, **parts.batching)
    return loss, ChunkBatches(parts, tokenizer, settings.query_side)


def gates(settings: InBatch, parts: BuildContext, lm: Any, tokenizer: Any, folder: Path) -> Tensor:
    """(L, H) gates; 0 for heads that are not gated."""
    gate, first = settings.gate, int(settings.gate_first_layer * lm.n_layers)

    def best_heads() -> Heads:
        """The best heads of the upper layers; []: gate all heads there."""
        if settings.heads:
            ranking = heads_from_file(Path(settings.heads), "siblings", folder)
        elif settings.gate_heads:
            lm_tokens, seed = parts.recipe.lm.lm_tokens, parts.recipe.training.seed
            ranking = sibling_heads(lm, tokenizer, folder, parts.documents, lm_tokens, seed)
        else:
            return []
        best = [(layer, head) for layer, head, _ in ranking if layer >= first]
        if settings.heads and not best:
            raise RevelaError(
                f"{settings.heads} names no head of layer {first} or above, where gates are: "
                "make another with revela heads --objective revela --out"
            )
        return best[: settings.gate_heads or None]

    best = parts.heads(best_heads)
    if not best:
        why = "the documents are too short to probe the LM's heads: " if settings.gate_heads else ""
        log.info(f"{why}gate {gate} on every head of layers {first} to {lm.n_layers - 1}")
        return gates_in_upper_layers(lm, gate, first)
    names = " ".join(f"{layer}-{head}" for layer, head in best[:12])
    log.info(f"gate {gate} on {len(best)} heads: {names}{' ...' if len(best) > 12 else ''}")
    return gates_on_heads(lm, gate, best)


class RevelaLoss(RetrieverLoss):
    """The loss of a batch of groups.

    Args:
        model: the retriever.
        lm: the language model.
        gates_LH: gates of the gated form. None: the paper's sum, with V-normalised b and with Sim
            from bf16 cosines that are not standardised.
        kernel: see document_attention.
        tau, batching: see RetrieverLoss.
    """

    gates_LH: Tensor | None
    exact_logits = False  # see linear_cross_entropy: the mean loss needs none

    def __init__(
        self,
        model: nn.Module,
        lm: LanguageModel,
        *,
        gates_LH: Tensor | None,
        tau: float,
        kernel: Kernel = "auto",
        **batching: int,
    ) -> None:
        super().__init__(model, tau=tau, **batching)
        self.lm, self.kernel = lm, kernel
        self.register_buffer("gates_LH", gates_LH)
        self.heads = None if gates_LH is None else gated_heads(gates_LH)
        self.layers = list(range(lm.n_layers) if self.heads is None else self.heads)

    def forward(self, features: Sequence[Side]) -> Tensor:
        """Loss in nats per token; ``features`` are the chunks as queries, passages and LM input."""
        query, passage, chunk = features
        weights_BB = self.weights(self.embed(query), self.embed(passage))
        packed = self.lm.pack(chunk["input_ids"], chunk["attention_mask"])
        if self.lm.trainable:
            return self.lm_loss(packed, weights_BB)
        return detached_backward(partial(self.lm_loss, packed), weights_BB)

    def weights(self, query_BD: Tensor, passage_BD: Tensor) -> Tensor:
        """(B, B) Sim within each group, 0 between groups."""
        gated = self.gates_LH is not None
        dtype = None if gated else torch.bfloat16
        sim = partial(in_batch_weights, tau=self.tau, standardise=gated, dtype=dtype)
        pairs = zip(self.groups(query_BD), self.groups(passage_BD), strict=True)
        return block_diagonal(sim(query, passage).float() for query, passage in pairs)

    def lm_loss(self, packed: Packed, weights_BB: Tensor) -> Tensor:
        """L with Sim = ``weights_BB``: the mean over groups of the mean over tokens."""
        gated = self.gates_LH is not None
        mix = InBatchAttention(
            weights_BB,
            packed.lengths,
            self.gates_LH,
            self.heads,
            v_norm=not gated,
            epsilon=EPSILON if gated else 0.0,
            kernel=self.kernel,
        )
        memory = self.lm.prefill(packed, self.layers)
        rows_R, exact = packed.layout.with_next_R, self.exact_logits
        losses_R = self.lm.token_losses(packed, rows_R, memory, mix, exact=exact)
        lengths = [packed.lengths[group] for group in self.places(len(packed.lengths))]
        counts = [sum(group) - len(group) for group in lengths]
        return torch.stack([losses.mean() for losses in torch.split(losses_R, counts)]).mean()


def in_batch_weights(
    query_BD: Tensor,
    passage_BD: Tensor,
    tau: float | Tensor,
    *,
    standardise: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """(B, B) Sim: softmax over j != i of cos(query_i, passage_j) / tau.

    Asymmetric; the diagonal is 0, rows sum to 1.

    ``standardise`` (ours) divides a row's cosines by their standard deviation first, so that only
    their order and relative distances count. Without it the cheapest way to a lower loss is a
    sharper softmax: vectors collapse onto a few directions, where cosines differ most. The loss
    falls, and so does retrieval among thousands (research/notebook.md).

    Args:
        query_BD, passage_BD: unit vectors of the chunks as queries and passages.
        tau: temperature of the cosines, or of the standardised cosines.
        standardise: see above.
        dtype: compute in this precision (rounding ties of the published run's bf16 smooth Sim).
            None: that of the input.
    """
    if dtype is not None:
        query_BD, passage_BD = query_BD.to(dtype), passage_BD.to(dtype)
    scores_BB = query_BD @ passage_BD.T
    if standardise:
        variance_B1 = off_diagonal(scores_BB).var(dim=1, correction=0, keepdim=True)
        scores_BB = scores_BB / (variance_B1 + TINY).sqrt()
    return off_diagonal_softmax(scores_BB / tau)


def block_diagonal(blocks: Iterable[Tensor]) -> Tensor:
    """One matrix of square blocks on its diagonal."""
    matrix: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
    return matrix


def gated_heads(gates_LH: Tensor) -> dict[int, list[int]]:
    """Layer -> its heads whose gate is not 0."""
    return by_layer(gates_LH.nonzero().tolist())


def gates_in_upper_layers(lm: LanguageModel, gate: float, first: int) -> Tensor:
    """(L, H) the same gate on every head from layer ``first`` (0-based) up."""
    gates_LH = torch.zeros(lm.n_layers, lm.n_heads)
    gates_LH[first:] = gate
    return gates_LH


def gates_on_heads(lm: LanguageModel, gate: float, heads: Sequence[tuple[int, int]]) -> Tensor:
    """(L, H) the same gate on these (layer, head) pairs."""
    gates_LH = torch.zeros(lm.n_layers, lm.n_heads)
    for layer, head in heads:
        gates_LH[layer, head] = gate
    return gates_LH
