"""One training run: documents -> chunks -> groups -> objective -> a saved retriever.

The arguments say what is trained on and how; checks come in as a function, so that training knows
nothing of evaluation.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import nn

from revela.corpus.arrow_list import ArrowList
from revela.device import compute_device, uses_bf16
from revela.errors import RevelaError
from revela.groups.documents import Groups
from revela.groups.folder import GroupFolder
from revela.groups.order import IterativeGroups, order_of_groups, similar_groups, stored_order
from revela.groups.training_set import ASKING, training_chunks, training_rows
from revela.objectives.building import Materials, build_objective
from revela.retriever import fit as corpus_fit
from revela.retriever.build import build_retriever
from revela.retriever.encode import RetrieverEncoder, without_padding
from revela.retriever.lora import add_lora
from revela.retriever.save import model_card, save_retriever
from revela.settings import LEARNED_FROM, Recipe
from revela.silence import silence_libraries
from revela.training.progress import Clock, Metrics, Watch, plot
from revela.training.record import (
    checkpoint_to_resume,
    corpus_digest,
    environment,
    refuse_several_processes,
    settings_of,
    write_record,
)
from revela.training.trainer import Best, GroupSampler, GroupTrainer
from revela.types import Chunk, Document, Encoder
from revela.weights import find_weights

log = logging.getLogger(__name__)

Check = Callable[[Encoder], dict[str, float]]
UNLIMITED = 10**9
FITTING_SAMPLE = 1500  # chunks


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run gave: label-free scores of the model it started from, before the first update, and
    of the state that is saved.
    """

    untrained: dict[str, float]
    before: dict[str, float]
    after: dict[str, float]
    steps: int
    kept: int
    minutes: float
    interrupted: bool


def train(
    recipe: Recipe,
    documents: Sequence[Document] | GroupFolder,
    out: Path,
    *,
    check: Check | None = None,
    bm25: dict[str, float] | None = None,
    corpus: str = "a corpus",
    command: str = "",
    resume: bool = False,
    queries_file: Path | None = None,
    judge: Check | None = None,
) -> Outcome:
    """Train a retriever on documents and save it to ``out``.

    Args:
        recipe: all settings.
        documents: to train on, held-out ones already taken away; or groups that were made of them.
        out: a folder that does not exist yet, or, with ``resume``, one with a checkpoint.
        check: label-free scores of an encoder by task; None: no checks.
        bm25: BM25's scores on the same tasks, for comparison.
        corpus, command: for the model card.
        resume: continue from the last checkpoint of ``out``.
        queries_file: keeps the queries that a language model writes, for objectives that need them.
        judge: scores to be written down at every check that must not decide anything, such as those
            of judged queries.

    Raises:
        RevelaError: the output folder is in the way, the corpus is too small, a model cannot be
            used, several processes were started.
    """
    refuse_at_once(recipe, out, resume)
    silence_libraries()
    bm25 = bm25 or {}
    settings, digest = settings_of(recipe), corpus_digest(documents)
    checkpoint = checkpoint_to_resume(settings, digest, out) if resume else None
    torch.set_num_threads(recipe.threads or os.cpu_count() or 1)
    torch.manual_seed(recipe.seed)
    rows: ArrowList[Chunk]
    chunks: ArrowList[Chunk]
    if isinstance(documents, GroupFolder):
        folder_groups, chunks, rows = (
            stored_order(recipe, documents),
            documents.rows,
            documents.rows,
        )
        made_of, documents = int(documents.settings["documents"]), documents.documents
        per_epoch = sum(1 for _ in folder_groups(0))
    else:
        folder_groups, made_of = None, len(documents)
        chunks = training_chunks(recipe, documents)
        rows = training_rows(recipe, documents, chunks, queries_file)
        per_epoch = sum(1 for _ in order_of_groups(recipe, rows)(0))
    if per_epoch == 0:
        raise RevelaError(_why_no_group(recipe, rows))
    pieces = "" if len(rows) == len(chunks) else f" -> {len(rows):,} to train on"
    log.info(
        f"{made_of:,} documents -> {len(chunks):,} chunks{pieces} -> {per_epoch:,} groups of {recipe.group_size} an epoch"
    )

    device = compute_device()
    bf16 = uses_bf16(recipe.precision, device)
    folder = find_weights(recipe.model, recipe.offline_model)
    model = untrained_retriever(recipe, folder, documents)
    full_length = model.max_seq_length or recipe.max_tokens
    model.max_seq_length = min(
        full_length, recipe.lm_tokens
    )  # what training reads; the saved model reads on
    encoder = RetrieverEncoder(model, bf16)
    if recipe.groups == "iterative":
        groups: Groups = IterativeGroups(recipe, rows, encoder, out / "checkpoints")
    else:
        groups = folder_groups or similar_groups(recipe, documents, rows, lambda: model)
    untrained = check(encoder) if check else {}
    if check:
        log.info(f"untrained: {_describe(untrained, {})}")
    is_decoder = not (
        folder / "modules.json"
    ).is_file()  # else its layers are its own, and not fitted
    if is_decoder and (recipe.token_weighting or recipe.whitening or recipe.lexical):
        fit_to_chunks(recipe, model, chunks, bf16)
    add_lora(model, recipe.lora_rank, recipe.lora_alpha, recipe.lora_dropout)
    clock = Clock(
        recipe.max_steps, recipe.max_minutes, recipe.max_tokens_read, cpu=recipe.clock == "cpu"
    )
    step0 = int(checkpoint.name.split("-")[1]) if checkpoint else None
    metrics = Metrics(out / "metrics.jsonl", keep_until=step0)
    watch = Watch(
        clock,
        metrics,
        check=(lambda: check(encoder)) if check else None,
        check_every=recipe.check_every,
        checks=recipe.checks,
        describe=lambda scores: _describe(scores, bm25),
        judge=(lambda: judge(encoder)) if judge else None,
    )
    objective, collate = build_objective(
        Materials(recipe, documents, rows, model, device, bf16, watch.count)
    )
    out.mkdir(parents=True, exist_ok=True)
    made = {"documents": made_of, "chunks": len(chunks), "rows": len(rows), "groups": per_epoch}
    about = {
        "corpus": corpus,
        "command": command,
        **made,
        "corpus_digest": digest,
        "bm25": bm25,
        "untrained": untrained,
    }
    about |= environment()
    write_record(settings, about, out)
    best = Best(
        objective,
        out / "checkpoints",
        ((r["step"], r["check"]) for r in metrics.rows if "check" in r),
    )
    if recipe.keep == "best":
        watch.offer = best.offer
    trainer = _trainer(recipe, objective, model, collate, rows, groups, out, clock, watch, bf16)
    before: dict[str, float] = next(
        (r["check"] for r in metrics.rows if r["step"] == 0 and "check" in r), {}
    )
    if check and not before:
        before = watch.record_check(0)
    with without_padding(model):
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)

    steps = trainer.state.global_step
    kept, after = steps, watch.record_check(steps) if check else {}
    if check and recipe.keep == "best" and best.step != steps:
        best.restore()
        kept, after = best.step, best.scores
        log.info(
            f"the label-free check liked the state after {kept} updates best: that is what is saved"
        )
    metrics.write(step=steps, minutes=round(clock.seconds / 60, 3), kept=kept)
    label = f"after {steps} updates" if kept == steps else f"after {kept} of {steps} updates"
    table = {"BM25": bm25, "untrained": untrained, "before training": before, label: after}
    listed = "\n".join(f"{k} = {v!r}" for k, v in dataclasses.asdict(recipe).items())
    corpus = f"{corpus} ({made_of:,} documents)"
    scores, minutes = table if check else {}, clock.seconds / 60
    learned_from, loss = LEARNED_FROM[recipe.objective]
    learned_from = learned_from.format(**dataclasses.asdict(recipe))
    card = model_card(
        out.name, learned_from, corpus, command, listed, scores, minutes, steps, recipe.matryoshka
    )
    model.max_seq_length = full_length
    save_retriever(model, out, card, recipe.matryoshka)
    plot(metrics, bm25, out / "training.png", loss)
    if not watch.interrupted:
        shutil.rmtree(out / "checkpoints", ignore_errors=True)
    return Outcome(untrained, before, after, steps, kept, minutes, watch.interrupted)


def refuse_at_once(recipe: Recipe, out: Path, resume: bool) -> None:
    """Refuse a run that cannot start, as far as that can be told before its corpus is read.

    Args:
        recipe, out, resume: as for ``train``.

    Raises:
        RevelaError: the output folder is in the way, the run would have no end, several processes
            were started.
    """
    refuse_several_processes()
    if recipe.groups_per_step % recipe.groups_per_batch:
        raise RevelaError(
            f"--groups-per-step {recipe.groups_per_step} is no multiple of --groups-per-batch {recipe.groups_per_batch}"
        )
    if not (recipe.max_steps or recipe.max_minutes or recipe.max_tokens_read):
        raise RevelaError(
            "a run without a limit has no end: give --max-steps, --max-minutes or --max-tokens-read"
        )
    if not resume and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RevelaError(f"{out} exists: choose another --out, or continue that run with --resume")


def untrained_retriever(
    recipe: Recipe, folder: Path, documents: Sequence[Document]
) -> SentenceTransformer:
    """The retriever before anything is fitted or trained."""
    fold = recipe.lower_case == "yes" or (recipe.lower_case == "auto" and has_no_case(documents))
    if fold and recipe.lower_case == "auto":
        log.info("the corpus has one case only: queries and passages are folded to lower case")
    return build_retriever(
        folder,
        layers=recipe.layers,
        pooling=recipe.pooling,
        max_tokens=recipe.max_tokens,
        lower_case=fold,
        query_prompt=recipe.query_prompt,
        passage_prompt=recipe.passage_prompt,
    )


def fit_to_chunks(
    recipe: Recipe, model: SentenceTransformer, chunks: Sequence[Chunk], bf16: bool
) -> None:
    """Token weights, whitening and the lexical half, from a sample of the corpus's own chunks."""
    sample = random.Random(recipe.seed).sample(chunks, min(len(chunks), FITTING_SAMPLE))
    corpus_fit.fit_to_corpus(
        model,
        [c.text for c in sample],
        token_weighting=recipe.token_weighting,
        whitening=recipe.whitening,
        lexical=recipe.lexical,
        bf16=bf16,
    )
    log.info(f"token weights and whitening fitted to {len(sample):,} chunks")


def _trainer(
    recipe: Recipe,
    objective: nn.Module,
    model: SentenceTransformer,
    collate: Callable[..., Any],
    rows: ArrowList[Chunk],
    groups: Groups,
    out: Path,
    clock: Clock,
    watch: Watch,
    bf16: bool,
) -> GroupTrainer:
    from datasets import Dataset, concatenate_datasets
    from sentence_transformers import SentenceTransformerTrainingArguments
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(out / "checkpoints"),
        max_steps=recipe.max_steps or UNLIMITED,
        per_device_train_batch_size=recipe.group_size * recipe.groups_per_batch,
        gradient_accumulation_steps=recipe.groups_per_step // recipe.groups_per_batch,
        max_grad_norm=1.0,
        logging_steps=recipe.log_every,
        logging_nan_inf_filter=False,
        save_steps=recipe.save_every,
        seed=recipe.seed,
        bf16=bf16,
        use_cpu=compute_device().type == "cpu",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    if arguments.n_gpu > 1:  # transformers would divide each group among them by DataParallel
        log.info(
            f"there are {arguments.n_gpu} GPUs, and a run uses the first: name another by CUDA_VISIBLE_DEVICES"
        )
        arguments._n_gpu = 1
    optimizer = torch.optim.AdamW(
        [p for p in objective.parameters() if p.requires_grad],
        lr=recipe.learning_rate,
        weight_decay=0.0,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: clock.learning_rate_factor(step, recipe.warmup_steps)
    )
    trainer = GroupTrainer(
        clock=clock,
        checkpoints=out / "checkpoints",
        sampler=GroupSampler(
            groups,
            (recipe.max_steps or UNLIMITED) * recipe.groups_per_step,
            recipe.groups_per_batch,
        ),
        model=model,
        args=arguments,
        train_dataset=concatenate_datasets([Dataset.from_file(str(path)) for path in rows.paths]),
        loss=objective,
        data_collator=collate,
        optimizers=(optimizer, schedule),
        callbacks=[watch],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    return trainer


def _why_no_group(recipe: Recipe, rows: ArrowList[Chunk]) -> str:
    if (
        recipe.objective in ASKING
        and len(rows) >= recipe.group_size
        and not any(rows.column("query"))
    ):
        return f"no chunk has a query: try another --queries than {recipe.queries}, or another --query-lm"
    return f"{len(rows)} chunks are fewer than a group of {recipe.group_size}: add text, or lower --chunk-words or --group-size"


def has_no_case(documents: Sequence[Document], share: float = 0.005) -> bool:
    """Whether a corpus is written in one case: then case says nothing, and queries in another case
    must not be lost.
    """
    sample = "".join(d.full_text[:2000] for d in documents[:: max(1, len(documents) // 500)])
    letters = sum(c.isalpha() for c in sample)
    capitals = sum(c.isupper() for c in sample)
    return letters > 0 and min(capitals, letters - capitals) < share * letters


def _describe(scores: dict[str, float], bm25: dict[str, float]) -> str:
    return ", ".join(
        f"{k} {v:.3f}" + (f" (BM25 {bm25[k]:.3f})" if k in bm25 else "") for k, v in scores.items()
    )
