"""Rank the heads of a language model for a method: ``revela heads``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from revela.encoders.torch_model import uses_bf16
from revela.errors import RevelaError
from revela.training.device import compute_device
from revela.training.lm.language_model import load_language_model
from revela.training.lm.prompts import PromptMaker
from revela.training.methods.base import DocumentAttention
from revela.training.methods.dream import query_heads
from revela.training.methods.heads import METHOD, Head
from revela.training.methods.revela import sibling_heads
from revela.training.models import find_weights, load_tokenizer
from revela.training.recipe import Recipe
from revela.training.training_set import TrainingSet
from revela.types import Document


def rank_heads(
    recipe: Recipe, documents: Sequence[Document], queries_file: Path | None
) -> tuple[Path, list[Head]]:
    """The LM's folder, and the ranking of its heads for the recipe's method.

    Raises:
        RevelaError: the method reads no heads.
    """
    if not isinstance(recipe.method, DocumentAttention):
        those = " or ".join(METHOD.values())
        raise RevelaError(f"--method {recipe.method.name} reads no heads: give --method {those}")
    folder = find_weights(recipe.lm.lm, recipe.retriever.offline_model)
    device = compute_device()
    bf16 = uses_bf16(recipe.training.precision, device)
    lm = load_language_model(folder, bf16=bf16, name=recipe.lm.lm).to(device)
    tokenizer = load_tokenizer(folder)
    lm_tokens, seed = recipe.lm.lm_tokens, recipe.training.seed
    if recipe.method.kind_of_heads == "siblings":
        return folder, sibling_heads(lm, tokenizer, folder, documents, lm_tokens, seed)
    data = TrainingSet(recipe, documents, queries_file=queries_file)
    prompts = PromptMaker(tokenizer, lm_tokens, recipe.groups.group_size)
    rows, written, source = data.rows, data.generated_queries, recipe.queries.queries
    probed = getattr(recipe.method, "probe_questions", 0)
    return folder, query_heads(lm, prompts, folder, rows, written, source, seed, probed)
