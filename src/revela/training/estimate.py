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
from revela.quiet_libraries import silence_libraries, silence_warnings
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
from revela.training.lm.language_model import LanguageModel
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
QUESTION_WORDS, ACCEPTED = 12, 0.7  # SmolLM2-135M's questions: their length, and share accepted


@dataclass
class Measured(Exception):
    """The cost of a step; as an exception, it ends ``train``.

    Attributes:
        groups: of the first epoch, in the sample.
        tokens, lm_tokens: that the retriever and the LM read.
        memory: peak bytes of the GPU, or of this process; 0: unknown.
    """

    groups: int
    seconds: float
    tokens: float
    lm_tokens: float
    memory: int


def estimate(corpus: Sequence[Path], out: Path, recipe: Recipe, sample: int = SAMPLE) -> list[str]:
    """What a run would read and cost, in lines; refuses what a new run would refuse.

    Args:
        corpus, out, recipe: as for ``train_on_files``.
        sample: bytes of text to read of a larger corpus. A judged one is read whole.
    """
    until = time.monotonic() + SECONDS
    if started() > 1:
        raise RevelaError(
            "--dry-run measures one process: leave out torchrun, and divide --groups-per-step by "
            "the number of processes"
        )
    check_recipe(recipe, out, resume=False)
    silence_libraries()
    with tempfile.TemporaryDirectory(prefix="revela-") as name, silence_warnings():
        run, file, asked, queries = Path(name, "run"), Path(name, "queries"), 0, recipe.queries
        short, (documents, share) = _shortened(recipe), _sample(corpus, recipe, sample)
        if documents:
            data = TrainingSet(short, documents, queries_file=file)
        else:
            data = TrainingSet.read(short, corpus, file)
        if recipe.method.reads == "queries" and queries.queries == "lm" and not queries.questions:
            rng, texts = random.Random(0), [chunk.text for chunk in data.chunks]
            beginnings = (joined(words(text)[:QUESTION_WORDS]) for text in texts)
            answers = [Answer(query * (rng.random() < ACCEPTED)) for query in beginnings]
            data.query_lm().file.add(texts, answers)
            asked = int(data.is_target_R.sum()) if data.folder is None else 0
        copies = 1 + any(getattr(recipe.fit, name) for name in NO_FIT)
        try:
            train(short, data, run, rehearse=partial(rehearse, run, copies, until))
        except Measured as cost:
            return _in_words(recipe, data, share, asked, cost)
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
    rng, report = random.Random(0), ReadReport()
    if any(str(source).startswith("hub:") for source in corpus):
        size, known = recipe.groups.group_size * recipe.corpus.chunk_words, EXAMPLES.split()
        return [Document(str(i), " ".join(rng.choices(known, k=size))) for i in range(200)], 0.0
    files = [file for source in corpus for file in files_of(source, report)]
    total = sum(file.path.stat().st_size for file in files)
    if total <= limit or recipe.pairs or any(map(is_group_folder, corpus)):
        return [], 1.0
    documents, share = _first(rng.sample(files, len(files)), total, recipe.corpus)
    if recipe.corpus.join_titles:
        documents = list(joined_by_title(documents, report))
    apart = max(1, round(sum(len(document.text) for document in documents) / limit))
    # Of all lengths, as a few long documents may have half of the text.
    kept = sorted(documents, key=lambda document: len(document.text))[apart // 2 :: apart]
    return kept, share * len(kept) / max(1, len(documents))


def _first(files: Sequence[File], total: int, settings: Corpus) -> tuple[list[Document], float]:
    """The first documents of files of ``total`` bytes, and the share of the bytes that they are."""
    report, read, size, until = ReadReport(), list[Document](), 0, time.monotonic() + READ_SECONDS
    fields = Reading(settings.text_field, settings.title_field).fields()

    for file in files:
        first = len(read)
        for document in read_file(file, fields, report):
            read.append(document)
            size += len(document.full_text)
            if size > READ or time.monotonic() > until:
                text = "".join(document.full_text for document in read[first:]).encode()
                is_packed = file.path.suffix in (*COMPRESSED, ".parquet")
                part = len(zlib.compress(text) if is_packed else text)
                whole = report.bytes_read + report.bytes_unread
                return read, min(1.0, (part + whole) / total)
    return read, 1.0


def rehearse(
    run: Path, copies: int, until: float, loss: nn.Module, optimizer: Any, reader: BatchReader
) -> NoReturn:
    """Take two steps, or more before the time ``until``, and raise ``Measured``. ``copies`` of the
    retriever are in memory before and after the steps.
    """
    device, lm_tokens = next(loss.parameters()).device, list[int]()

    def count(_lm: nn.Module, _given: Any, named: dict[str, Any]) -> None:
        lm_tokens.append(named["input_ids"].numel())

    for part in loss.modules():
        if isinstance(part, LanguageModel):
            part._body.register_forward_pre_hook(count, with_kwargs=True)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began, made = time.monotonic(), [reader.next_step()]
    while len(made) < (COUNTED if reader.ahead else 2):
        made.append(reader.next_step())
    waiting = 0.0 if reader.ahead else (time.monotonic() - began) / len(made)
    tokens = [read for _, read in made]
    mean, peak, times = fmean(tokens), 0, list[tuple[float, int]]()
    # The first is slow. A large one after it needs most memory, as a CPU keeps what is freed.
    first, *usual, last = sorted(made, key=lambda step: step[1])
    usual = sorted([first, *usual], key=lambda step: abs(step[1] - mean))[: STEPS + 1]
    for batches, read in (usual[0], last, *usual[1:]):
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
    timed, read = (sum(part) for part in zip(*(times[2:] or times[1:]), strict=True))
    of_lm = sum(lm_tokens) / sum(read for _, read in times)
    groups = RunFile.read(run).about.groups or 0
    raise Measured(groups, timed / read * mean, mean, of_lm * mean, peak)


def _in_words(
    recipe: Recipe, data: TrainingSet, share: float, asked: int, cost: Measured
) -> list[str]:
    """The estimate, a line for each part."""
    training, reading, size, grows = recipe.training, recipe.corpus, recipe.groups.group_size, 1.0
    if 0 < share < 1:
        whole = len(data.documents) / share
        held_out = min(reading.held_out_at_most, reading.held_out * whole)
        grows = (whole - held_out) / len(data.documents)
    most = recipe.queries.max_queries / asked if asked and recipe.queries.max_queries else grows
    more, per_step = min(grows, max(1.0, most)), training.groups_per_step
    groups, batches = cost.groups * more, per_step / data.recipe.training.groups_per_step
    seconds, tokens, of_lm = (batches * x for x in (cost.seconds, cost.tokens, cost.lm_tokens))
    limits = {
        "--max-steps": training.max_steps,
        "--max-epochs": steps_of(training.max_epochs, ceil(groups), per_step) if share else 0,
        "--max-tokens-read": ceil(1e6 * training.max_tokens_read / tokens),
        "--max-minutes": ceil(60 * training.max_minutes / seconds),
    }
    unknown = 0, "--max-epochs, which is unknown"
    steps, flag = min(((n, flag) for flag, n in limits.items() if n), default=unknown)
    about = "" if share == 1 else "about "
    documents, chunks = data.n_documents * grows, len(data.chunks) * grows
    if not share:
        corpus = "datasets of the hub are not read: made-up text stands in"
    else:
        read = f", from {100 * share:.2g} % of them" if share < 1 else ""
        corpus = f"{about}{documents:,.0f} documents, {chunks:,.0f} chunks{read}; "
        corpus += f"{about}{groups:,.0f} groups of {size} per epoch"
    lm = f" and {of_lm:,.0f} for the language model" if of_lm else ""
    of_gpu = " of the GPU" if torch.cuda.is_available() else ""
    ask = f"; up to {asked * more:,.0f} questions to write take more" if asked else ""
    return [
        f"corpus: {corpus}",
        f"steps: {steps:,} of {counted(per_step, 'group')}, by {flag}",
        f"tokens: about {tokens:,.0f} a step for the retriever{lm}; "
        f"{steps * tokens / 1e6:,.3g} million for the retriever in all",
        f"memory: about {cost.memory / 2**30:.2f} GiB{of_gpu}",
        f"time: about {seconds:.2g} s a step, {duration(steps * seconds / 60)} in all, besides "
        f"preparation (such as the fit), checks and saves{ask}",
    ]
