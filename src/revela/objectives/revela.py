"""Revela: a retriever learns which chunk helps to predict which, from an LM's next-token loss alone
(ICLR 2026).

The retriever says how similar chunk i (as query) is to every other chunk j (as passage) of its
group; an LM predicts chunk i while its attention also reads the other chunks, weighted by that
similarity. The loss is the LM's next-token loss, so a higher weight on a chunk that helps is a
lower loss. Equations in docs/papers.md.

Two ways to mix the own-document output s with the in-batch output b of document attention:
- gated: h = (1 - g) s + g b, per head. A frozen LM survives it, and gives a signal from the first
  step.
- paper: h = s + b with V-normalised b, every layer and head. The LM has to be trained along.

Traded: with a frozen LM only d loss / d Sim (B x B) leaves the LM. It is taken at once
(gradcache.py), so memory is the larger of the LM's and the retriever's, not the sum.

Shapes: B chunks of a group, T tokens in all, L layers, H heads, G key-value heads, D width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revela.lm.document_attention import Kernel
from revela.lm.in_batch_attention import InBatchAttention
from revela.lm.streams import ReadableLM
from revela.objectives.gradcache import backward_now, embed

TINY = 1e-12  # added to a variance of cosines: equal cosines stay equal, with a finite gradient


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
    thousands falls with it (docs/log.md). Standardised, only the order and the shape of a row
    count.

    Args:
        query_BD: chunk embeddings as queries; any norm.
        passage_BD: chunk embeddings as passages; any norm.
        tau: temperature of the cosine, or, standardised, of its standard scores.
        standardise: divide each row's cosines by their standard deviation (ours, not the paper's).
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
                scores_BB / (others(scores_BB).var(dim=1, correction=0, keepdim=True) + TINY).sqrt()
            )
        return softmax_of_others(scores_BB / tau)


def softmax_of_others(scores_BB: Tensor) -> Tensor:
    """Each row's soft-max over j != i; zero diagonal, rows sum to 1."""
    diagonal_BB = torch.eye(len(scores_BB), dtype=torch.bool, device=scores_BB.device)
    return scores_BB.masked_fill(diagonal_BB, -torch.inf).softmax(dim=-1)


def others(scores_BB: Tensor) -> Tensor:
    """(B, B - 1): the rows without their diagonal, and without asking a GPU how many numbers there
    are.
    """
    size = len(scores_BB)
    return scores_BB.flatten()[1:].view(size - 1, size + 1)[:, :-1].reshape(size, size - 1)


def sibling_loss(weights_BB: Tensor, document_B: Tensor) -> Tensor:
    """Mean over the chunks that have some of -log of Sim's share on their siblings, the other
    chunks of their document (ours).

    A contrastive loss whose positives are what the author put into one text, as random crops are;
    the vectors are there already.
    """
    sibling_BB = (document_B[:, None] == document_B).fill_diagonal_(False)
    share_B = (weights_BB * sibling_BB).sum(dim=1)
    has_B = sibling_BB.any(dim=1)
    return -(share_B.clamp_min(TINY).log() * has_B).sum() / has_B.sum().clamp_min(1)


class Revela(nn.Module):
    """The objective as Sentence Transformers' trainer hosts it.

    Args:
        model: the retriever; called on tokenized features, gives ``sentence_embedding``.
        lm: the language model.
        tau: temperature of Sim; ``learn_tau`` makes it a parameter (kept positive by its
            logarithm).
        gates_LH: gates of the gated form, or None for the paper's sum; ``learn_gates`` makes them
            parameters.
        v_norm, epsilon, kernel: see InBatchAttention.
        standardise: see in_batch_weights.
        sim_dtype: precision of Sim, None for the embeddings' own.
        group_size: chunks a group; a batch may hold several groups, which do not see one another.
            0: a batch is one group.
        retriever_batch: texts that the retriever reads at a time; see gradcache.embed.
        siblings: weight of ``sibling_loss`` beside the LM's.
    """

    def __init__(
        self,
        model: nn.Module,
        lm: ReadableLM,
        *,
        tau: float,
        gates_LH: Tensor | None,
        v_norm: bool,
        epsilon: float = 0.0,
        standardise: bool = False,
        sim_dtype: torch.dtype | None = None,
        learn_tau: bool = False,
        learn_gates: bool = False,
        group_size: int = 0,
        retriever_batch: int = 0,
        kernel: Kernel = "torch",
        siblings: float = 0.0,
    ) -> None:
        super().__init__()
        self.siblings = siblings
        self.group_size, self.retriever_batch, self.kernel = group_size, retriever_batch, kernel
        self.model = model
        self.lm = lm
        self.v_norm, self.epsilon, self.standardise, self.sim_dtype = (
            v_norm,
            epsilon,
            standardise,
            sim_dtype,
        )
        self.log_tau = nn.Parameter(torch.tensor(math.log(tau)), requires_grad=learn_tau)
        self.gates_LH = (
            None if gates_LH is None else nn.Parameter(gates_LH.clone(), requires_grad=learn_gates)
        )
        self.layers = gated_layers(gates_LH, lm.n_layers)

    def forward(
        self, features: Sequence[dict[str, Tensor]], labels: Tensor | None = None
    ) -> Tensor:
        """Loss (nats a token) of a batch; ``features`` are its chunks as queries, as passages, and
        as the LM reads them (with ``document``, of each chunk, where siblings count).
        """
        query, passage, chunk = features
        query_BD, passage_BD = (
            embed(self.model, side, self.retriever_batch) for side in (query, passage)
        )
        weights_BB = self.weights(query_BD, passage_BD)
        packed = self.lm.pack(chunk["input_ids"], chunk["attention_mask"])
        of_siblings = (
            self.siblings * sibling_loss(weights_BB, chunk["document"]) if self.siblings else 0.0
        )
        if self.lm.trainable:
            return self.lm_loss(packed, weights_BB, self.gates_LH) + of_siblings
        return backward_now(partial(self.lm_loss, packed), weights_BB, self.gates_LH) + of_siblings

    def groups(self, rows_B: Tensor) -> tuple[Tensor, ...]:
        """The rows of each group of the batch."""
        return torch.split(rows_B, self.group_size or len(rows_B))

    def weights(self, query_BD: Tensor, passage_BD: Tensor) -> Tensor:
        """Sim within each group of the batch, 0 between groups."""
        return _block_diagonal(
            in_batch_weights(
                query,
                passage,
                self.log_tau.exp(),
                standardise=self.standardise,
                dtype=self.sim_dtype,
            ).float()
            for query, passage in zip(self.groups(query_BD), self.groups(passage_BD), strict=True)
        )

    def signal(self, packed: Any, scores: Sequence[Tensor]) -> Tensor:
        """Minus the derivative of the LM's loss by the scores of each group whose soft-max is Sim:
        (B, B), 0 between groups and on the diagonal, and in sum over a row. It is what the
        retriever is told about each pair.
        """
        with torch.enable_grad():
            leaves = [group.detach().requires_grad_() for group in scores]
            weights_BB = _block_diagonal(softmax_of_others(group) for group in leaves)
            loss = self.lm_loss(
                packed, weights_BB, None if self.gates_LH is None else self.gates_LH.detach()
            )
        return _block_diagonal(-gradient for gradient in torch.autograd.grad(loss, leaves))

    def lm_loss(self, packed: Any, weights_BB: Tensor, gates_LH: Tensor | None) -> Tensor:
        """Next-token loss of stream h under these weights (Revela, eqs. 5-8)."""
        memory = self.lm.read(packed, self.layers)
        mix = InBatchAttention(
            weights_BB,
            packed.lengths,
            gates_LH,
            v_norm=self.v_norm,
            epsilon=self.epsilon,
            kernel=self.kernel,
        )
        return self.lm.loss(packed, memory, mix)


def _block_diagonal(blocks: Iterable[Tensor]) -> Tensor:
    whole: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
    return whole


def gated_layers(gates_LH: Tensor | None, n_layers: int) -> list[int]:
    """The layers that in-batch attention touches: all, or those with a gate that is not 0."""
    if gates_LH is None:
        return list(range(n_layers))
    return [int(layer) for layer in gates_LH.detach().ne(0).any(dim=1).nonzero().squeeze(1)]


def gates_in_upper_layers(lm: ReadableLM, gate: float, first: int) -> Tensor:
    """The same gate on every head from layer ``first`` (0-based) up; (L, H)."""
    gates_LH = torch.zeros(lm.n_layers, lm.n_heads)
    gates_LH[first:] = gate
    return gates_LH


def gates_on_heads(lm: ReadableLM, gate: float, heads: Sequence[tuple[int, int]]) -> Tensor:
    """The same gate on these (layer, head) pairs; (L, H)."""
    gates_LH = torch.zeros(lm.n_layers, lm.n_heads)
    for layer, head in heads:
        gates_LH[layer, head] = gate
    return gates_LH
