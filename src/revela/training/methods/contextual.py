"""Any objective with a retriever that reads a context (CDE; Morris & Rush, ICLR 2025, section 4.2).

    c_j = a_j + head(M1(y_j)),  j = 1 .. J
    L   = the objective's loss, with M2(c, text) in place of every vector

- y_j: the context documents of the batch.
- M1, head: the first stage (``ContextEncoder``); a_j are its anchors, learned rows.
- M2: the second stage, the retriever. It reads c before the text.

Both stages learn from L: d L / d c sums over all texts of the batch, queries and passages, and goes
on to M1. If ``embed`` computes texts in parts (GradCache), autograd sums over the parts before it
reaches M1, so two stages need no cache of their own. Context documents are embedded in parts too.

``--context-from`` says which documents a batch reads: texts of the batch itself (the paper), any of
its corpus, or none. Without documents (constant) the anchors alone are learned, as a control for
the effect of more tokens.

An objective that compares with the retriever before training (gains) turns off its LoRA; it then
reads the context of the batch too.

Cost: J more tokens per text, and J documents per batch for the first stage.

Shapes: J slots, N <= J documents, D width of the embedding table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from revela.training.methods.base import (
    Batch,
    BuildContext,
    Collate,
    Row,
    Side,
    embed_in_parts,
    row_random,
)
from revela.training.retriever.context import ContextEncoder
from revela.training.retriever.module import RetrieverModule


class Contextual(nn.Module):
    """An objective whose retriever reads a context per batch.

    Args:
        objective: trains ``retriever``.
        retriever: the second stage.
        context_encoder: the first stage. Unless it is constant, its documents are the last side of
            a batch.
        null: probability of a batch without documents.
        retriever_batch: documents per forward pass; see ``embed_in_parts``.
        bf16: run the first stage's transformer under bf16 autocast.
    """

    def __init__(
        self,
        objective: nn.Module,
        retriever: RetrieverModule,
        context_encoder: ContextEncoder,
        *,
        null: float = 0.0,
        retriever_batch: int = 0,
        bf16: bool = False,
    ) -> None:
        super().__init__()
        self.objective, self.retriever = objective, retriever
        self.context_encoder = context_encoder
        self.null, self.retriever_batch, self.bf16 = null, retriever_batch, bf16

    def forward(self, features: Sequence[Side]) -> Tensor:
        """The objective's loss in the context of this batch."""
        sides, encoder = list(features), self.context_encoder
        if encoder.constant:
            rows_JD = encoder.anchors_JD
        else:
            read = partial(encoder.vectors, bf16=self.bf16)
            rows_JD = encoder.of_vectors(embed_in_parts(read, sides.pop(), self.retriever_batch))
            if self.training and self.null and torch.rand(()) < self.null:
                rows_JD = encoder.null_JD
        # Kept until the next batch: a backward pass may run the retriever again.
        self.retriever.context = rows_JD, encoder.null_JD
        loss: Tensor = self.objective(sides)
        return loss


@dataclass(frozen=True)
class ContextBatches:
    """Adds the context documents of a batch to another collator's batch, as the last side."""

    parts: BuildContext
    collate: Collate
    context_encoder: ContextEncoder

    def __call__(self, rows: Sequence[Row]) -> Batch:
        batch = self.collate(rows)
        texts = [self.parts.rows[i].text for i in self.choose(rows)]
        features = self.context_encoder.stage.tokenize(texts, "passage")
        self.parts.count(int(features["attention_mask"].sum()))
        tensors = {k: v for k, v in features.items() if isinstance(v, Tensor)}
        return {**batch, **{f"context_{name}": tensor for name, tensor in tensors.items()}}

    def choose(self, rows: Sequence[Row]) -> list[int]:
        """Rows of the corpus for the context of a batch: J, or all if there are fewer."""
        recipe, slots = self.parts.recipe, self.context_encoder.slots
        own = [int(row["row"]) for row in rows]
        rng = row_random(rows[0], recipe.training.seed)
        if recipe.context.context_from == "batch":
            return rng.sample(own, min(slots, len(own)))
        corpus = self._rows_by_corpus[self._corpus_of(int(rows[0]["document"]))]
        drawn = rng.sample(range(len(corpus)), min(slots + len(own), len(corpus)))
        others = [row for row in corpus[drawn].tolist() if row not in set(own)]
        return (others or own)[:slots]

    def _corpus_of(self, document: int) -> int:
        return int(np.searchsorted(self.parts.corpora, document, side="right"))

    @cached_property
    def _rows_by_corpus(self) -> list[NDArray[np.int64]]:
        corpus_N = np.searchsorted(
            self.parts.corpora, self.parts.rows.column("document"), side="right"
        )
        return [np.flatnonzero(corpus_N == i) for i in range(len(self.parts.corpora) + 1)]
