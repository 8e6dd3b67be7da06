"""The training loop: groups of rows -> batches -> gradient steps, until a limit or Ctrl-C ends it.

A step reads one or more batches one after another, sums their gradients, clips these by their joint
norm, and moves all trained parameters by AdamW.

Several processes deal a step's batches out, add their gradients up before the clipping, and so have
the same weights after every step as one process that reads all batches. What a batch draws at
random depends on its number alone. Once per step they agree on time, tokens and whether to stop;
the first one checks, logs and saves.

The batches of a step are made in a thread while the step before computes, unless a model has a say
in what they hold.
"""

from __future__ import annotations

import math
import random
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import count, groupby, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from revela import processes
from revela.device import after_a_batch, sent
from revela.errors import RevelaError
from revela.groups.documents import Groups
from revela.retriever.trained_table import TwoHalves
from revela.settings import Recipe
from revela.training.checkpoint import load_checkpoint, save_checkpoint, step_of
from revela.training.progress import Checks, Clock, Progress

MAX_GRAD_NORM = 1.0

Batch = dict[str, Tensor]
Rows = Sequence[tuple[int, int]]
"""(epoch, row) of each row of a batch."""
ReadBatch = Callable[[Rows], Batch]
"""Rows -> their tensors, named SIDE_NAME."""
Step = list[tuple[int, Batch, int]]
"""What a process reads in a step: the number of each batch in the run, the batch, and what its mean
loss is divided by."""


class Loop:
    """Optimises an objective.

    Args:
        recipe: groups per step and per batch, learning rate, warm-up, steps between logs and saves.
        objective: called with a list of each side's tensors, gives the mean loss of a batch.
        groups: epoch -> groups of row indices.
        read: makes the batches.
        progress, checks: report the run; checks may be None.
        folder: of the checkpoints.
        device: of the objective.
        ahead: make the batches of a step during the one before. Neither groups nor batches may then
            depend on a model, or draw from torch's generator.

    Attributes:
        step: optimiser steps done.
        interrupted: whether Ctrl-C (SIGINT) or SIGTERM ended the run.
    """

    def __init__(
        self,
        recipe: Recipe,
        objective: nn.Module,
        groups: Groups,
        read: ReadBatch,
        progress: Progress,
        checks: Checks | None,
        folder: Path,
        device: torch.device,
        *,
        ahead: bool,
    ) -> None:
        self.recipe, self.objective, self.read, self.folder = recipe, objective, read, folder
        self.progress, self.checks, self.device = progress, checks, device
        self.clock: Clock = progress.clock
        self.batches_per_step = recipe.training.groups_per_step // recipe.training.groups_per_batch
        self.batches = row_batches(groups, recipe.training.groups_per_batch)
        self.parameters = [p for p in objective.parameters() if p.requires_grad]
        by_rate = by_learning_rate(objective)
        has_table = len(by_rate) > 1
        self.optimizer = torch.optim.AdamW(
            by_rate,
            lr=recipe.training.learning_rate,
            weight_decay=0.0,
            fused=True if device.type == "cuda" or has_table else None,
        )
        self.step, self.interrupted, self._stop_asked = 0, False, False
        self.ahead, self._thread = ahead, ThreadPoolExecutor(1)
        self._next: Future[tuple[Step, int]] | None = None

    def run(self, checkpoint: Path | None = None) -> None:
        """Take steps until the run is done, or until Ctrl-C.

        Args:
            checkpoint: to go on from; None: from the start.

        Raises:
            RevelaError: the checkpoint is another recipe's, or the loss is not finite any more.
        """
        training, clock = self.recipe.training, self.clock
        if checkpoint is not None:
            self._resume(checkpoint)
        # Of the loss and of the gradient's norm, since the last line.
        logged, sums = self.step, torch.zeros(2, device=self.device)
        if self.checks is not None:
            self.checks.begin(self.step)
        with self._stopped_by_signals(), self.progress.bar(self.step), self._thread:
            stopping = clock.progress(self.step) >= 1.0
            while not stopping:
                clock.start()
                batches, tokens = self._batches()
                loss, grad_norm, learning_rate = self._take_step(batches)
                sums += torch.stack([loss, grad_norm])
                after_a_batch(self.device)
                seconds = clock.stop()
                self.progress.advance()
                self._agree(seconds, tokens)
                done = clock.progress(self.step) >= 1.0
                stopping = done or self.interrupted
                logs = self.step % training.log_every == 0
                saves = stopping or self.step % training.save_every == 0
                if logs or saves:
                    summed, norm = self._finite(sums, grad_norm)
                if logs:
                    mean = summed / (self.step - logged)
                    self.progress.log(self.step, mean, norm, learning_rate)
                    logged, sums = self.step, torch.zeros_like(sums)
                if self.checks is not None and not done and self.checks.is_due(self.step):
                    wait([self._next] if self._next else [])  # a tokenizer serves one thread
                    self.checks.run(self.step)
                if saves and processes.is_first():
                    folder = self.folder
                    save_checkpoint(folder, self.step, self.objective, self.optimizer, clock)

    def _batches(self) -> tuple[Step, int]:
        """The batches of this step and the tokens that the retriever reads in them; those of the
        next are begun.
        """
        found = self._next.result() if self._next else self._read(self._my_batches(self.step))
        self._next = None
        if self.ahead and self.clock.progress(self.step + 1) < 1.0:
            self._next = self._thread.submit(self._read, self._my_batches(self.step + 1))
        return found

    def _read(self, rows: Iterable[tuple[int, Rows, int]]) -> tuple[Step, int]:
        step = [(number, self.read(some), share) for number, some, share in rows]
        return step, self.clock.counted()

    def _take_step(self, batches: Step) -> tuple[Tensor, Tensor, float]:
        """Loss, norm of the gradient before clipping, learning rate."""
        factor = self.clock.learning_rate_factor(self.step, self.recipe.training.warmup_steps)
        learning_rate = self.recipe.training.learning_rate * factor
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group["times"]
        total = torch.zeros((), device=self.device)
        for number, batch, share in batches:
            torch.manual_seed(batch_seed(self.recipe.training.seed, number))
            there = {name: sent(tensor, self.device) for name, tensor in batch.items()}
            loss = self.objective(sides(there)) / share
            loss.backward()
            total += loss.detach()
        processes.add_gradients(self.parameters)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.parameters, MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return total, grad_norm, learning_rate

    def _my_batches(self, step: int) -> Iterator[tuple[int, Rows, int]]:
        """What this process reads in a step: the number of each batch in the run, its rows, and
        what its mean loss is divided by. Steps are asked for one after another.
        """
        first = step * self.batches_per_step
        numbered = list(enumerate(islice(self.batches, self.batches_per_step), first))
        if self.recipe.objective.across_groups:
            for number, rows in numbered:
                mine = rows[processes.my_share(len(rows))]
                yield number, mine, self.batches_per_step * processes.count()
        else:
            for number, rows in numbered[processes.index() :: processes.count()]:
                yield number, rows, self.batches_per_step

    def _agree(self, seconds: float, tokens: int) -> None:
        """Share what each process has measured in this step, and whether it is to stop."""
        shared = processes.of_all((seconds, tokens, self._stop_asked))
        of_seconds, of_tokens, stops = zip(*shared, strict=True)
        self.clock.add(of_seconds, of_tokens)
        self.interrupted = any(stops)

    def _finite(self, sums: Tensor, grad_norm: Tensor) -> tuple[float, float]:
        """The summed loss of all processes and the last gradient's norm, for which the device is
        waited for once.

        Raises:
            RevelaError: a loss or a gradient since the last line was not finite.
        """
        numbers = torch.stack([processes.total(sums[0]), sums[1], grad_norm]).tolist()
        if not all(map(math.isfinite, numbers)):
            raise RevelaError(
                f"the loss or its gradient was not finite at step {self.step} or shortly before: "
                "give a lower --learning-rate or --precision fp32, and another --out; or --resume"
            )
        return numbers[0], numbers[2]

    def _resume(self, checkpoint: Path) -> None:
        self.step = step_of(checkpoint)
        for _ in range(self.step * self.batches_per_step):
            next(self.batches)
        load_checkpoint(checkpoint, self.objective, self.optimizer, self.clock)

    @contextmanager
    def _stopped_by_signals(self) -> Iterator[None]:
        """While open, the first Ctrl-C or SIGTERM ends the run after its step, and the second at
        once.
        """

        def interrupt(*_args: Any) -> None:
            if self._stop_asked:
                raise KeyboardInterrupt
            self._stop_asked = True
            tqdm.write("stopping after this step and saving; press Ctrl-C again to stop at once")

        signals = signal.SIGINT, signal.SIGTERM
        previous = [signal.signal(number, interrupt) for number in signals]
        try:
            yield
        finally:
            for number, handler in zip(signals, previous, strict=True):
                signal.signal(number, handler)


def by_learning_rate(objective: nn.Module) -> list[dict[str, Any]]:
    """The trained parameters in their order, in groups of the same learning rate: "times" that of
    the recipe.
    """
    times = {
        parameter: factor
        for module in objective.modules()
        if isinstance(module, TwoHalves)
        for parameter, factor in module.times().items()
    }
    trained = (p for p in objective.parameters() if p.requires_grad)
    same = groupby(trained, lambda p: times.get(p, 1.0))
    return [{"params": list(some), "times": factor} for factor, some in same]


def batch_seed(seed: int, number: int) -> int:
    """What torch's generator begins with at a batch, whichever process reads it."""
    return random.Random(f"{seed}/{number}").getrandbits(63)


def row_batches(groups: Groups, groups_per_batch: int) -> Iterator[list[tuple[int, int]]]:
    """Batches without end, epoch after epoch, each the (epoch, row) of its rows.

    The order is the same for the same groups, so that skipping the first n batches resumes exactly.

    Args:
        groups: epoch -> that epoch's groups of row indices; every epoch has one at least.
        groups_per_batch: these are read together, one after another.
    """
    endless = ((epoch, group) for epoch in count() for group in groups(epoch))
    while True:
        batch = islice(endless, groups_per_batch)
        yield [(epoch, row) for epoch, group in batch for row in group]


def sides(batch: Batch) -> list[Batch]:
    """The tensors of each side (query, passage, chunk, ...), which their names begin with, in the
    order of the sides.
    """
    found: dict[str, Batch] = {}
    for name, tensor in batch.items():
        side, _, rest = name.partition("_")
        found.setdefault(side, {})[rest] = tensor
    return list(found.values())
