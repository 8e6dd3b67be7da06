"""One training run: documents -> chunks -> groups -> method -> a saved retriever.

``train`` shows every step, in order. Its helpers follow in the order of their use. Checks are
passed as functions, so that training does not depend on evaluation.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
from torch import nn

from revela.encoders.model_files import NEW, commits, fingerprint, words_to_vectors_of
from revela.encoders.torch_model import slot_ids, uses_bf16
from revela.files import remove_whole
from revela.terminal import counted
from revela.text.spool import LazyTexts
from revela.training import distributed
from revela.training.check_settings import check_recipe
from revela.training.checkpoint import (
    CHECKPOINTS,
    begun,
    check_same_weights,
    limits_in_words,
    load_checkpoint,
    load_fit,
    output_folder,
    recorded,
    resume_run,
    run_tensors,
    save_checkpoint,
    save_fit,
    step_of,
    update_record,
    write_record,
)
from revela.training.checks import NO_CHECKS, BestState, CheckPlan, Checks
from revela.training.device import compute_device
from revela.training.groups.store import GroupFolder
from revela.training.groups_per_batch import fitting_groups
from revela.training.lm.encoder_decoder import new_encoder_decoder
from revela.training.methods.base import BuildContext
from revela.training.methods.cde import in_context
from revela.training.models import find_model, find_weights
from revela.training.negatives import Negatives
from revela.training.outcome import TrainingResult, save_outcome
from revela.training.recipe import Recipe
from revela.training.record import (
    METRICS,
    UNKNOWN,
    About,
    Metrics,
    MetricsRow,
    Provenance,
    RunFile,
    Scores,
    hardware,
    start_tracker,
    versions,
)
from revela.training.retriever.build import add_lora, frozen_in_bf16, untrained_retriever
from revela.training.retriever.context import add_context, continue_context, train_context_encoder
from revela.training.retriever.fit import WORDS_TO_VECTORS, fit_to_corpus, insert_fit
from revela.training.retriever.module import RetrieverEncoder
from revela.training.retriever.static_trainable import TrainableTable
from revela.training.step import (
    BatchReader,
    Budget,
    Progress,
    Stop,
    Stopwatch,
    agree,
    check_finite,
    handled,
    make_optimizer,
    read_rows,
    reads_ahead,
    step_limit,
    steps_of,
    take_step,
)
from revela.training.training_set import TrainingSet
from revela.types import Document

log = logging.getLogger(__name__)


def train(
    recipe: Recipe,
    source: TrainingSet | Sequence[Document] | GroupFolder,
    out: Path,
    *,
    plan: CheckPlan = NO_CHECKS,
    provenance: Provenance = UNKNOWN,
    resume: bool = False,
    overwrite: bool = False,
    rehearse: Callable[[nn.Module, torch.optim.Optimizer, BatchReader], NoReturn] | None = None,
) -> TrainingResult:
    """Train a retriever on documents and save it to ``out``; in several processes under torchrun.

    Args:
        recipe: all settings.
        source: a training set, documents or stored groups. Several processes need stored groups.
        out: a new folder; with ``resume`` or ``overwrite`` it may hold a run.
        plan: label-free checks.
        provenance: corpus and command, for run.json and the model card.
        resume: start, continue from the last checkpoint in ``out``, or extend a finished run.
        overwrite: replace the run in ``out``.
        rehearse: called in place of the loop, which it ends by an exception (estimate.py).

    Raises:
        RevelaError: the output folder exists, the corpus is too small, a model is not supported, or
            processes disagree.
    """
    with distributed.joined(), output_folder(out, resume, overwrite) as between_steps:
        check_recipe(recipe, out, resume, overwrite)
        settings, checkpoints = recipe.training, out / CHECKPOINTS
        torch.set_num_threads(distributed.cores(settings.threads))
        torch.manual_seed(settings.seed)
        device = compute_device()
        bf16 = uses_bf16(settings.precision, device)
        is_first = distributed.is_rank_zero()
        plan = plan if is_first else NO_CHECKS
        is_shared = recipe.method.shares_batches(settings)

        # Data: a corpus or stored groups, the same in all processes.
        data = source if isinstance(source, TrainingSet) else TrainingSet(recipe, source)
        data = data.replace(recipe)
        digest, record = data.fingerprint, recipe.to_dict()
        checkpoint, former = resume_run(recipe, digest, out) if resume else (None, recipe)
        step = step_of(checkpoint) if checkpoint else 0
        distributed.check_same(
            (digest, record, step),
            "the processes read different groups or settings: start all by the same command, with "
            f"the same groups, and an --out that all machines see ({out})",
        )
        known = {**vars(provenance), "method_file": recipe.method.file, "corpus_digest": digest}
        about = About(**known, finished=False)
        if is_first and not (resume and begun(out)):  # a run that is killed can start over
            RunFile(record, about).write(out)

        # Retriever before the fit, and an encoder of its current state.
        folder = _model_folder(data, checkpoints)
        model = untrained_retriever(recipe.retriever, folder, data.documents).to(device)
        context_texts = _context_texts(data) if recipe.context.context else []
        context_encoder = None
        if slot_ids(model):  # a second phase
            context_encoder = continue_context(recipe.context, model, folder)
        elif context_texts:
            context_encoder = add_context(recipe.context, model, context_texts[0], settings.seed)
        read_context = None if context_encoder is None else context_encoder.of_texts
        encoder = RetrieverEncoder(model, bf16, read_context)
        encoder.words_to_vectors = words_to_vectors_of(folder)
        encoder = encoder.in_context(context_texts) if read_context else encoder
        encoder.retriever.lower_limit(recipe.lm.lm_tokens)  # until it is saved

        # Groups: rows that are read together, and mined negatives if requested.
        groups, n_groups = data.groups(model, checkpoints)
        max_steps, negatives = step_limit(settings, n_groups), None
        _warn_of_warmup(recipe.optimizer.warmup_steps, max_steps)
        epochs, per_step = recipe.groups.refresh_epochs, settings.groups_per_step
        refresh = steps_of(epochs, n_groups, per_step) or recipe.groups.refresh_every
        if recipe.negatives:
            negatives = Negatives(data, groups, encoder, checkpoints, refresh * per_step)
            groups = negatives.groups

        # Record: run.json, metrics.jsonl, and a tracker if requested.
        is_embedder = (folder / "modules.json").is_file()  # which is not fitted
        is_fitted = any(vars(recipe.fit).values()) and not is_embedder
        untrained = plan.check(encoder) if plan.check and is_fitted else {}
        models = _models(data, folder, bool(plan.check)) if is_first else {}
        if is_first:
            about = replace(
                about,
                bm25=plan.bm25,
                untrained=untrained,
                documents=data.n_documents,
                chunks=len(data.chunks),
                rows=len(data.rows),
                groups=n_groups,
                models=models,
                revisions={k: v for k, v in commits.items() if k in record.values()},
                versions=versions(),
                hardware=hardware(),
            )
            write_record(RunFile(record, about), out)
        tracker = (
            start_tracker(settings.track, record, out) if is_first and settings.track else None
        )
        # A run without a checkpoint starts over and keeps no line.
        metrics = Metrics(out / METRICS, (step or -1) if is_first else None, tracker)

        # Fit to the corpus, then LoRA, which a static table does not have.
        if is_fitted:
            _fit(data, encoder, checkpoints)
        if not isinstance(model[0], TrainableTable):
            start = recipe.retriever
            lora = start.lora_rank, start.lora_alpha, start.lora_dropout
            add_lora(model, *lora)
            if context_encoder is not None:
                train_context_encoder(context_encoder, model, *lora)

        # Method and optimiser.
        budget = Budget.of(settings, n_groups)
        parts = BuildContext(
            groups=recipe.groups,
            queries=recipe.queries,
            retriever=recipe.retriever,
            context=recipe.context,
            lm=recipe.lm,
            training=settings,
            model=encoder.retriever,
            documents=data.documents,
            rows=data.rows,
            bf16=encoder.retriever.bf16,
            count=budget.count,
            context_encoder=context_encoder,
            corpora=data.corpora,
            relevant=data.relevant,
            mined=negatives,
            folder=folder,
            written=data.generated_queries,
            heads=partial(recorded, out, "heads"),
            prompts=data.prompts,
            is_shared=is_shared,
        )
        loss_module, collate = recipe.method.build(parts)
        if context_encoder is not None:
            loss_module, collate = in_context(loss_module, collate, parts, context_encoder)
        loss_module.to(device)
        optimizer = make_optimizer(loss_module, recipe.optimizer)
        distributed.copy_first(run_tensors(loss_module))
        check_same_weights(loss_module, step)

        # Check before the first step.
        checks = best = None
        if plan.check or plan.judge:
            if plan.check and settings.keep == "best":
                best = BestState(loss_module, checkpoints, metrics.checks())
            checks = Checks(plan, settings.check_every, encoder, budget, metrics, best)
        before: Scores = dict(metrics.checks()).get(0, {})
        if checks and not any(row.check or row.judged for row in metrics.rows):
            before = checks.run(0)

        # Loop.
        restarts = refresh if recipe.optimizer.restart_optimizer else 0
        if checkpoint:
            load_checkpoint(checkpoint, loss_module, optimizer, budget)
            _say_rate(recipe, budget, Budget.of(former.training, n_groups), step, restarts)
        loss_module.train()  # a check may have left eval mode
        progress = Progress(budget, metrics)
        written, ahead = data.generated_queries, reads_ahead(data)
        read = partial(read_rows, written.row if written else data.rows.__getitem__, collate)

        def groups_per_batch() -> int:
            """--groups-per-batch; for auto as many as fit into a GPU of CUDA. It is 1 on other
            devices, where larger batches gain nothing, and for batches that processes share, that
            have a context, or that a model makes.
            """
            is_free = settings.groups_per_batch == "auto" and device.type == "cuda" and ahead
            if not is_free or is_shared or recipe.context.context:
                return settings.fixed_groups_per_batch
            return fitting_groups(settings.groups_per_step, groups, read, loss_module)

        per_batch = recorded(out, "groups_per_batch", groups_per_batch)
        budget.take_count()  # of what was read to find it
        reader = BatchReader(groups, read, budget, per_step, per_batch, is_shared, ahead, step)
        stop, stopped, logged, sums = Stop(), 0, step, torch.zeros(2, device=device)
        with frozen_in_bf16(model, encoder.retriever.bf16), reader:
            if rehearse is not None:
                rehearse(loss_module, optimizer, reader)
            with progress.bar(step), handled(stop):
                watch = Stopwatch(device)
                while (done := budget.done(step)) < 1.0 and not stopped:
                    between_steps.clear()
                    batches, tokens = reader.next_step()
                    if restarts and step % restarts == 0:
                        optimizer = make_optimizer(loss_module, recipe.optimizer)
                    factor = budget.learning_rate_factor(step, recipe.optimizer, restarts)
                    rate = recipe.optimizer.learning_rate * factor
                    loss, grad_norm = take_step(
                        loss_module, optimizer, batches, rate, settings.seed
                    )
                    step, sums = step + 1, sums + torch.stack([loss, grad_norm])
                    between_steps.set()
                    progress.advance()
                    stopped = agree(budget, watch.lap(), tokens, stop.requested)
                    ends = budget.done(step) >= 1.0
                    saves = ends or stopped or step % settings.save_every == 0
                    if saves or step % settings.log_every == 0:
                        summed, norm, own = check_finite(step, sums, grad_norm, loss_module)
                        progress.log(step, summed / (step - logged), norm, rate, own)
                        logged, sums = step, torch.zeros_like(sums)
                    if checks and not ends and checks.is_due(step, done):
                        reader.wait()
                        with watch.stopped():
                            checks.run(step)
                    if saves and is_first:
                        with watch.stopped():
                            state = loss_module, optimizer, budget
                            save_checkpoint(checkpoints, step, state, settings.keep_checkpoints)
        check_same_weights(loss_module, step)

        # Check the last state, and save it or the best one.
        def finish() -> TrainingResult:
            last = checks.run(step) if checks else {}
            kept, after = step, last
            if best and best.step != step:
                kept, after = best.restore()
            if written is not None:
                log.info(written.summary())
            minutes, tokens, encoder.retriever.max_tokens = budget.minutes, budget.tokens, None
            row = MetricsRow(step, round(minutes, 3), kept=kept, tokens_read=tokens)
            metrics.write(row)
            rows = {"BM25": plan.bm25, "untrained": untrained, "start": before, "last step": last}
            scores = {name: found for name, found in {**rows, "saved": after}.items() if found}
            used, curve = {flag: model["name"] for flag, model in models.items()}, metrics.rows
            result = TrainingResult(out, scores, curve, step, kept, minutes, tokens, used, stopped)
            save_outcome(
                data,
                encoder,
                result,
                context_encoder=context_encoder,
                context_texts=context_texts,
                provenance=provenance,
                folder=folder,
            )
            recipe.method.save(loss_module, out)
            metrics.close()
            if not stopped:
                update_record(out, finished=True)
                if not settings.keep_checkpoints:
                    remove_whole(checkpoints)
                elif best:
                    best.remove_others()
                _warn_of_warmup(recipe.optimizer.warmup_steps, 0 if max_steps else step)
            return result

        return distributed.from_rank_zero(finish)


def _warn_of_warmup(warmup: int, steps: int) -> None:
    """Warn if a run of this many steps (0: unknown) ends within its warm-up."""
    if 0 < steps <= warmup:
        run = f"the run of {counted(steps, 'step')}"
        log.warning(f"{run} ends in its warm-up: lower --warmup-steps {warmup}")


def _say_rate(recipe: Recipe, budget: Budget, before: Budget, step: int, restarts: int) -> None:
    """Say how the learning rate goes on if the limits were others ``before``."""
    before.seconds, before.tokens = budget.seconds, budget.tokens
    budgets, optimizer = (budget, before), recipe.optimizer
    now, then = (b.learning_rate_factor(step, optimizer, restarts) for b in budgets)
    if now != then:
        log.info(
            f"the learning rate goes on at {optimizer.learning_rate * now:.2g}, as "
            f"{limits_in_words(recipe)} gives it at step {step:,}; before it was "
            f"{optimizer.learning_rate * then:.2g} there"
        )


def _model_folder(data: TrainingSet, checkpoints: Path) -> Path:
    """The folder of the model to train; the first process makes it if it is a new model."""
    name, recipe = data.recipe.retriever.model, data.recipe
    if not name.startswith(NEW):
        return find_weights(name, recipe.retriever.offline_model)
    folder = checkpoints / name.replace(":", "-")  # kept until the run ends

    def make() -> None:
        if not folder.is_dir():
            documents, seed = data.documents, recipe.training.seed
            order = random.Random(seed).sample(range(len(documents)), len(documents))
            new_encoder_decoder(name, (documents[i].full_text for i in order), folder, seed)

    distributed.from_rank_zero(make)
    return folder


def _context_texts(data: TrainingSet) -> list[str]:
    """The texts of a contextual retriever's context, for checks and for the saved model."""
    settings, rng = data.recipe.context, random.Random(data.recipe.training.seed)
    documents = settings.context // settings.context_vectors_per_document
    drawn = rng.sample(range(len(data.rows)), min(len(data.rows), documents))
    return [data.rows[i].text for i in drawn]


def _models(data: TrainingSet, folder: Path, has_check: bool) -> dict[str, dict[str, str]]:
    """Flag -> name and digest of each model that a run reads, of which one writes queries or the
    questions of the check. An offline model has its own name. ``folder`` is the trained model's.
    """
    recipe, lm, model = data.recipe, data.recipe.lm.lm, data.recipe.retriever.model
    offline = recipe.retriever.offline_model
    is_new = model.startswith(NEW)
    found = {"model": (model, folder) if is_new else find_model(model, offline)}
    if recipe.method.reads_lm:
        found["lm"] = find_model(lm, offline)
    if data.has_written_queries or (has_check and recipe.training.check_questions):
        found["query_lm"] = find_model(recipe.queries.query_lm or lm, offline)
    if data.folder is None and recipe.groups.groups == "cluster" and recipe.groups.surrogate:
        found["surrogate"] = find_model(recipe.groups.surrogate, "")
    if of_batches := recipe.method.model_of_batches(recipe.groups):
        found["filter"] = find_model(of_batches, "")
    return {flag: {"name": n, "digest": fingerprint(place)} for flag, (n, place) in found.items()}


def _fit(data: TrainingSet, encoder: RetrieverEncoder, checkpoints: Path) -> None:
    """Fit a language model to the corpus, or insert the fit of a resumed run."""
    encoder.words_to_vectors = WORDS_TO_VECTORS
    if saved := load_fit(checkpoints):
        insert_fit(encoder.model, saved)
        return
    texts, seed = LazyTexts(data.chunks, lambda chunk: chunk.text), data.recipe.training.seed
    fitted = fit_to_corpus(encoder.retriever, texts, data.recipe.fit, seed=seed)
    if fitted and distributed.is_rank_zero():
        save_fit(checkpoints, fitted)
