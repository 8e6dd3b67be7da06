"""One training run: documents -> chunks -> groups -> objective -> a saved retriever.

Checks come in as functions, so that training does not depend on evaluation.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch import Tensor, nn

from revela import processes
from revela.corpus.judgements import judged, read_judgements
from revela.device import compute_device, uses_bf16
from revela.errors import RevelaError
from revela.files import LOCK, remove_unfinished, remove_whole, writing
from revela.groups.folder import GroupFolder
from revela.groups.training_set import TrainingSet
from revela.index.language import check_language
from revela.lm.encoder_decoder import new_encoder_decoder, size_of
from revela.lm.language_model import LanguageModel
from revela.objectives.base import Collate, Parts
from revela.objectives.contextual import Conditioned, ContextBatches, Contextual
from revela.objectives.matryoshka import Matryoshka
from revela.retriever.build import untrained_retriever
from revela.retriever.context import SavedContext, add_context, train_first_stage
from revela.retriever.encode import RetrieverEncoder, transformer_in_bf16, without_padding
from revela.retriever.fit import WORDS_TO_VECTORS, fit_to_chunks, insert_fit
from revela.retriever.lora import add_lora, frozen_in_bf16
from revela.retriever.save import model_card, save_retriever
from revela.retriever.trained_table import TrainedTable
from revela.settings import Recipe
from revela.silence import silence_libraries
from revela.training.checkpoint import BestState, load_fit, save_fit, step_of
from revela.training.loop import Loop
from revela.training.negatives import mined_negatives
from revela.training.progress import Checks, Clock, Metrics, Progress, Scores, describe, plot
from revela.training.record import (
    BEFORE_A_CHECKPOINT,
    RUN_FILE,
    TRACKER_FOLDER,
    checkpoint_to_resume,
    environment,
    is_taken,
    remove_begun,
    settings_of,
    write_record,
)
from revela.types import Document, Encoder
from revela.weights import NEW, commits, find_weights, words_to_vectors_of

log = logging.getLogger(__name__)

Check = Callable[[Encoder], Scores]
BEFORE_THE_FIRST = -1  # a step, none of whose metrics are kept


@dataclasses.dataclass(frozen=True)
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
) -> Outcome:
    """Train a retriever on documents and save it to ``out``; by several processes, if torchrun has
    started them.

    Args:
        recipe: all settings.
        source: the training set; or documents, or stored groups, to make one of. Several processes
            take stored groups.
        out: a folder that does not exist yet, or, with ``resume``, one with a checkpoint.
        check: gives label-free scores of an encoder by task; None: no checks.
        bm25: BM25's scores on the same tasks, for comparison.
        corpus, command: for the model card.
        resume: continue from the last checkpoint of ``out``.
        judge: gives scores that are recorded at every check and decide nothing, on judged queries
            for example.

    Raises:
        RevelaError: the output folder is in the way, the corpus is too small, a model cannot be
            used, or processes do not agree.
    """
    with processes.joined():
        refuse_at_once(recipe, out, resume)
        if processes.count() == 1 and processes.LAUNCHED & os.environ.keys():
            log.info("1 process")  # accelerate starts no more without a GPU, whatever it is told
        silence_libraries()
        torch.set_num_threads(processes.cores(recipe.training.threads))
        torch.manual_seed(recipe.training.seed)
        if not processes.is_first():
            check = judge = None
        run = Run(recipe, out, check, bm25 or {}, corpus, command, judge)
        with run.lock:
            try:
                if isinstance(source, TrainingSet):
                    run.open(source.but(recipe), resume)
                else:
                    run.open(TrainingSet(recipe, source), resume)
                run.start()
            except RevelaError:
                run.remove_new_model()
                raise
            run.optimise()
            return run.finish()


@dataclasses.dataclass
class Run:
    """The parts of ``train``, and what they share; its arguments are those of ``train``."""

    recipe: Recipe
    out: Path
    check: Check | None
    bm25: Scores
    corpus: str
    command: str
    judge: Check | None
    made: Path | None = None
    "The folder of a new model, if this run has made it."
    lock: ExitStack = dataclasses.field(default_factory=ExitStack)
    "Of the output folder, from when it is written to."

    def open(self, data: TrainingSet, resume: bool) -> None:
        """Open the untrained retriever, and make the groups."""
        recipe, settings = self.recipe, settings_of(self.recipe)
        self.resume = resume
        self.checkpoint = (
            checkpoint_to_resume(settings, data.fingerprint, self.out) if resume else None
        )
        self.data = data
        self._refuse_differences(settings)
        device = compute_device()
        if torch.cuda.device_count() > 1 and processes.count() == 1:
            log.info(
                f"there are {torch.cuda.device_count()} GPUs, and a run uses the first: name "
                "another by CUDA_VISIBLE_DEVICES, or use all by torchrun (docs/scale.md)"
            )
        self.device, self.bf16 = device, uses_bf16(recipe.training.precision, device)
        self.folder = folder = self._weights()
        self.model = untrained_retriever(recipe, folder, self.data.documents).to(device)
        self._open_context()
        self.is_table = isinstance(self.model[0], TrainedTable)
        if self.is_table and recipe.retriever.matryoshka:
            raise RevelaError(
                "--matryoshka has no use for a static retriever, whose vectors begin with the rows "
                "that are not trained: leave it out"
            )
        # The saved model reads this many.
        self.max_tokens = self.model.max_seq_length or recipe.retriever.max_tokens
        if not self.is_table:  # which reads texts whole
            self.model.max_seq_length = self._tokens_in_training()
        # A Sentence-Transformers model has layers of its own, and is not fitted.
        self.is_decoder = not (folder / "modules.json").is_file()
        self.encoder = RetrieverEncoder(self.model, self.bf16, first_stage=self.first_stage)
        self.encoder.words_to_vectors = words_to_vectors_of(folder)
        if self.first_stage is not None:
            self.encoder = self.encoder.with_context(self._context)
        self.made_groups = data.groups(self.model, self.encoder, self._checkpoints)
        self.groups = self.made_groups.of_epoch
        self.negatives = mined_negatives(recipe, data, self.groups, self.encoder, self._checkpoints)
        if self.negatives is not None:
            self.groups = self.negatives.groups
        neighbours = recipe.context.context_from == "neighbours" and recipe.context.slots
        if neighbours and self.made_groups.by_similarity is None:
            raise RevelaError(
                "--context-from neighbours needs groups of similar chunks, made of a corpus: give "
                "--groups cluster, or another --context-from"
            )

    def _tokens_in_training(self) -> int:
        """Where texts are truncated while the retriever trains, slots included."""
        wanted, slots = self.recipe.retriever.train_tokens, self.recipe.context.slots
        if wanted and wanted + slots > self.max_tokens:
            raise RevelaError(
                f"--train-tokens {wanted}: the retriever reads {self.max_tokens - slots} at most: "
                "give no more, or a higher --max-tokens where --model is a language model"
            )
        return min(self.max_tokens, self.recipe.tokens_in_training + slots)

    def _weights(self) -> Path:
        """The folder of the model that is trained: a new one is made here, by the first process."""
        name, retriever = self.recipe.retriever.model, self.recipe.retriever
        if not name.startswith(NEW):
            return find_weights(name, retriever.offline_model)
        folder = self._checkpoints / name.replace(":", "-")  # for as long as the run may resume
        if processes.is_first() and not folder.is_dir():
            documents, seed = self.data.documents, self.recipe.training.seed
            order = random.Random(seed).sample(range(len(documents)), len(documents))
            texts = (documents[i].full_text for i in order)
            new_encoder_decoder(name, texts, folder, seed)
            self.made = folder
        processes.of_first(lambda: None)  # all wait until it is there
        return folder

    def remove_new_model(self) -> None:
        """Leave no new model behind, of a run that could not start."""
        if self.made is not None and not (self.out / RUN_FILE).exists():
            shutil.rmtree(self.out)

    def _refuse_differences(self, settings: dict[str, Any]) -> None:
        """Stop if the processes, on several machines maybe, do not begin with the same."""
        processes.refuse_different(
            self.data.fingerprint,
            "the processes read different groups: give a folder that all machines see, or the same "
            "copy of it",
        )
        step = step_of(self.checkpoint) if self.checkpoint else 0
        processes.refuse_different(
            (settings, step),
            f"the processes were given different settings, or do not see the same {self.out}: "
            "start all by the same command, with an --out that all machines see",
        )

    def _refuse_other_weights(self) -> None:
        if processes.count() > 1:
            processes.refuse_different(
                processes.digest(self._tensors()),
                f"the processes have different weights after {self.loop.step} steps: train by one "
                "process, and report this with your command and versions",
            )

    def _tensors(self) -> Iterator[Tensor]:
        """All that is trained or fitted."""
        objective = self.loop.objective
        lms = [module for module in objective.modules() if isinstance(module, LanguageModel)]
        return processes.tensors_beside(objective, lms)

    def _open_context(self) -> None:
        """Add slots and a first stage to the retriever, if the recipe asks for a context."""
        recipe, rows = self.recipe, self.data.rows if self.recipe.context.slots else []
        draw = random.Random(recipe.training.seed)
        some = draw.sample(range(len(rows)), min(len(rows), recipe.context.slots))
        self.context_texts = [rows[i].text for i in some]
        self.first_stage = add_context(recipe, self.model, next(iter(self.context_texts), "."))

    def _context(self) -> Tensor:
        """The context of the corpus by the first stage as it is now."""
        assert self.first_stage is not None
        return self.first_stage.of_texts(self.context_texts)

    def start(self) -> None:
        """Fit the retriever to the corpus, add LoRA, build objective and loop, write run.json."""
        recipe, data, training = self.recipe, self.data, self.recipe.training
        self.untrained = self.check(self.encoder) if self.check else {}
        if self.check:
            log.info(f"untrained: {describe(self.untrained, {})}")
        fitted = self._fit()
        self._add_lora()
        limits = training.max_steps, training.max_minutes, training.max_tokens_read
        clock = Clock(*limits, cpu=training.clock == "cpu")
        objective, collate = build_objective(self._parts(clock))
        self._begin_record()
        if fitted and processes.is_first():
            save_fit(self._checkpoints, fitted)
        self.best = BestState(objective, self._checkpoints, self.metrics.checks())
        self.checks = self._checks(clock) if self.check else None
        progress = Progress(clock, self.metrics)
        self.model.train()
        self.loop = Loop(
            recipe,
            objective,
            self.groups,
            lambda batch: collate([_row(data, *place) for place in batch]),
            progress,
            self.checks,
            self._checkpoints,
            self.device,
            ahead=self._knows_batches(),
        )
        processes.copy_first(self._tensors())
        self._refuse_other_weights()

    def _knows_batches(self) -> bool:
        """Whether no model is asked for what batches hold: the retriever as it is by then, an LM
        that writes queries, a surrogate.
        """
        finds_false_negatives = getattr(self.recipe.objective, "drop_false_negatives", False)
        asked = self.negatives, self.data.written, finds_false_negatives
        return self.recipe.groups.kind != "iterative" and not any(asked)

    def _fit(self) -> dict[str, Tensor]:
        """Fit a language model to the corpus, or insert the fit that the run has begun with; what
        was fitted now.
        """
        fit = self.recipe.fit
        if not self.is_decoder or not (fit.token_weighting or fit.whitening or fit.lexical):
            return {}
        self.encoder.words_to_vectors = WORDS_TO_VECTORS
        if self.resume and (begun := load_fit(self._checkpoints)):
            insert_fit(self.model, begun)
            return {}
        return fit_to_chunks(self.recipe, self.model, self.data.chunks, self.bf16)

    def _add_lora(self) -> None:
        """Add LoRA to the retriever and to its first stage; a table is trained without."""
        if self.is_table:
            return
        retriever = self.recipe.retriever
        lora = retriever.lora_rank, retriever.lora_alpha, retriever.lora_dropout
        add_lora(self.model, *lora)
        if self.first_stage is not None:
            train_first_stage(self.first_stage, *lora)

    def _parts(self, clock: Clock) -> Parts:
        """What objectives are built of."""
        data = self.data
        return Parts(
            self.recipe,
            self.model,
            data.documents,
            data.rows,
            self.device,
            self.bf16,
            count=clock.count,
            first_stage=self.first_stage,
            by_similarity=self.made_groups.by_similarity,
            corpora=data.corpora,
            relevant=data.relevant,
            mined=self.negatives,
            folder=self.folder,
            written=data.written,
        )

    def _begin_record(self) -> None:
        """Take the output folder and write run.json, by the first process; open the metrics."""
        self.accelerator: Accelerator | None = None
        keep_until = None
        if processes.is_first():
            self._take_folder()
            write_record(settings_of(self.recipe), self._about(), self.out)
            if self.recipe.training.track:
                self.accelerator = _tracking(self.recipe, self.out)
            keep_until = step_of(self.checkpoint) if self.checkpoint else BEFORE_THE_FIRST
        track = self.accelerator.log if self.accelerator else None
        self.metrics = Metrics(self.out / "metrics.jsonl", keep_until, track)

    def _take_folder(self) -> None:
        """Lock the output folder, and remove what a killed run has left half written.

        Raises:
            RevelaError: another process writes to it, or has since this run began.
        """
        self.lock.enter_context(writing(self.out))
        self.lock.callback((self.out / LOCK).unlink, missing_ok=True)
        if not self.resume and (self.out / RUN_FILE).exists():
            raise RevelaError(
                f"{self.out} was taken by another run meanwhile: choose another --out"
            )
        remove_unfinished(self.out, [*BEFORE_A_CHECKPOINT, "training.png", "model"])
        remove_unfinished(self._checkpoints, ["checkpoint", "best", "fit", "groups", "negatives"])

    def optimise(self) -> None:
        """Check the retriever once, and train it."""
        self.before: Scores = dict(self.metrics.checks()).get(0, {})
        if self.checks and not self.before:
            self.before = self.checks.run(0)
        try:
            with (
                without_padding(self.model),
                transformer_in_bf16(self.model, self.bf16),
                frozen_in_bf16(self.model, self.bf16),
            ):
                self.loop.run(self.checkpoint)
        except RevelaError:  # the language model that writes queries, or what it wrote
            if processes.is_first() and self.checkpoint is None and not self.loop.step:
                remove_begun(self.out)
            raise

    def finish(self) -> Outcome:
        """Check the last state, and save it, or the best one, with card and plot."""
        self._refuse_other_weights()
        return processes.of_first(self._finish)

    def _finish(self) -> Outcome:
        recipe, out, loop, clock = self.recipe, self.out, self.loop, self.loop.clock
        steps = kept = loop.step
        after = self.checks.run(steps) if self.checks else {}
        if self.checks and recipe.training.keep == "best" and self.best.step != steps:
            self.best.restore()
            kept, after = self.best.step, self.best.scores
            log.info(f"the state after {kept} steps had the best label-free check: it is saved")
        if self.data.written is not None:
            log.info(self.data.written.kept())
        self.metrics.write(steps, minutes=round(clock.minutes, 3), kept=kept)
        label = f"after {steps} steps" if kept == steps else f"after {kept} of {steps} steps"
        table = {"BM25": self.bm25, "untrained": self.untrained, "before training": self.before}
        self.model.max_seq_length = self.max_tokens
        card = self._card({**table, label: after} if self.check else {})
        context = None
        if self.first_stage is not None:
            drawn = f"{len(self.context_texts)} chunks of {self.corpus}"
            context = SavedContext(self.first_stage, self._context(), {"drawn from": drawn})
        least = self.encoder.words_to_vectors
        save_retriever(self.model, out, card, recipe.retriever.matryoshka, context, least)
        recipe.objective.save(loop.objective, out)
        plot(self.metrics, self.bm25, out / "training.png", recipe.objective.loss_is)
        if self.accelerator is not None:
            for tracker in self.accelerator.trackers:
                tracker.finish()
        if not loop.interrupted:
            remove_whole(self._checkpoints)
        return Outcome(
            self.untrained, self.before, after, steps, kept, clock.minutes, loop.interrupted
        )

    @property
    def _checkpoints(self) -> Path:
        return self.out / "checkpoints"

    def _about(self) -> dict[str, Any]:
        data = self.data
        made = {"documents": data.n_documents, "chunks": len(data.chunks)}
        made |= {"rows": len(data.rows), "groups": self.made_groups.number}
        return {
            "corpus": self.corpus,
            "command": self.command,
            **made,
            "corpus_digest": data.fingerprint,
            "revisions": {k: v for k, v in commits.items() if k in self.recipe.flat().values()},
            "bm25": self.bm25,
            "untrained": self.untrained,
            **environment(),
        }

    def _checks(self, clock: Clock) -> Checks:
        check, judge, recipe = self.check, self.judge, self.recipe
        assert check is not None
        return Checks(
            clock,
            self.metrics,
            lambda: check(self.encoder),
            every=recipe.training.check_every,
            parts=recipe.training.checks,
            bm25=self.bm25,
            judge=(lambda: judge(self.encoder)) if judge else None,
            offer=self.best.offer if recipe.training.keep == "best" else None,
        )

    def _card(self, scores: dict[str, Scores]) -> str:
        settings, pairs = self.recipe.flat(), judged(self.recipe)
        about = {**settings, "queries": f"judged, of {pairs}"} if pairs else settings
        return model_card(
            self.out.name,
            self.recipe.objective.learned_from.format(**about),
            f"{self.corpus} ({self.data.n_documents:,} documents)",
            self.command,
            "\n".join(f"{k} = {v!r}" for k, v in settings.items()),
            scores,
            self.loop.clock.minutes,
            self.loop.step,
            self.recipe.retriever.matryoshka,
            self.recipe.context.slots,
            labelled=bool(pairs),
        )


def refuse_at_once(recipe: Recipe, out: Path, resume: bool) -> None:
    """Refuse a run that cannot start, before its corpus is read.

    Args:
        recipe, out, resume: as for ``train``.

    Raises:
        RevelaError: the output folder is in the way, the run would have no end, a tracker is not
            installed, judgements cannot be read, the groups of a step cannot be dealt out to the
            processes.
    """
    _refuse_missing_tracker(recipe.training.track)
    check_language(recipe.corpus.language)
    recipe.objective.refuse(recipe)
    _refuse_full_training(recipe)
    if recipe.training.groups_per_step % recipe.training.groups_per_batch:
        raise RevelaError(
            f"--groups-per-step {recipe.training.groups_per_step} is no multiple of "
            f"--groups-per-batch {recipe.training.groups_per_batch}"
        )
    _refuse_processes(recipe)
    if not (
        recipe.training.max_steps or recipe.training.max_minutes or recipe.training.max_tokens_read
    ):
        raise RevelaError(
            "a run without a limit has no end: give --max-steps, --max-minutes or --max-tokens-read"
        )
    if folder := judged(recipe):
        read_judgements(Path(folder), "train")
    if not resume and is_taken(out):
        raise RevelaError(f"{out} exists: choose another --out, or continue that run with --resume")


def _refuse_full_training(recipe: Recipe) -> None:
    """Refuse what does not go with training all weights, or with a model that is new."""
    name, rank = recipe.retriever.model, recipe.retriever.lora_rank
    if name.startswith(NEW):
        size_of(name)
        if rank:
            raise RevelaError(
                f"--model {name} has weights without training, which LoRA would leave as they "
                "are: give --lora-rank 0"
            )
    if recipe.context.slots and not rank:
        raise RevelaError(
            "--context trains its slots beside LoRA, not with all weights: give --lora-rank 1 or "
            "more"
        )


def _refuse_processes(recipe: Recipe) -> None:
    """Refuse a number of processes for which the result would be another."""
    n, training = processes.count(), recipe.training
    whole = n * training.groups_per_batch
    if recipe.lm.shard_lm and n == 1:
        raise RevelaError(
            "--shard-lm deals the LM out to several processes: start them by torchrun, or leave "
            "it out"
        )
    if n == 1:
        return
    if judged(recipe):
        raise RevelaError("--pairs takes one process: start revela without torchrun")
    if not recipe.objective.across_groups and training.groups_per_step % whole:
        raise RevelaError(
            f"--groups-per-step {training.groups_per_step} cannot be dealt out to {n} processes, "
            f"{training.groups_per_batch} at a time: give a multiple of {whole}"
        )
    if recipe.objective.across_groups and training.groups_per_batch % n:
        raise RevelaError(
            f"--groups-per-batch {training.groups_per_batch} cannot be dealt out to {n} processes, "
            f"which compare the texts of a batch: give a multiple of {n}"
        )
    if recipe.objective.across_groups and recipe.context.slots:
        raise RevelaError(
            f"--context with --objective {recipe.objective.name} takes one process, for a batch "
            "has one context: leave it out, or start revela without torchrun"
        )


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
    loss.to(parts.device)
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


def _row(data: TrainingSet, epoch: int, index: int) -> dict[str, Any]:
    """A row as an objective's collator reads it."""
    chunk = data.row(index)
    values = {"document": chunk.document, "text": chunk.text, "query": chunk.query}
    return {**values, "row": index, "epoch": epoch}


def _tracking(recipe: Recipe, out: Path) -> Accelerator:
    """accelerate with the recipe's tracker, for which alone it is used."""
    folders = ProjectConfiguration(project_dir=str(out), logging_dir=str(out / TRACKER_FOLDER))
    on_cpu = compute_device().type == "cpu"
    tracked = Accelerator(cpu=on_cpu, log_with=recipe.training.track, project_config=folders)
    plain = (str, int, float, bool)
    settings = recipe.flat().items()
    config = {k: v if isinstance(v, plain) else str(v) for k, v in settings}
    names = {"wandb": {"name": out.name}, "trackio": {"name": out.name}}
    tracked.init_trackers("revela", config, names)
    return tracked


def _refuse_missing_tracker(track: str) -> None:
    from accelerate.tracking import LoggerType, get_available_trackers

    if track and LoggerType(track) not in get_available_trackers():
        raise RevelaError(f"--track {track} needs its package: install it by pip install {track}")
