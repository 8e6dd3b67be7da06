"""Refuse settings that cannot work together, before a corpus is read or a model loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from revela.encoders.model_files import NEW, table_folder
from revela.encoders.prompts import read_prompts
from revela.encoders.torch_model import uses_bf16
from revela.errors import RevelaError
from revela.quiet_libraries import silence_libraries
from revela.terminal import counted
from revela.text.analyzer import check_language
from revela.text.judgements import read_judgements
from revela.text.readers import Source
from revela.training import distributed
from revela.training.checkpoint import check_out, checkpoint_to_resume
from revela.training.device import compute_device
from revela.training.generated_queries import read_prompt
from revela.training.groups.strategies import QUERIES_PER_DOCUMENT
from revela.training.lm.document_attention import has_varlen
from revela.training.lm.encoder_decoder import size_of
from revela.training.lm.language_model import LanguageModel, check_language_model
from revela.training.methods.base import Method
from revela.training.methods.heads import heads_from_file
from revela.training.models import find_weights
from revela.training.recipe import Recipe
from revela.training.settings import Context, Groups, Queries, Retriever, Training
from revela.training.training_set import check_sources


def check_recipe(
    recipe: Recipe, out: Path, resume: bool, overwrite: bool = False, corpus: Sequence[Source] = ()
) -> None:
    """Refuse a run that cannot start. Reads no text and no weights, and writes nothing.

    Args:
        recipe, out, resume, overwrite: as for ``train``.
        corpus: the sources that it will read, if they are known.

    Raises:
        RevelaError: the output folder exists, the run has no limit, a tracker is not installed,
            judgements cannot be read, the processes cannot share the groups of a step, stored
            groups are others than the recipe needs, or the family of a model is not supported.
    """
    from accelerate.tracking import LoggerType, get_available_trackers

    training, former = recipe.training, None
    if not overwrite or distributed.is_rank_zero():  # rank zero replaces it
        former = check_out(out, resume, overwrite)
    if resume:
        checkpoint_to_resume(recipe, out)
    if (track := training.track) and LoggerType(track) not in get_available_trackers():
        raise RevelaError(f"--track {track} needs its package: install it by pip install {track}")
    check_language(recipe.corpus.language)
    recipe.method.refuse(recipe.retriever, recipe.context)
    if getattr(recipe.method, "kernel", "") == "varlen":
        device = compute_device()
        dtype = torch.bfloat16 if uses_bf16(training.precision, device) else torch.float32
        if not has_varlen(device, dtype):
            raise RevelaError("--kernel varlen needs a GPU and bf16: leave it out")
    _check_trained_weights(recipe.retriever, recipe.context)
    check_groups(recipe.groups, recipe.queries, recipe.method)
    if getattr(recipe.method, "lm_lora", False) and not recipe.retriever.lora_rank:
        raise RevelaError("--lm-lora uses the rank of --lora-rank: give --lora-rank 1 or more")
    _check_groups_per_step(recipe.method, training)
    _check_limits(recipe)
    if recipe.pairs and recipe.corpus.join_titles:
        raise RevelaError("--pairs reads documents as they are judged: leave out --join-titles")
    for folder in recipe.pairs:
        read_judgements(folder, "train")
        read_prompts(folder)
    stored = check_sources(recipe, corpus)
    silence_libraries()
    if not (resume and former):  # a resumed run keeps its models
        _check_models(recipe, reads_text=bool(corpus) and not stored)


def _check_limits(recipe: Recipe) -> None:
    """Refuse a run without a limit, and settings of mining where nothing is mined."""
    t, restarts = recipe.training, recipe.optimizer.restart_optimizer
    if not any((t.max_steps, t.max_epochs, t.max_minutes, t.max_tokens_read)):
        raise RevelaError(
            "a run needs a limit: set --max-steps, --max-epochs, --max-minutes or --max-tokens-read"
        )
    if not recipe.negatives and (restarts or recipe.groups.refresh_epochs):
        flag = "--restart-optimizer" if restarts else "--refresh-epochs"
        raise RevelaError(f"{flag} needs mined negatives: give --negatives 1 or more")


def check_groups(groups: Groups, queries: Queries, method: Method) -> None:
    """Refuse settings of groups and queries that cannot be combined or read."""
    others = {
        "--pairs": bool(getattr(method, "pairs", "")),
        f"--method {method.name}": method.reads == "windows",
        f"--queries {queries.queries}": queries.queries in QUERIES_PER_DOCUMENT,
    }
    if groups.groups == "split" and (other := [name for name, is_on in others.items() if is_on]):
        raise RevelaError(f"--groups split cannot be combined with {other[0]}: leave one out")
    if queries.questions and queries.queries != "lm":
        raise RevelaError(f"--questions replaces --queries {queries.queries}: leave one out")
    if queries.questions and not Path(queries.questions).is_file():
        raise RevelaError(f"{queries.questions} does not exist: give a JSONL file as --questions")
    if queries.question_prompt:
        read_prompt(queries.question_prompt)


def _check_models(recipe: Recipe, reads_text: bool) -> None:
    """Refuse models that are missing, of unsupported families or too small for the settings; reads
    no weights. ``reads_text``: queries may have to be written for it, and groups to be built.
    """
    from revela.training.retriever.build import check_model

    retriever, method = recipe.retriever, recipe.method
    name, offline = retriever.model, retriever.offline_model
    if not name.startswith(NEW):
        folder = find_weights(name, offline)
        if retriever.similarity == "dot" and table_folder(folder):
            raise RevelaError(
                f"--similarity dot is for a transformer, and --model {name} is static: leave it out"
            )
        check_model(folder, retriever.layers, retriever.lora_rank)
    if method.reads_lm:
        folder = find_weights(recipe.lm.lm, offline)
        lm = check_language_model(folder, recipe.lm.lm)
        if lm is not None:
            _check_lm(lm, folder, recipe)
    if reads_text and (recipe.has_written_queries or recipe.training.check_questions):
        find_weights(recipe.queries.query_lm or recipe.lm.lm, offline)
    if reads_text and recipe.groups.surrogate:
        find_weights(recipe.groups.surrogate, "")
    if of_batches := method.model_of_batches(recipe.groups):
        find_weights(of_batches, "")


def _check_lm(lm: LanguageModel, folder: Path, recipe: Recipe) -> None:
    """Refuse an LM that reads fewer tokens than a group has, or lacks the heads."""
    method, tokens, size = recipe.method, recipe.lm.lm_tokens, recipe.groups.group_size
    length, heads = method.lm_length(size, tokens), lm.n_layers * lm.n_heads
    if lm.max_tokens is not None and length > lm.max_tokens:
        raise RevelaError(
            f"the LM would read up to {length:,} tokens, more than the {lm.max_tokens:,} of "
            f"{lm.name}: lower --lm-tokens {tokens} or --group-size {size}"
        )
    if (heads_file := Path(getattr(method, "heads", ""))).is_file():
        heads_from_file(heads_file, method.kind_of_heads, folder)
    for name in ("gate_heads", "query_heads"):
        number = getattr(method, name, 0)
        if number > heads and number != getattr(type(method)(), name):
            flag = name.replace("_", "-")
            raise RevelaError(
                f"--{flag} {number}: {lm.name} has {heads} heads: give {heads} or fewer"
            )


def _check_trained_weights(retriever: Retriever, context: Context) -> None:
    """Refuse settings that conflict with a new model, and slots that documents cannot fill."""
    name, rank = retriever.model, retriever.lora_rank
    if name.startswith(NEW):
        size_of(name)
        if rank:
            raise RevelaError(
                f"--model {name} is untrained, and LoRA trains a part of it: give --lora-rank 0"
            )
        if context.context:
            raise RevelaError(f"--context needs an encoder or a decoder: --model {name} is both")
    if context.context % context.context_vectors_per_document:
        raise RevelaError(
            f"--context {context.context} cannot be divided by --context-vectors-per-document "
            f"{context.context_vectors_per_document}: give a multiple of it"
        )


def _check_groups_per_step(method: Method, training: Training) -> None:
    """Refuse groups that processes can neither divide among them nor share."""
    per_step, per_batch = training.groups_per_step, training.fixed_groups_per_batch
    n = 1 if method.shares_batches(training) else distributed.world_size()
    if per_step % (n * per_batch):
        raise RevelaError(
            f"--groups-per-step {per_step} cannot be divided among "
            f"{counted(n, 'process', 'processes')}, {per_batch} at a time (--groups-per-batch): "
            f"give a multiple of {n * per_batch}"
        )
