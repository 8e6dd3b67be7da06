"""Models with a ``Router``, which reads queries by other modules than passages.

Each role has a plain model: the router's modules of that role, and what the two share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from torch import nn

from revela.errors import RevelaError, first_line

Task = Literal["query", "document"]
"""The roles of a text, as sentence-transformers calls them."""


def has_routes(model: SentenceTransformer) -> bool:
    """Whether a model reads queries and passages by modules of their own."""
    return any(isinstance(part, modules.Router) for part in model)


def routed(model: SentenceTransformer, task: Task) -> SentenceTransformer:
    """The model that reads texts of this role, with the weights of ``model``; without routes, it is
    ``model`` itself.

    Raises:
        RevelaError: the role has no route.
    """
    if not has_routes(model):
        return model
    try:
        parts = list(_parts(model, task))
    except ValueError as error:
        raise RevelaError(
            f"this model has no route for a {task} ({first_line(error)}): give another model"
        ) from error
    how = dict(prompts=model.prompts, truncate_dim=model.truncate_dim, device=str(model.device))
    return SentenceTransformer(modules=parts, **how)


def _parts(parts: Iterable[nn.Module], task: Task) -> Iterator[nn.Module]:
    for part in parts:
        if isinstance(part, modules.Router):
            route = part._resolve_route(task=task, modality="text")  # nothing public says it
            yield from _parts(part.sub_modules[route], task)
        else:
            yield part
