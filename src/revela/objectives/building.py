"""What each objective needs for a run: its module and its batches, one function an objective.

Everything else of a run (run.py) is the same for all, so that they can be compared. To add one: a
module in ``objectives/``, a collator, and a function here.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from revela.corpus.arrow_list import ArrowList
from revela.errors import RevelaError
from revela.lm.head_ranking import heads_from_file
from revela.lm.language_model import LanguageModel, load_language_model, load_tokenizer
from revela.lm.prompts import QUESTION_TOKENS, Batch, PromptMaker
from revela.objectives.attention_distillation import AttentionDistillation
from revela.objectives.collate import (
    ChunkCollator,
    CropCollator,
    PromptCollator,
    QueryCollator,
    Row,
)
from revela.objectives.contrastive import Contrastive
from revela.objectives.dream import Dream
from revela.objectives.find_heads import query_heads, sibling_heads
from revela.objectives.gains import GainDistillation
from revela.objectives.matryoshka import Matryoshka
from revela.objectives.replug import Replug
from revela.objectives.revela import Revela, gates_in_upper_layers, gates_on_heads
from revela.retriever.encode import load_encoder
from revela.retriever.lora import without_lora
from revela.settings import Recipe
from revela.types import Chunk, Document, Encoder
from revela.weights import find_weights

log = logging.getLogger(__name__)

Collate = Callable[[Sequence[Row]], Batch]


@dataclasses.dataclass(frozen=True)
class Materials:
    """What the functions below build from."""

    recipe: Recipe
    documents: Sequence[Document]
    rows: ArrowList[Chunk]
    model: SentenceTransformer
    device: torch.device
    bf16: bool
    count: Callable[[int], None]


def build_objective(materials: Materials) -> tuple[nn.Module, Collate]:
    """The module that the trainer hosts, and what makes its batches."""
    build: dict[str, Callable[[Materials], tuple[nn.Module, Collate]]]
    build = {
        "revela": _revela,
        "gains": _gains,
        "dream": _dream,
        "attention": _attention,
        "replug": _replug,
        "infonce": _infonce,
        "crop": _crop,
    }
    widths, whole = materials.recipe.matryoshka, materials.model.get_embedding_dimension()
    if bad := [width for width in widths if not 0 < width < whole]:
        raise RevelaError(
            f"--matryoshka {bad[0]}: this retriever's vectors have {whole} numbers, give from 1 to {whole - 1}"
        )
    objective, collate = build[materials.recipe.objective](materials)
    return (Matryoshka(objective, [*widths, whole]) if widths else objective), collate


def _revela(m: Materials) -> tuple[nn.Module, ChunkCollator]:
    lm, settings, collate = _in_batch(m)
    return Revela(m.model, lm, **settings), collate


def _gains(m: Materials) -> tuple[nn.Module, ChunkCollator]:
    lm, settings, collate = _in_batch(m)
    began = functools.partial(without_lora, m.model)
    objective = GainDistillation(
        m.model,
        lm,
        as_it_began=began,
        sharpness=m.recipe.sharpness,
        prior=m.recipe.prior,
        **settings,
    )
    return objective, collate


def _in_batch(m: Materials) -> tuple[LanguageModel, dict[str, Any], ChunkCollator]:
    """The LM, the settings of its in-batch attention, and what makes its batches."""
    recipe = m.recipe
    lm, tokenizer, folder = _language_model(m)
    settings: dict[str, Any] = dict(
        tau=recipe.tau,
        gates_LH=_gates(m, lm, folder, tokenizer),
        v_norm=recipe.v_norm,
        epsilon=recipe.epsilon,
        standardise=recipe.standardise,
        sim_dtype=torch.bfloat16 if recipe.sim_dtype == "bf16" else None,
        learn_tau=recipe.learn_tau,
        learn_gates=recipe.learn_gates,
        group_size=recipe.group_size,
        retriever_batch=recipe.retriever_batch,
        kernel=recipe.kernel,
        siblings=recipe.siblings,
    )
    return (
        lm,
        settings,
        ChunkCollator(
            m.model, m.count, tokenizer, recipe.lm_tokens, recipe.query_side, recipe.seed
        ),
    )


def _replug(m: Materials) -> tuple[nn.Module, ChunkCollator]:
    recipe = m.recipe
    lm, tokenizer, _ = _language_model(m)
    plain, whole = (
        tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True)
    )
    objective = Replug(
        m.model,
        lm,
        tau=recipe.tau,
        tau_lm=recipe.tau_lm,
        by_token=recipe.likelihood == "mean",
        lead=whole.index(plain[0]),
        group_size=recipe.group_size,
        retriever_batch=recipe.retriever_batch,
        lm_batch=recipe.lm_batch,
        learn_tau=recipe.learn_tau,
    )
    return objective, ChunkCollator(
        m.model, m.count, tokenizer, recipe.lm_tokens, recipe.query_side, recipe.seed
    )


def _infonce(m: Materials) -> tuple[nn.Module, QueryCollator]:
    recipe = m.recipe
    return _contrastive(recipe, m.model, recipe.group_size), QueryCollator(
        m.model, m.count, _surrogate(m)
    )


def _crop(m: Materials) -> tuple[nn.Module, CropCollator]:
    recipe = m.recipe
    if not 0 < recipe.crop_least <= recipe.crop_most:
        raise RevelaError(
            f"--crop-least {recipe.crop_least} and --crop-most {recipe.crop_most} must be shares, the first the smaller"
        )
    crops = CropCollator(
        m.model,
        m.count,
        _surrogate(m),
        recipe.crop_least,
        recipe.crop_most,
        recipe.crop_deletion,
        recipe.seed,
    )
    return _contrastive(recipe, m.model, group_size=0), crops


def _contrastive(recipe: Recipe, model: SentenceTransformer, group_size: int) -> Contrastive:
    return Contrastive(
        model,
        tau=recipe.tau,
        learn_tau=recipe.learn_tau,
        retriever_batch=recipe.retriever_batch,
        group_size=group_size,
        margin=recipe.margin,
    )


def _surrogate(m: Materials) -> Encoder | None:
    """What tells false negatives, if the recipe asks for it."""
    recipe = m.recipe
    if not recipe.drop_false_negatives:
        return None
    if not recipe.surrogate:
        raise RevelaError(
            "--drop-false-negatives needs a model that tells them: give --surrogate, embedded:minilm-l6 for example"
        )
    return load_encoder(
        find_weights(recipe.surrogate, ""), recipe.precision, recipe.surrogate_tokens
    )


def _dream(m: Materials) -> tuple[nn.Module, PromptCollator]:
    recipe = m.recipe
    lm, heads, make = _query_heads(m, answers=1)
    objective = Dream(
        m.model,
        lm,
        heads,
        tau=recipe.tau,
        gate=recipe.gate,
        group_size=recipe.group_size,
        learn_tau=recipe.learn_tau,
        learn_gate=recipe.learn_gates,
        retriever_batch=recipe.retriever_batch,
        epsilon=recipe.epsilon,
        kernel=recipe.kernel,
    )
    return objective, PromptCollator(m.model, m.count, make.with_answers)


def _attention(m: Materials) -> tuple[nn.Module, PromptCollator]:
    recipe = m.recipe
    lm, heads, make = _query_heads(m, answers=0)
    objective = AttentionDistillation(
        m.model,
        lm,
        heads,
        functools.partial(without_lora, m.model),
        tau=recipe.tau,
        sharpness=recipe.sharpness,
        prior=recipe.prior,
        group_size=recipe.group_size,
        retriever_batch=recipe.retriever_batch,
    )
    return objective, PromptCollator(m.model, m.count, make.with_null_question)


def _query_heads(
    m: Materials, answers: int
) -> tuple[LanguageModel, list[tuple[int, int]], PromptMaker]:
    """The LM, its heads that look from a question to its answer, and what makes its prompts."""
    recipe = m.recipe
    lm, tokenizer, folder = _language_model(m)
    context = getattr(lm.model.config.get_text_config(), "max_position_embeddings", None)
    longest = (recipe.group_size + answers) * (recipe.lm_tokens + 8) + QUESTION_TOKENS
    if context is not None and longest > context:
        raise RevelaError(
            f"{recipe.group_size} candidates of {recipe.lm_tokens} tokens may take {longest:,} tokens, more than the {context:,} that "
            f"{recipe.lm} reads: lower --lm-tokens or --group-size"
        )
    ranking = (
        heads_from_file(Path(recipe.heads), folder)
        if recipe.heads
        else query_heads(recipe, lm, tokenizer, folder, m.rows)
    )
    heads = [(layer, head) for layer, head, _ in ranking[: recipe.query_heads]]
    log.info(
        f"{len(heads)} heads that look from questions to answers: {' '.join(f'{a}-{b}' for a, b in heads)}"
    )
    return (
        lm,
        heads,
        PromptMaker(tokenizer, recipe.lm_tokens, recipe.group_size, recipe.lm_prompt == "chat"),
    )


def _language_model(m: Materials) -> tuple[LanguageModel, Any, Path]:
    """The LM, trained if the recipe says so, its tokenizer, and its folder."""
    recipe = m.recipe
    folder = find_weights(recipe.lm, recipe.offline_model)
    if recipe.lm_lora and recipe.objective != "revela":
        raise RevelaError(f"--objective {recipe.objective} keeps the LM frozen: drop --lm-lora")
    lora = (
        dict(rank=recipe.lora_rank, alpha=recipe.lora_alpha, dropout=recipe.lora_dropout)
        if recipe.lm_lora
        else None
    )
    lm = load_language_model(folder, bf16=m.bf16, lora=lora, name=recipe.lm).to(m.device)
    return lm, load_tokenizer(folder), folder


def _gates(m: Materials, lm: LanguageModel, folder: Path, tokenizer: Any) -> Tensor | None:
    recipe = m.recipe
    if recipe.mix == "sum":
        return None
    first = int(recipe.gate_first_layer * lm.n_layers)
    if recipe.heads:
        ranking = heads_from_file(Path(recipe.heads), folder)
    else:
        ranking = (
            sibling_heads(recipe, lm, tokenizer, folder, m.documents) if recipe.gate_heads else []
        )
    if not ranking:
        why = "the documents are too short to probe the LM's heads: " if recipe.gate_heads else ""
        log.info(f"{why}gate {recipe.gate} on every head of layers {first} to {lm.n_layers - 1}")
        return gates_in_upper_layers(lm, recipe.gate, first)
    best = [(layer, head) for layer, head, _ in ranking if layer >= first][: recipe.gate_heads]
    log.info(
        f"gate {recipe.gate} on {len(best)} heads: {' '.join(f'{a}-{b}' for a, b in best[:12])}{' ...' if len(best) > 12 else ''}"
    )
    return gates_on_heads(lm, recipe.gate, best)
