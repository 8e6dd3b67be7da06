"""Gain distillation (ours): the retriever learns how much each chunk helps an LM to predict
another.

    g    = - d L / d s   at s = 0, with Sim = softmax_{j != i}(s)
    t_i  = z( z(g_i + g^T_i) + z(cos_0(i, .)) )
    loss = mean_i KL( softmax(2 t_i) || softmax_{j != i}(cos(i, j) / tau) )

- L: Revela's next-token loss (revela.py).
- g_ij: the gain, how much a higher weight of chunk j lowers the loss on chunk i.
- g + g^T: symmetric, because a chunk helps where it is helped.
- cos_0: the retriever's cosines before training. An LM ranks best together with a fitted retriever.
- z: standard scores over the other chunks of a group.

Why at equal weights: with W = Sim and G_ij = - d L / d W_ij, Revela's gradient to a pair is W_ij
(G_ij - sum_k W_ik G_ik). It mostly repeats the weights that the retriever already gives. At equal
weights it is the gain alone: it tells chunks of one document from others with an AUC of 0.83
instead of 0.69 (docs/results.md). To first order, g is the signal for which REPLUG reads every
pair.

It is of no paper: it puts together Revela's loss and REPLUG's divergence from a ranking
(replug.py).

Read next: revela.py (the loss and its gates), base.py.

Cost: one forward and one backward pass of the frozen LM.
Memory: as for Revela; the retriever's vectors before training are cached, up to 256 MiB.
When to use it: on prose in clusters of similar chunks (preset gains).
Measured: eight minutes of one core from a fitted start leave SciFact at 0.583 and take CosQA from
0.364 to 0.369.

Shapes: B chunks of a batch, n of a group; Q queries, N texts, D width of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revela.errors import RevelaError
from revela.training.device import on_cpu
from revela.training.lm.language_model import LanguageModel, Packed
from revela.training.methods.base import (
    BuildContext,
    Collate,
    RetrieverLoss,
    Side,
    load_lm,
    off_diagonal,
    off_diagonal_softmax,
)
from revela.training.methods.revela import ChunkBatches, InBatch, RevelaLoss, block_diagonal, gates
from revela.training.settings import Context, PositiveFloat, Preset, Retriever, checked

TARGET_SCALE = 2.0  # factor of the target before its softmax
MAX_CACHED = 2**26  # fp32 numbers in the cached vectors: 256 MiB

# Groups are clusters of similar chunks.
PRESETS: dict[str, Preset] = {"gains": {"method": "gains", "groups": "cluster"}}


@checked
class Gains(InBatch):
    """Learn the ranking of chunks by how much they help an LM, at equal weights."""

    name = "gains"
    learned_from = "{model} learned to rank texts by how much each helps {lm} to predict another."

    tau: PositiveFloat = 0.05
    "Temperature of the cosines."

    def refuse(self, retriever: Retriever, context: Context) -> None:
        if not retriever.lora_rank:
            raise RevelaError(
                "--method gains compares with the retriever before training, which "
                "--lora-rank 0 does not keep: give a rank of 1 or more"
            )

    def build(self, parts: BuildContext) -> tuple[nn.Module, Collate]:
        lm, tokenizer, folder = load_lm(parts)
        gates_LH = gates(self, parts, lm, tokenizer, folder)
        is_fixed = parts.context_encoder is None  # else a vector depends on its batch
        initial, tau, kernel = InitialRetriever(is_fixed), self.tau, self.kernel
        loss = GainsLoss(
            parts.model, lm, initial, gates_LH=gates_LH, tau=tau, kernel=kernel, **parts.batching
        )
        return loss, ChunkBatches(parts, tokenizer, self.query_side, self.whole_query_sources)


class GainsLoss(RevelaLoss):
    """The loss of a batch of groups.

    Args:
        model, lm, options: as for ``RevelaLoss``.
        initial: ``model`` before training.
    """

    exact_logits = True  # gains are differences of likelihoods

    def __init__(
        self, model: nn.Module, lm: LanguageModel, initial: InitialRetriever, **options: Any
    ) -> None:
        super().__init__(model, lm, **options)
        self.initial = initial

    def forward(self, features: Sequence[Side]) -> Tensor:
        """Loss in nats per chunk; ``features`` as for ``RevelaLoss``."""
        query, passage, chunk = features
        gains_BB = self.gains(self.lm.pack(chunk["input_ids"], chunk["attention_mask"]))
        gains = [gains_BB[group, group] for group in self.places(len(gains_BB))]
        teachers = [off_diagonal(gain_nn + gain_nn.T) for gain_nn in gains]
        cosines = self.cosines(query, passage)
        initial = self.cosines_of(*(self.initial.embed(self, side) for side in (query, passage)))
        students, begun = (map(off_diagonal, groups) for groups in (cosines, initial))
        groups = zip(students, teachers, begun, strict=True)
        return torch.stack([ranking_loss(*group, self.tau) for group in groups]).mean()

    def gains(self, packed: Packed) -> Tensor:
        """(B, B) gains g; 0 between groups and on the diagonal, and rows sum to 0."""
        places, device = self.places(len(packed.lengths)), packed.ids_1T.device
        with torch.enable_grad():
            scores = [
                torch.zeros(size, size, device=device, requires_grad=True)
                for size in (len(packed.lengths[group]) for group in places)
            ]
            loss = self.lm_loss(packed, block_diagonal(map(off_diagonal_softmax, scores)))
        return block_diagonal(-slope_nn for slope_nn in torch.autograd.grad(loss, scores))


class InitialRetriever:
    """The retriever before training, without dropout.

    Args:
        cache: compute the vector of each text once. Its vector must depend on the text alone.
    """

    def __init__(self, cache: bool = False) -> None:
        self.cache, self.cached = cache, dict[bytes, Tensor]()

    @torch.no_grad()
    def embed(self, loss: RetrieverLoss, side: Side) -> Tensor:
        """(N, D) unit vectors of tokenized texts."""
        rows = zip(on_cpu(side["input_ids"]), on_cpu(side["attention_mask"]).bool(), strict=True)
        keys = [blake2b(ids[mask].numpy(), digest_size=16).digest() for ids, mask in rows]
        if self.cached.keys() >= set(keys):
            return torch.stack([self.cached[key] for key in keys])
        retriever: Any = loss.model
        with retriever.evaluating(adapters=False):
            unit_ND = loss.embed(side)
        if self.cache and len(self.cached) * unit_ND.shape[1] < MAX_CACHED:
            self.cached.update(zip(keys, unit_ND, strict=True))
        return unit_ND


def ranking_loss(
    cosine_QB: Tensor, teacher_QB: Tensor, initial_QB: Tensor, tau: float | Tensor
) -> Tensor:
    """L of one group, in nats per query."""
    target_QB = TARGET_SCALE * zscore(zscore(teacher_QB) + zscore(initial_QB))
    return F.kl_div(
        (cosine_QB / tau).log_softmax(dim=-1), target_QB.softmax(dim=-1), reduction="batchmean"
    )


def zscore(scores: Tensor) -> Tensor:
    """Standard scores over the last dimension; 0 where all are equal."""
    centred = scores - scores.mean(dim=-1, keepdim=True)
    return centred / centred.square().mean(dim=-1, keepdim=True).sqrt().clamp(min=1e-9)
