"""``revela train --dry-run``: what a run reads, and its memory and time, estimated from a sample.

``train`` chunks and groups the sample as it would the corpus, and calls ``rehearse`` in place of
its loop. Nothing is saved.

What takes long before the first step and changes little in it is left out: the fit, the search for
heads (all of the upper layers, or random ones, stand in), clusters of similar chunks (random
groups), and queries by a language model (the beginnings of passages).
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn

import torch
from torch import nn

from revela.errors import RevelaError
from revela.quiet_libraries import silence_warnings
from revela.terminal import counted, duration
from revela.text.endings import COMPRESSED
from revela.text.load import Reading, joined_by_title
from revela.text.readers import File, files_of, read_file
from revela.text.readers.common import ReadReport
from revela.text.words import joined, words
from revela.training.check_settings import check_recipe
from revela.training.device import compute_device, work_so_far
from revela.training.distributed import started
from revela.training.generated_queries import EXAMPLES, Answer
from revela.training.groups.store import is_group_folder
from revela.training.methods.base import DocumentAttention
from revela.training.recipe import Recipe
from revela.training.record import RunFile
from revela.training.retriever.module import RetrieverModule
from revela.training.settings import NO_FIT, Corpus
from revela.training.step import BatchReader, steps_of, take_step
from revela.training.train import train
from revela.training.training_set import TrainingSet
from revela.types import Document

READ, READ_SECONDS = 2**24, 2.0  # bytes of text that are read, at most, and in what time
SAMPLE = 2**20  # bytes of text, at random from those, that are chunked
SECONDS = 7.0  # after which no third step begins
STEPS, COUNTED = 3, 32  # at most: steps that are timed, and whose tokens are counted
KEPT = 1.2  # a CPU's peak after ten steps of mixed sizes, in terms of that after three: measured
QUESTION_WORDS, ACCEPTED = 12, 0.7  # SmolLM2-135M's questions: their length, and share accepted


@dataclass
class Measured(Exception):
    """The cost of a step; as an exception, it ends ``train``.

    Attributes:
        groups: of the first epoch, in the sample.
        tokens: that the retriever reads.
        memory: peak bytes of the GPU, or of this process; 0: unknown.
    """

    groups: int
    seconds: float
    tokens: float
    memory: int


def estimate(corpus: Sequence[Path], out: Path, recipe: Recipe, sample: int = SAMPLE) -> list[str]:
    """What a run would read and cost, in lines; refuses what a new run would refuse.

    Args:
        corpus, out, recipe: as for ``train_on_files``.
        sample: bytes of text to read of a larger corpus. A judged one is read whole.
    """
    until = time.monotonic() + SECONDS
    if started() > 1:
        raise RevelaError("--dry-run measures one process: leave out torchrun (docs/train.md)")
    check_recipe(recipe, out, resume=False)
    with tempfile.TemporaryDirectory(prefix="revela-") as name, silence_warnings():
        run, file, asked, short = Path(name, "run"), Path(name, "queries"), 0, _shortened(recipe)
        documents, share = _sample(corpus, recipe, sample)
        if documents:
            data = TrainingSet(short, documents, queries_file=file)
        else:
            data = TrainingSet.read(short, corpus, file)
        if data.has_written_queries:
            rng, texts = random.Random(0), [chunk.text for chunk in data.chunks]
            beginnings = (joined(words(text)[:QUESTION_WORDS]) for text in texts)
            answers = [Answer(query * (rng.random() < ACCEPTED)) for query in beginnings]
            data.query_lm().file.add(texts, answers)
            asked = int(data.is_target_R.sum())
        copies = 1 + any(getattr(recipe.fit, name) for name in NO_FIT)
        try:
            train(short, data, run, rehearse=partial(rehearse, run, copies, until))
        except Measured as cost:
            return _say(recipe, data, share, asked, cost)
    raise AssertionError("rehearse ends training")


def _shortened(recipe: Recipe) -> Recipe:
    """The recipe without what takes long before the first step; on a CPU, a batch is a step."""
    method, training, short = recipe.method, recipe.training, {**NO_FIT, "track": ""}
    if compute_device().type == "cpu":
        short["groups_per_step"] = training.fixed_groups_per_batch
    if recipe.groups.groups == "cluster":
        short["groups"] = "random"
    if isinstance(method, DocumentAttention) and method.heads in ("", "published"):
        if method.reads == "queries":
            short["heads"] = "random-middle"
        elif getattr(method, "mix", "gated") == "gated":
            short["gate_heads"] = 0
    return recipe.merge(short)[0]


def _sample(corpus: Sequence[Path], recipe: Recipe, limit: int) -> tuple[Sequence[Document], float]:
    """Documents of random files, and the share of the corpus that they are. None of a small or
    judged corpus and of stored groups; made-up ones, and 0, for datasets of the hub.
    """
    rng, report, settings = random.Random(0), ReadReport(), recipe.corpus
    if any(str(source).startswith("hub:") for source in corpus):
        size, known = recipe.groups.group_size * settings.chunk_words, EXAMPLES.split()
        return [Document(str(i), " ".join(rng.choices(known, k=size))) for i in range(200)], 0.0
    files = [file for source in corpus for file in files_of(source, report)]
    total = sum(file.path.stat().st_size for file in files)
    if total <= limit or recipe.pairs or any(map(is_group_folder, corpus)):
        return [], 1.0
    documents, share = _first(rng.sample(files, len(files)), total, settings)
    if settings.join_titles:
        documents = list(joined_by_title(documents, report))
    stride = max(1, round(sum(len(document.text) for document in documents) / limit))
    # Of all lengths, as a few long documents may have half of the text.
    by_length = sorted(documents, key=lambda document: len(document.text))
    kept = by_length[min(stride, len(by_length)) // 2 :: stride]
    return kept, share * len(kept) / max(1, len(documents))


def _first(files: Sequence[File], total: int, settings: Corpus) -> tuple[list[Document], float]:
    """The first documents of files of ``total`` bytes, and the share of the bytes that they are."""
    report, read, size, until = ReadReport(), list[Document](), 0, time.monotonic() + READ_SECONDS
    fields = Reading(settings.text_field, settings.title_field).fields()
    for file in files:
        text = ""  # of this file
        for document in read_file(file, fields, report):
            read.append(document)
            text += document.full_text
            if size + len(text) > READ or time.monotonic() > until:
                is_packed = file.path.suffix in (*COMPRESSED, ".parquet")
                part = len(zlib.compress(text.encode()) if is_packed else text.encode())
                return read, min(1.0, (part + report.bytes_read + report.bytes_unread) / total)
        size += len(text)
    return read, 1.0


def rehearse(
    run: Path, copies: int, until: float, loss: nn.Module, optimizer: Any, reader: BatchReader
) -> NoReturn:
    """Take two steps, or more before the time ``until``, and raise ``Measured``. ``copies`` of the
    retriever are in memory before and after the steps.
    """
    device = next(loss.parameters()).device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began, counted_steps = time.monotonic(), COUNTED if reader.ahead else 2
    made = [reader.next_step() for _ in range(counted_steps)]
    waiting = 0.0 if reader.ahead else (time.monotonic() - began) / len(made)
    mean, peak, times = fmean(read for _, read in made), 0, list[tuple[float, int]]()
    # The first is slow. A large one after it needs most memory, as a CPU keeps what is freed.
    *others, largest = sorted(made, key=lambda step: step[1])
    first, *usual = sorted(others, key=lambda step: abs(step[1] - mean))[: STEPS + 1]
    for batches, read in (first, largest, *usual):
        if len(times) > 1 and time.monotonic() + times[-1][0] > until:
            break
        began = time.monotonic()
        take_step(loss, optimizer, batches, 0.0, 0)
        work_so_far(device)()
        times.append((waiting + time.monotonic() - began, read))
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        with suppress(ImportError):  # on Windows
            import resource

            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            peak *= 1 if sys.platform == "darwin" else 1024
            # The fit adds a table like that of the embeddings, and saving copies the retriever.
            parts = (part for part in loss.modules() if isinstance(part, RetrieverModule))
            peak += 4 * copies * sum(p.numel() for part in parts for p in part.parameters())
            peak = int(KEPT * peak)
    timed, read = (sum(part) for part in zip(*(times[2:] or times[1:]), strict=True))
    groups = RunFile.read(run).about.groups or 0
    raise Measured(groups, timed / read * mean, mean, peak)


def _say(recipe: Recipe, data: TrainingSet, share: float, asked: int, cost: Measured) -> list[str]:
    """The estimate, a line for each part."""
    training, per_step, grows = recipe.training, recipe.training.groups_per_step, 1 / (share or 1)
    most = recipe.queries.max_queries / asked if asked and recipe.queries.max_queries else grows
    more, batches = min(grows, max(1.0, most)), per_step / data.recipe.training.groups_per_step
    groups, seconds, tokens = cost.groups * more, cost.seconds * batches, cost.tokens * batches
    limits = {
        "--max-steps": training.max_steps,
        "--max-epochs": steps_of(training.max_epochs, ceil(groups), per_step) if share else 0,
        "--max-tokens-read": ceil(1e6 * training.max_tokens_read / tokens),
        "--max-minutes": ceil(60 * training.max_minutes / seconds),
    }
    unknown, warmup = (0, "--max-epochs, which is unknown"), recipe.optimizer.warmup_steps
    steps, flag = min(((n, flag) for flag, n in limits.items() if n), default=unknown)
    short = 0 < steps <= warmup
    corpus = "estimated on made-up text, as hub datasets are not read"
    if share:
        about, part = ("about ", f", from {100 * share:.2g} % of them") if share < 1 else ("", "")
        corpus = (
            f"{about}{counted(round(data.n_documents * grows), 'document')}, "
            f"{counted(round(len(data.chunks) * grows), 'chunk')}{part}; "
            f"{about}{counted(round(groups), 'group')} of {recipe.groups.group_size} per epoch"
        )
    of_gpu = " of the GPU" if torch.cuda.is_available() else ""
    ask = f"; up to {asked * more:,.0f} questions to write take more" if asked else ""
    return [
        f"corpus: {corpus}",
        f"steps: {steps:,} of {counted(per_step, 'group')}, limited by {flag}",
        f"tokens: about {tokens:,.0f} per step for the retriever; "
        f"{steps * tokens / 1e6:,.3g} million in total",
        f"memory: about {cost.memory / 2**30:.2f} GiB{of_gpu}",
        f"time: about {seconds:.2g} s per step, {duration(steps * seconds / 60)} in total, plus "
        f"preparation (the fit, the search for heads), checks and saves{ask}",
        *([f"warm-up: the run ends within it: lower --warmup-steps {warmup}"] if short else []),
    ]
