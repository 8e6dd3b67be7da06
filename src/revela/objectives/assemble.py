"""The objective of a recipe, with what can be put around any of them: a context, and widths."""

from __future__ import annotations

from torch import nn

from revela.errors import RevelaError
from revela.objectives.base import Collate, Parts
from revela.objectives.contextual import Conditioned, ContextBatches, Contextual
from revela.objectives.matryoshka import Matryoshka


def build_objective(parts: Parts) -> tuple[nn.Module, Collate]:
    """The loss of the recipe's objective, and what makes its batches.

    Raises:
        RevelaError: a model cannot be loaded, or a setting does not suit it.
    """
    recipe, first_stage = parts.recipe, parts.first_stage
    widths, width = recipe.retriever.matryoshka, parts.model.get_embedding_dimension()
    if bad := [narrow for narrow in widths if not 0 < narrow < width]:
        raise RevelaError(
            f"--matryoshka {bad[0]}: the vectors of this retriever have {width} numbers, "
            f"give widths from 1 to {width - 1}"
        )
    loss, collate = recipe.objective.build(parts)
    if first_stage is None:
        return (Matryoshka(loss, [*widths, width]) if widths else loss), collate
    constant, settings = first_stage.constant, recipe.context
    loss.model = retriever = Conditioned(loss.model, settings.context_dropout * (not constant))
    contextual = Contextual(
        Matryoshka(loss, [*widths, width]) if widths else loss,
        retriever,
        first_stage,
        null=settings.context_null,
        retriever_batch=recipe.training.retriever_batch,
        bf16=parts.bf16,
    )
    return contextual, collate if constant else ContextBatches(parts, collate, first_stage)
