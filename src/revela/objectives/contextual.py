"""Any objective with a retriever that reads a context (CDE; Morris & Rush, ICLR 2025, section 4.2).

    c   = a + head(M1(y_1)), ..., a + head(M1(y_J))      of the batch; see ContextEncoder
    L   = the objective's loss, with M2(c, text) in place of every vector

Both stages learn from the same loss: d L / d c sums over all texts of the batch, queries and
passages, and goes on to M1. Where ``embed`` computes texts in parts (GradCache), autograd sums over
the parts before it comes to M1, so the two stages need no cache of their own; the context documents
are embedded in parts as well.

``--context-from`` says which documents a batch reads: texts of the batch itself (the paper), any of
its corpus, or none (constant: the anchors alone are learned, the control for what more tokens of
computation give).

Objectives that compare with the retriever before training (gains, attention) turn its LoRA off; it
reads the batch's context then, too.

Cost: a text is read with J more tokens, and J documents per batch by the first stage.

Shapes: J slots, N <= J documents, D width of the embedding table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from revela.device import autocast
from revela.objectives.base import Batch, BuildContext, Collate, Row, Side, row_random
from revela.objectives.gradcache import embed
from revela.retriever.context import ContextEncoder, filled


class ContextualRetriever(nn.Module):
    """A retriever with slots that reads the context it was given last; ``dropout`` is the chance of
    each slot of a text to be null while it trains.
    """

    def __init__(self, model: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.model, self.dropout = model, dropout
        self._rows: tuple[Tensor, Tensor] | None = None

    def read_context(self, rows_JD: Tensor, null_JD: Tensor) -> None:
        """Read these rows before every text until the next call, as a backward pass may compute
        the texts again. A slot that is dropped reads its row of ``null_JD``.
        """
        self._rows = rows_JD, null_JD

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        assert self._rows is not None
        model: Any = self.model
        with filled(model, *self._rows, self.dropout if self.training else 0.0):
            out: dict[str, Any] = model(features)
        return out


class Contextual(nn.Module):
    """An objective whose retriever reads a context per batch.

    Args:
        objective: its ``model`` is ``retriever``, the second stage.
        context_encoder: unless it is constant, the last side of a batch holds its documents.
        null: chance of a batch to have the context of no documents.
        retriever_batch: documents per forward pass, as in gradcache.embed.
        bf16: run the first stage under bf16 autocast.
    """

    def __init__(
        self,
        objective: nn.Module,
        retriever: ContextualRetriever,
        context_encoder: ContextEncoder,
        *,
        null: float = 0.0,
        retriever_batch: int = 0,
        bf16: bool = False,
    ) -> None:
        super().__init__()
        self.objective, self.context_encoder = objective, context_encoder
        self.null, self.bf16 = null, bf16
        self.retriever_batch = retriever_batch
        # A part of the objective already, so its parameters must not be registered again.
        self._read_context = retriever.read_context

    def forward(self, features: Sequence[Side]) -> Tensor:
        """The objective's loss with the context of this batch."""
        sides, first = list(features), self.context_encoder
        if first.constant:
            rows_JD = first.anchors_JD
        else:
            rows_JD = first.of_vectors(self._embed(sides.pop()))
            if self.training and self.null and torch.rand(()) < self.null:
                rows_JD = first.null_JD
        self._read_context(rows_JD, first.null_JD)
        loss: Tensor = self.objective(sides)
        return loss

    def _embed(self, documents: Side) -> Tensor:
        with autocast(documents["input_ids"].device, self.bf16):
            return embed(self.context_encoder.model, documents, self.retriever_batch)


@dataclass(frozen=True)
class ContextBatches:
    """The batches of an objective, with the documents of their context as the last side."""

    parts: BuildContext
    collate: Collate
    context_encoder: ContextEncoder

    def __call__(self, rows: Sequence[Row]) -> Batch:
        batch = self.collate(rows)
        texts = [self.parts.rows[i].text for i in self.choose(rows)]
        features = self.context_encoder.preprocess(texts)
        self.parts.count(int(features["attention_mask"].sum()))
        return {**batch, **{f"context_{name}": tensor for name, tensor in features.items()}}

    def choose(self, rows: Sequence[Row]) -> list[int]:
        """The rows of the corpus that are a batch's context, J or as many as there are."""
        recipe, slots = self.parts.recipe, self.context_encoder.slots
        own = [int(row["row"]) for row in rows]
        draw = row_random(rows[0], recipe.training.seed)
        if recipe.context.context_from == "batch":
            return draw.sample(own, min(slots, len(own)))
        corpus = self._rows_by_corpus[self._corpus_of(int(rows[0]["document"]))]
        drawn = draw.sample(range(len(corpus)), min(slots + len(own), len(corpus)))
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
