"""Revela: a retriever learns which chunk helps to predict which, from an LM's next-token loss alone
(ICLR 2026).

The retriever gives the similarity of chunk i (as query) to each other chunk j (as passage) of its
group. An LM predicts chunk i while its attention also reads the other chunks, weighted by it:

    Sim_ij = softmax_{j != i}( cos(q_i, p_j) / tau )                       (eq. 4)
    b_i    = sum_j Sim_ij * attention(Q_i, K_j, V_j)                       (eqs. 5-7)
    h_i    = (1 - g) s_i + g b_i    gated: per head, the LM frozen (ours)
    h_i    = s_i + b_i              sum: V-normalised b, all heads, the LM trained by LoRA
    L      = mean over tokens of -log p(token | what precedes it)          (eq. 8)

s is the LM's own attention output in its document. A chunk that helps lowers the loss, so its
weight grows. A frozen LM survives the gated form, and gives a signal from the first step.

Cost: the LM reads each chunk once below the first gated layer and twice above it. With a frozen LM
only d L / d Sim (B x B numbers) leaves the LM; it is computed at once (gradcache.py), so memory is
the larger of the LM's and the retriever's, not the sum.
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
import torch.nn.functional as F
from torch import Tensor, nn

from revela.lm.document_attention import EPSILON, Kernel
from revela.lm.in_batch_attention import InBatchAttention
from revela.lm.language_model import LanguageModel, Packed
from revela.lm.prompts import by_layer
from revela.objectives.base import (
    BuildContext,
    ChunkBatches,
    Collate,
    RetrieverLoss,
    Side,
    language_model,
    off_diagonal,
    softmax_of_others,
)
from revela.objectives.gradcache import detached_backward
from revela.settings import InBatch, Revela

log = logging.getLogger(__name__)

TINY = 1e-12  # added to a variance of cosines: equal cosines stay equal, with a finite gradient


def build(settings: Revela, parts: BuildContext) -> tuple[nn.Module, Collate]:
    """The loss of ``revela``, and what makes its batches."""
    lm, tokenizer, folder = language_model(parts, settings.lm_lora)
    gated = settings.mix == "gated"
    gates_LH = gates(settings, parts, lm, tokenizer, folder) if gated else None
    how: dict[str, Any] = dict(tau=settings.tau, kernel=settings.kernel, **parts.batching)
    loss = RevelaLoss(parts.model, lm, gates_LH=gates_LH, **how)
    return loss, ChunkBatches(parts, tokenizer, settings.query_side)


def gates(settings: InBatch, parts: BuildContext, lm: Any, tokenizer: Any, folder: Path) -> Tensor:
    """The gates of the heads that are gated, 0 of the others; (L, H)."""
    from revela.lm.heads import heads_from_file
    from revela.objectives.find_heads import sibling_heads

    first = int(settings.gate_first_layer * lm.n_layers)
    if settings.heads:
        ranking = heads_from_file(Path(settings.heads), folder)
    elif settings.gate_heads:
        ranking = sibling_heads(parts.recipe, lm, tokenizer, folder, parts.documents)
    else:
        ranking = []
    gate = settings.gate
    if not ranking:
        why = "the documents are too short to probe the LM's heads: " if settings.gate_heads else ""
        log.info(f"{why}gate {gate} on every head of layers {first} to {lm.n_layers - 1}")
        return gates_in_upper_layers(lm, gate, first)
    best = [(layer, head) for layer, head, _ in ranking if layer >= first][: settings.gate_heads]
    named = " ".join(f"{layer}-{head}" for layer, head in best[:12])
    log.info(f"gate {gate} on {len(best)} heads: {named}{' ...' if len(best) > 12 else ''}")
    return gates_on_heads(lm, gate, best)


class RevelaLoss(RetrieverLoss):
    """The loss of a batch of groups.

    Args:
        model: the retriever.
        lm: the language model.
        gates_LH: gates of the gated form. None: the paper's sum, with V-normalised b, and Sim of
            bf16 cosines as they are.
        kernel: see document_attention.
        shared: see RetrieverLoss.
    """

    gates_LH: Tensor | None

    def __init__(
        self,
        model: nn.Module,
        lm: LanguageModel,
        *,
        gates_LH: Tensor | None,
        kernel: Kernel = "torch",
        **shared: Any,
    ) -> None:
        super().__init__(model, **shared)
        self.lm, self.kernel = lm, kernel
        self.register_buffer("gates_LH", gates_LH)
        self.heads = None if gates_LH is None else gated_heads(gates_LH)
        self.layers = list(range(lm.n_layers) if self.heads is None else self.heads)

    def forward(self, features: Sequence[Side]) -> Tensor:
        """Loss in nats per token of a group, mean over the groups. ``features`` are the chunks as
        queries, as passages, and as the LM reads them.
        """
        query, passage, chunk = features
        weights_BB = self.weights(self.embed(query), self.embed(passage))
        packed = self.lm.pack(chunk["input_ids"], chunk["attention_mask"])
        if self.lm.trainable:
            return self.lm_loss(packed, weights_BB)
        return detached_backward(partial(self.lm_loss, packed), weights_BB)

    def weights(self, query_BD: Tensor, passage_BD: Tensor) -> Tensor:
        """Sim within each group of the batch, 0 between groups; (B, B)."""
        gated = self.gates_LH is not None
        dtype = None if gated else torch.bfloat16
        sim = partial(in_batch_weights, tau=self.tau, standardise=gated, dtype=dtype)
        pairs = zip(self.groups(query_BD), self.groups(passage_BD), strict=True)
        return block_diagonal(sim(query, passage).float() for query, passage in pairs)

    def lm_loss(self, packed: Packed, weights_BB: Tensor) -> Tensor:
        """Next-token loss of stream h with these weights (Revela, eqs. 5-8): of each group the mean
        over its tokens, and of these the mean, as of groups that are read one by one.
        """
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
        losses_R = self.lm.token_losses(packed, packed.layout.with_next_R, memory, mix)
        lengths = [packed.lengths[group] for group in self.places(len(packed.lengths))]
        counts = [sum(some) - len(some) for some in lengths]
        return torch.stack([losses.mean() for losses in torch.split(losses_R, counts)]).mean()


def in_batch_weights(
    query_BD: Tensor,
    passage_BD: Tensor,
    tau: float | Tensor,
    *,
    standardise: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Sim (Revela, eq. 4): softmax over j != i of cos(query_i, passage_j) / tau. Asymmetric, zero
    diagonal, rows sum to 1.

    Standardised, a row's cosines are divided by their standard deviation first. Otherwise the
    cheapest way to a lower loss is a sharper softmax, and the way to that is vectors that run
    together along a few directions, where cosines differ most: the loss falls, and retrieval among
    thousands falls with it (research/notebook.md). Standardised, only the order and the shape of a
    row count.

    Args:
        query_BD, passage_BD: vectors of the chunks as queries and passages; any norm.
        tau: temperature of the cosines, or of their standard scores.
        standardise: as above (ours, not the paper's).
        dtype: compute in this precision (the published run's bf16 ties act as a smoother); None
            keeps the input's.
    """
    query_BD, passage_BD = F.normalize(query_BD, dim=-1), F.normalize(passage_BD, dim=-1)
    if dtype is not None:
        query_BD, passage_BD = query_BD.to(dtype), passage_BD.to(dtype)
    with torch.autocast(query_BD.device.type, enabled=False):
        scores_BB = query_BD @ passage_BD.T
        if standardise:
            scores_BB = (
                scores_BB
                / (off_diagonal(scores_BB).var(dim=1, correction=0, keepdim=True) + TINY).sqrt()
            )
        return softmax_of_others(scores_BB / tau)


def block_diagonal(blocks: Iterable[Tensor]) -> Tensor:
    """One matrix of square blocks, 0 between them."""
    whole: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
    return whole


def gated_heads(gates_LH: Tensor) -> dict[int, list[int]]:
    """The heads of each layer whose gate is not 0, of the layers that have some."""
    return by_layer(gates_LH.nonzero().tolist())


def gates_in_upper_layers(lm: LanguageModel, gate: float, first: int) -> Tensor:
    """The same gate on every head from layer ``first`` (0-based) up; (L, H)."""
    gates_LH = torch.zeros(lm.n_layers, lm.n_heads)
    gates_LH[first:] = gate
    return gates_LH


def gates_on_heads(lm: LanguageModel, gate: float, heads: Sequence[tuple[int, int]]) -> Tensor:
    """The same gate on these (layer, head) pairs; (L, H)."""
    gates_LH = torch.zeros(lm.n_layers, lm.n_heads)
    for layer, head in heads:
        gates_LH[layer, head] = gate
    return gates_LH
