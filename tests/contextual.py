"""A tiny retriever with slots, untrained but with a first stage that says something."""

from __future__ import annotations

from pathlib import Path

import torch

from conftest import make_rows, tiny_retriever
from revela.retriever.context import SavedContext, add_context
from revela.retriever.save import save_retriever
from revela.settings import Recipe

SLOTS = 8


def save_contextual(lm: Path, folder: Path) -> Path:
    """Save one in a folder, with the context of eight documents."""
    torch.manual_seed(5)
    model = tiny_retriever(lm, max_tokens=100)
    texts = [row["text"] for row in make_rows(40, sentences=2)[::5]]
    first = add_context(Recipe.of(context=SLOTS), model, texts[0])
    assert first is not None
    for weight in (list(first.model)[-1].linear.weight, first.null_D):
        torch.nn.init.normal_(weight, std=0.3)
    save_retriever(model, folder, "", context=SavedContext(first, first.of_texts(texts), {}))
    return folder
