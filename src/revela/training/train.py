"""One training run: documents -> chunks -> groups -> objective -> a saved retriever.

``train`` shows every step, in order. Its helpers follow in the order of their use. Checks come in
as functions, so that training does not depend on evaluation.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from revela import distributed as distributed
from revela.corpus.judgements import judgements_dir
from revela.corpus.spool import LazyTexts
from revela.device import after_a_batch, compute_device, uses_bf16
from revela.files import remove_whole
from revela.groups.dataset import TrainingSet
from revela.groups.store import GroupFolder
from revela.lm.encoder_decoder import new_encoder_decoder
from revela.lm.language_model import LanguageModel
from revela.model_files import NEW, commits, find_weights
from revela.objectives.base import BuildContext, Collate
from revela.objectives.contextual import ContextBatches, Contextual, ContextualRetriever
from revela.objectives.matryoshka import Matryoshka
from revela.retriever.build import untrained_retriever
from revela.retriever.card import Card, without_folders
from revela.retriever.context import (
    ContextEncoder,
    SavedContext,
    add_context,
    train_context_encoder,
)
from revela.retriever.encode import RetrieverEncoder, transformer_in_bf16, without_padding
from revela.retriever.fit import WORDS_TO_VECTORS, fit_to_corpus, insert_fit
from revela.retriever.lora import add_lora, frozen_in_bf16
from revela.retriever.save import save_retriever
from revela.retriever.saved_config import words_to_vectors_of
from revela.retriever.static_trainable import TrainableTable
from revela.settings import Crop, InfoNCE, Recipe
from revela.silence import silence_libraries
from revela.training.checkpoint import (
    BestState,
    load_checkpoint,
    load_fit,
    save_checkpoint,
    save_fit,
    step_of,
)
from revela.training.loop import (
    BatchReader,
    Rows,
    Stop,
    agree,
    check_finite,
    make_optimizer,
    take_step,
)
from revela.training.metrics import (
    Budget,
    Check,
    Checks,
    Metrics,
    Progress,
    Scores,
    describe,
    start_tracker,
)
from revela.training.negatives import Negatives, mined_negatives
from revela.training.record import (
    CHECKPOINTS,
    METRICS,
    checkpoint_to_resume,
    environment,
    output_folder,
    settings_of,
    write_record,
)
from revela.training.validate import check_matryoshka, check_recipe
from revela.types import Document

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """Result of a run.

    Attributes:
        untrained: label-free scores of the retriever before it was fitted to the corpus.
        before: of the retriever before the first step.
        after: of the state that is saved.
        steps: optimiser steps done.
        kept: the step whose state is saved.
        minutes: training time.
        interrupted: whether Ctrl-C ended the run.
    """

    untrained: Scores
    before: Scores
    after: Scores
    steps: int
    kept: int
    minutes: float
    interrupted: bool


def train(
    recipe: Recipe,
    source: TrainingSet | Sequence[Document] | GroupFolder,
    out: Path,
    *,
    check: Check | None = None,
    bm25: Scores | None = None,
    corpus: str = "a corpus",
    command: str = "",
    resume: bool = False,
    judge: Check | None = None,
    points: int = 0,
) -> Outcome:
    """Train a retriever on documents and save it to ``out``; under torchrun, by several processes.

    Args:
        recipe: all settings.
        source: the training set; or documents, or stored groups, to make one of. Several processes
            take stored groups.
        out: a folder that does not exist yet, or, with ``resume``, one with a checkpoint.
        check: gives label-free scores of an encoder by task.
        bm25: BM25's scores on the same tasks, for comparison.
        corpus, command: for the model card.
        resume: continue from the last checkpoint of ``out``.
        judge: gives scores that are recorded at every check and decide nothing.
        points: check after each of so many equal parts of the run, not by ``check_every``. 0: no.

    Raises:
        RevelaError: the output folder is in the way, the corpus is too small, a model cannot be
            used, or processes do not agree.
    """
    with distributed.joined(), output_folder(out, resume):
        check_recipe(recipe, out, resume)
        silence_libraries()
        settings, checkpoints = recipe.training, out / CHECKPOINTS
        torch.set_num_threads(distributed.cores(settings.threads))
        torch.manual_seed(settings.seed)
        device = compute_device()
        bf16 = uses_bf16(settings.precision, device)
        first, bm25 = distributed.is_rank_zero(), bm25 or {}
        check, judge = (check, judge) if first else (None, None)
        _log_unused()

        # Data: a corpus or stored groups, the same for all processes.
        data = _training_set(recipe, source)
        digest, record = data.fingerprint, settings_of(recipe)
        checkpoint = checkpoint_to_resume(record, digest, out) if resume else None
        step = step_of(checkpoint) if checkpoint else 0
        _check_same_start(digest, (record, step), out)

        # Retriever: as it is before the fit, and an encoder that follows it through training.
        folder = _model_folder(recipe, data, checkpoints)
        model = untrained_retriever(recipe, folder, data.documents).to(device)
        context_texts = _context_texts(recipe, data)
        context_encoder = add_context(recipe, model, next(iter(context_texts), "."))
        encoder = RetrieverEncoder(model, bf16, context_encoder=context_encoder)
        encoder.words_to_vectors = words_to_vectors_of(folder)
        if context_encoder is not None:
            encoder = encoder.with_context(partial(context_encoder.of_texts, context_texts))
        max_tokens = _truncate_for_training(recipe, model)

        # Groups: rows that are read together, with negatives from elsewhere if they are asked for.
        groups, number = data.groups(model, encoder, checkpoints)
        negatives = mined_negatives(recipe, data, groups, encoder, checkpoints)
        groups = negatives.groups if negatives else groups

        # Record: run.json, metrics.jsonl, and a tracker if one is asked for.
        untrained = _check_untrained(check, encoder)
        about = {"corpus": corpus, "command": command, "bm25": bm25, "untrained": untrained}
        if first:
            write_record(
                record, {**about, **_described(recipe, data, number), **environment()}, out
            )
        tracker = start_tracker(recipe, out)
        # A run without a checkpoint begins anew, with no line.
        metrics = Metrics(out / METRICS, (step or -1) if first else None, tracker)

        # Fit to the corpus, then LoRA.
        if _is_fitted(recipe, folder):
            _fit(recipe, data, encoder, checkpoints)
        _add_lora(recipe, model, context_encoder)

        # Objective and optimiser.
        budget = Budget(settings.max_steps, settings.max_minutes, settings.max_tokens_read)
        parts = _parts(recipe, data, encoder, budget, negatives, folder)
        objective, collate = build_objective(parts)
        optimizer = make_optimizer(objective, settings.learning_rate)
        _share_weights(objective, step)

        # Check before the first step.
        best = BestState(objective, checkpoints, metrics.checks())
        offer = best.offer if settings.keep == "best" else None
        checks = Checks(encoder, check, judge, bm25, budget, metrics, offer) if check else None
        before: Scores = dict(metrics.checks()).get(0, {})
        if checks and not before:
            before = checks.run(0)

        # Loop.
        if checkpoint:
            load_checkpoint(checkpoint, objective, optimizer, budget)
        model.train()
        progress = Progress(budget, metrics)
        read, ahead = partial(_collated, data, collate), _knows_batches(recipe, data)
        reader = BatchReader(recipe, groups, read, budget, ahead=ahead, step=step)
        interrupted, logged, sums = False, step, torch.zeros(2, device=device)
        with _in_precision(model, bf16), progress.bar(step), reader, Stop() as stop:
            while (done := budget.done(step)) < 1.0 and not interrupted:
                began = time.monotonic()
                batches, tokens = reader.next_step()
                factor = budget.learning_rate_factor(step, settings.warmup_steps)
                rate = settings.learning_rate * factor
                loss, grad_norm = take_step(objective, optimizer, batches, rate, settings.seed)
                step, sums = step + 1, sums + torch.stack([loss, grad_norm])
                after_a_batch(device)
                seconds = time.monotonic() - began
                progress.advance()
                interrupted = agree(budget, seconds, tokens, stop.asked)
                ends = budget.done(step) >= 1.0
                logs = step % settings.log_every == 0
                saves = ends or interrupted or step % settings.save_every == 0
                if logs or saves:
                    summed, norm = check_finite(step, sums, grad_norm)
                if logs:
                    progress.log(step, summed / (step - logged), norm, rate)
                    logged, sums = step, torch.zeros_like(sums)
                if (
                    checks
                    and not ends
                    and _is_check_due(settings.check_every, points, step, done, budget.done(step))
                ):
                    reader.wait()
                    checks.run(step)
                if saves and first:
                    save_checkpoint(checkpoints, step, objective, optimizer, budget)
        check_same_weights(objective, step)

        # Check the last state, and save it or the best one.
        def finish() -> Outcome:
            kept, after = step, checks.run(step) if checks else {}
            if checks and offer and best.step != step:
                kept, after = best.restore()
            if data.generated_queries is not None:
                log.info(data.generated_queries.summary())
            metrics.write(step, minutes=round(budget.minutes, 3), kept=kept)
            minutes, model.max_seq_length = budget.minutes, max_tokens
            outcome = Outcome(untrained, before, after, step, kept, minutes, interrupted)
            _save(recipe, data, encoder, context_texts, outcome, about, out)
            recipe.objective.save(objective, out)
            metrics.close()
            if not interrupted:
                remove_whole(checkpoints)
            return outcome

        return distributed.from_rank_zero(finish)


def _training_set(
    recipe: Recipe, source: TrainingSet | Sequence[Document] | GroupFolder
) -> TrainingSet:
    if isinstance(source, TrainingSet):
        return source.replace(recipe)
    return TrainingSet(recipe, source)


def _check_same_start(digest: str, settings: Any, out: Path) -> None:
    """Stop if the processes, on several machines maybe, do not begin with the same."""
    distributed.check_same(
        digest,
        "the processes read different groups: give a folder that all machines see, or the same "
        "copy of it",
    )
    distributed.check_same(
        settings,
        f"the processes were given different settings, or do not see the same {out}: "
        "start all by the same command, with an --out that all machines see",
    )


def _log_unused() -> None:
    """Say so if one process trains where several were asked for, or could."""
    if distributed.world_size() > 1:
        return
    if distributed.LAUNCHED & os.environ.keys():
        log.info("1 process")  # accelerate starts no more without a GPU, whatever it is told
    if (gpus := torch.cuda.device_count()) > 1:
        log.info(
            f"there are {gpus} GPUs, and a run uses the first: name another by "
            "CUDA_VISIBLE_DEVICES, or use all by torchrun (docs/scale.md)"
        )


def _model_folder(recipe: Recipe, data: TrainingSet, checkpoints: Path) -> Path:
    """The folder of the model that is trained: a new one is made here, by the first process."""
    name = recipe.retriever.model
    if not name.startswith(NEW):
        return find_weights(name, recipe.retriever.offline_model)
    folder = checkpoints / name.replace(":", "-")  # for as long as the run may resume

    def make() -> None:
        if not folder.is_dir():
            documents, seed = data.documents, recipe.training.seed
            order = random.Random(seed).sample(range(len(documents)), len(documents))
            new_encoder_decoder(name, (documents[i].full_text for i in order), folder, seed)

    distributed.from_rank_zero(make)
    return folder


def _context_texts(recipe: Recipe, data: TrainingSet) -> list[str]:
    """The texts that the retriever reads as its context in checks, and is saved with."""
    slots, draw = recipe.context.slots, random.Random(recipe.training.seed)
    if not slots:
        return []
    some = draw.sample(range(len(data.rows)), min(len(data.rows), slots))
    return [data.rows[i].text for i in some]


def _truncate_for_training(recipe: Recipe, model: SentenceTransformer) -> int:
    """Truncate texts while the retriever trains; returns the tokens that the saved model reads."""
    limit = model.max_seq_length or recipe.retriever.max_tokens
    if isinstance(model[0], TrainableTable):  # which reads texts whole
        return limit
    model.max_seq_length = min(limit, recipe.lm.lm_tokens + recipe.context.slots)
    return limit


def _check_untrained(check: Check | None, encoder: RetrieverEncoder) -> Scores:
    if check is None:
        return {}
    scores = check(encoder)
    log.info(f"untrained: {describe(scores, {})}")
    return scores


def _described(recipe: Recipe, data: TrainingSet, groups: int) -> dict[str, Any]:
    """What run.json says of the corpus and of the models."""
    return {
        "documents": data.n_documents,
        "chunks": len(data.chunks),
        "rows": len(data.rows),
        "groups": groups,
        "corpus_digest": data.fingerprint,
        "revisions": {k: v for k, v in commits.items() if k in recipe.to_dict().values()},
    }


def _is_fitted(recipe: Recipe, folder: Path) -> bool:
    """Whether the model is fitted: a Sentence-Transformers model has layers of its own."""
    fit = recipe.fit
    wanted = fit.token_weighting or fit.whitening or fit.lexical
    return bool(wanted) and not (folder / "modules.json").is_file()


def _fit(recipe: Recipe, data: TrainingSet, encoder: RetrieverEncoder, checkpoints: Path) -> None:
    """Fit a language model to the corpus, or insert the fit that a resumed run has begun with."""
    encoder.words_to_vectors = WORDS_TO_VECTORS
    if begun := load_fit(checkpoints):
        insert_fit(encoder.model, begun)
        return
    texts, seed = LazyTexts(data.chunks, lambda chunk: chunk.text), recipe.training.seed
    fitted = fit_to_corpus(encoder.model, texts, recipe.fit, seed=seed, bf16=encoder.bf16)
    if fitted and distributed.is_rank_zero():
        save_fit(checkpoints, fitted)


def _add_lora(
    recipe: Recipe, model: SentenceTransformer, context_encoder: ContextEncoder | None
) -> None:
    """Add LoRA to the retriever and to its first stage; a table is trained without."""
    if isinstance(model[0], TrainableTable):
        return
    retriever = recipe.retriever
    lora = retriever.lora_rank, retriever.lora_alpha, retriever.lora_dropout
    add_lora(model, *lora)
    if context_encoder is not None:
        train_context_encoder(context_encoder, *lora)


def _parts(
    recipe: Recipe,
    data: TrainingSet,
    encoder: RetrieverEncoder,
    budget: Budget,
    negatives: Negatives | None,
    folder: Path,
) -> BuildContext:
    """What objectives are built of; the retriever was opened from ``folder``."""
    return BuildContext(
        recipe,
        encoder.model,
        data.documents,
        data.rows,
        encoder.model.device,
        encoder.bf16,
        count=budget.count,
        context_encoder=encoder.context_encoder,
        corpora=data.corpora,
        relevant=data.relevant,
        mined=negatives,
        folder=folder,
        written=data.generated_queries,
    )


def build_objective(parts: BuildContext) -> tuple[nn.Module, Collate]:
    """The loss of the recipe's objective, and what makes its batches.

    Raises:
        RevelaError: a model cannot be loaded, or a setting does not suit it.
    """
    recipe, context_encoder, model = parts.recipe, parts.context_encoder, parts.model
    widths, width = recipe.retriever.matryoshka, model.get_embedding_dimension()
    check_matryoshka(widths, width, isinstance(model[0], TrainableTable))
    loss, collate = recipe.objective.build(parts)
    loss.to(parts.device)
    if context_encoder is None:
        return (Matryoshka(loss, [*widths, width]) if widths else loss), collate
    constant, settings = context_encoder.constant, recipe.context
    loss.model = retriever = ContextualRetriever(
        loss.model, settings.context_dropout * (not constant)
    )
    contextual = Contextual(
        Matryoshka(loss, [*widths, width]) if widths else loss,
        retriever,
        context_encoder,
        null=settings.context_null,
        retriever_batch=recipe.training.retriever_batch,
        bf16=parts.bf16,
    )
    return contextual, collate if constant else ContextBatches(parts, collate, context_encoder)


def _tensors(objective: nn.Module) -> Iterator[Tensor]:
    """All that is trained or fitted: without the frozen weights of language models."""
    lms = [module for module in objective.modules() if isinstance(module, LanguageModel)]
    frozen = {id(p) for lm in lms for p in lm.parameters() if not p.requires_grad}
    tensors = (*objective.parameters(), *objective.buffers())
    return (tensor for tensor in tensors if id(tensor) not in frozen)


def _share_weights(objective: nn.Module, step: int) -> None:
    """Give every process the first one's weights."""
    distributed.copy_first(_tensors(objective))
    check_same_weights(objective, step)


def check_same_weights(objective: nn.Module, step: int) -> None:
    """Stop if the processes do not have the same weights, to the bit."""
    if distributed.world_size() > 1:
        distributed.check_same(
            distributed.digest(_tensors(objective)),
            f"the processes have different weights after {step} steps: train by one process, and "
            "report this with your command and versions",
        )


def _knows_batches(recipe: Recipe, data: TrainingSet) -> bool:
    """Whether no model is asked for what batches hold: the retriever as it is by then, an LM that
    writes queries, a surrogate.
    """
    objective = recipe.objective
    mines = isinstance(objective, InfoNCE) and objective.negatives
    asks = isinstance(objective, InfoNCE | Crop) and recipe.groups.surrogate
    return (
        recipe.groups.kind != "iterative" and not (mines or asks) and data.generated_queries is None
    )


def _collated(data: TrainingSet, collate: Collate, batch: Rows) -> dict[str, Tensor]:
    """The tensors of a batch: its rows as an objective's collator reads them."""
    rows = [(epoch, index, data.row(index)) for epoch, index in batch]
    return collate(
        [
            {"document": c.document, "text": c.text, "query": c.query, "row": index, "epoch": epoch}
            for epoch, index, c in rows
        ]
    )


@contextmanager
def _in_precision(model: SentenceTransformer, bf16: bool) -> Iterator[None]:
    """While open, the retriever computes as it does in training."""
    with (
        without_padding(model),
        transformer_in_bf16(model, bf16),
        frozen_in_bf16(model, bf16),
    ):
        yield


def _is_check_due(every: int, points: int, step: int, before: float, done: float) -> bool:
    """Whether to check after this step, which took the run from one share of it to another."""
    if points:
        return int(done * points) > int(before * points)
    return bool(every) and step % every == 0


def _save(
    recipe: Recipe,
    data: TrainingSet,
    encoder: RetrieverEncoder,
    context_texts: Sequence[str],
    outcome: Outcome,
    about: dict[str, Any],
    out: Path,
) -> None:
    """Save the retriever as it is now, with its card and the context of these texts."""
    retriever, slots, steps = recipe.retriever, recipe.context.slots, outcome.steps
    of_all = "" if outcome.kept == steps else f"{outcome.kept} of "
    scores = {
        "BM25": about["bm25"],
        "untrained": outcome.untrained,
        "before training": outcome.before,
        f"after {of_all}{steps} steps": outcome.after,
    }
    settings, pairs = recipe.to_dict(), judgements_dir(recipe)
    if pairs:
        settings["queries"] = f"judged, of {without_folders(str(pairs))}"
    card = Card(
        name=out.name,
        learned_from=recipe.objective.learned_from,
        corpus=about["corpus"],
        documents=data.n_documents,
        command=about["command"],
        settings=settings,
        scores=scores if outcome.after else {},
        minutes=outcome.minutes,
        steps=steps,
        matryoshka=retriever.matryoshka,
        slots=slots,
        short_names=bool(pairs),
    ).text()
    context, context_encoder = None, encoder.context_encoder
    if context_encoder is not None:
        drawn = {"drawn from": f"{len(context_texts)} chunks of {without_folders(about['corpus'])}"}
        context = SavedContext(context_encoder, context_encoder.of_texts(context_texts), drawn)
    least = encoder.words_to_vectors
    save_retriever(encoder.model, out, card, retriever.matryoshka, context, least)
