"""Wrap the loss of an objective for contexts and matryoshka widths."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from revela.errors import RevelaError
from revela.training.methods.base import BuildContext, Collate
from revela.training.methods.contextual import ContextBatches, Contextual
from revela.training.methods.matryoshka import Matryoshka
from revela.training.retriever.static_trainable import TrainableTable


def build_wrapped(parts: BuildContext) -> tuple[nn.Module, Collate]:
    """The loss of the recipe's objective for matryoshka widths, a context or both; its collator.

    Raises:
        RevelaError: a model cannot be loaded, or a setting does not suit it.
    """
    recipe, context_encoder, retriever = parts.recipe, parts.context_encoder, parts.model
    widths, width = recipe.retriever.matryoshka, retriever.dimension
    _check_widths(widths, width, isinstance(retriever.model[0], TrainableTable))
    loss, collate = recipe.objective.build(parts)
    loss = Matryoshka(loss, retriever, [*widths, width]) if widths else loss
    if context_encoder is None:
        return loss, collate
    settings, constant = recipe.context, context_encoder.constant
    retriever.slot_dropout = 0.0 if constant else settings.context_dropout
    contextual = Contextual(
        loss,
        retriever,
        context_encoder,
        null=settings.context_null,
        retriever_batch=recipe.training.retriever_batch,
        bf16=parts.bf16,
    )
    return contextual, collate if constant else ContextBatches(parts, collate, context_encoder)


def _check_widths(widths: Sequence[int], width: int, is_table: bool) -> None:
    """Check that vectors of ``width`` numbers can be truncated to ``widths``."""
    if widths and is_table:
        raise RevelaError(
            "--matryoshka has no use for a static retriever, whose vectors begin with the rows "
            "that are not trained: leave it out"
        )
    if bad := [narrow for narrow in widths if not 0 < narrow < width]:
        raise RevelaError(
            f"--matryoshka {bad[0]}: the vectors of this retriever have {width} numbers, "
            f"give widths from 1 to {width - 1}"
        )
