"""The training loop: groups of rows -> batches -> gradient steps, until a limit or Ctrl-C ends it.

A step reads one or more batches one after another, sums their gradients, clips these by their joint
norm, and moves all trained parameters by AdamW. Written over accelerate, which owns the device, the
backward pass and the trackers; one process for now.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from tqdm.auto import tqdm

from revela.device import autocast
from revela.groups.documents import Groups
from revela.settings import Recipe
from revela.training.checkpoint import load_checkpoint, save_checkpoint, step_of
from revela.training.progress import Checks, Clock, Progress

MAX_GRAD_NORM = 1.0

Batch = dict[str, Tensor]
ReadBatch = Callable[[Sequence[tuple[int, int]]], Batch]
"""(epoch, row) of each row of a batch -> its tensors, named SIDE_NAME."""


class Loop:
    """Optimises an objective.

    Args:
        recipe: groups per step and per batch, learning rate, warm-up, steps between logs and saves.
        objective: called with a list of each side's tensors, gives the mean loss of a batch.
        groups: epoch -> groups of row indices.
        read: makes the batches.
        progress, checks: report the run; checks may be None.
        folder: of the checkpoints.
        accelerator: device and backward pass.

    Attributes:
        step: optimiser steps done.
        interrupted: whether Ctrl-C ended the run.
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
        accelerator: Accelerator,
    ) -> None:
        self.recipe, self.module, self.read, self.folder = recipe, objective, read, folder
        self.progress, self.checks, self.accelerator = progress, checks, accelerator
        self.clock: Clock = progress.clock
        self.batches_per_step = recipe.training.groups_per_step // recipe.training.groups_per_batch
        self.batches = row_batches(groups, recipe.training.groups_per_batch)
        self.parameters = [p for p in objective.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=recipe.training.learning_rate, weight_decay=0.0
        )
        self.objective, self.stepper = accelerator.prepare(objective, self.optimizer)
        self.step, self.interrupted = 0, False

    def run(self, checkpoint: Path | None = None) -> None:
        """Take steps until the run is done, or until Ctrl-C.

        Args:
            checkpoint: to go on from; None: from the start.

        Raises:
            RevelaError: the checkpoint is another recipe's.
        """
        recipe, clock = self.recipe, self.clock
        if checkpoint is not None:
            self._resume(checkpoint)
        logged, loss = self.step, torch.zeros((), device=self.accelerator.device)
        if self.checks is not None:
            self.checks.begin(self.step)
        with self._stopped_by_ctrl_c(), self.progress.bar(self.step):
            stopping = clock.progress(self.step) >= 1.0
            while not stopping:
                clock.start()
                step_loss, grad_norm, learning_rate = self._take_step()
                loss += step_loss
                clock.stop()
                self.progress.advance()
                if self.step % recipe.training.log_every == 0:
                    mean = loss.item() / (self.step - logged)
                    self.progress.log(self.step, mean, grad_norm.item(), learning_rate)
                    logged, loss = self.step, torch.zeros_like(loss)
                done = clock.progress(self.step) >= 1.0
                if self.checks is not None and not done and self.checks.is_due(self.step):
                    self.checks.run(self.step)
                stopping = done or self.interrupted
                if stopping or self.step % recipe.training.save_every == 0:
                    self._save()

    def _take_step(self) -> tuple[Tensor, Tensor, float]:
        """Loss, norm of the gradient before clipping, learning rate."""
        factor = self.clock.learning_rate_factor(self.step, self.recipe.training.warmup_steps)
        learning_rate = self.recipe.training.learning_rate * factor
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        total = torch.zeros((), device=self.accelerator.device)
        for left in reversed(range(self.batches_per_step)):
            batch = send_to_device(self._next_batch(), self.accelerator.device)
            with self.accelerator.no_sync(self.objective) if left else nullcontext():
                loss = self.objective(sides(batch)) / self.batches_per_step
                self.accelerator.backward(loss)
            total += loss.detach()
        grad_norm = self.accelerator.clip_grad_norm_(self.parameters, MAX_GRAD_NORM)
        self.stepper.step()
        self.stepper.zero_grad()
        self.step += 1
        return total, grad_norm, learning_rate

    def _next_batch(self) -> Batch:
        cuda = [self.accelerator.device] if self.accelerator.device.type == "cuda" else []
        with torch.random.fork_rng(cuda):  # the k-means of iterative groups seeds torch's generator
            rows = next(self.batches)
        return self.read(rows)

    def _resume(self, checkpoint: Path) -> None:
        self.step = step_of(checkpoint)
        for _ in range(self.step * self.batches_per_step):
            next(self.batches)
        load_checkpoint(checkpoint, self.module, self.optimizer, self.clock)

    def _save(self) -> None:
        if self.accelerator.is_main_process:
            save_checkpoint(self.folder, self.step, self.module, self.optimizer, self.clock)

    @contextmanager
    def _stopped_by_ctrl_c(self) -> Iterator[None]:
        """While open, the first Ctrl-C ends the run after its step, and the second at once."""

        def interrupt(*_args: Any) -> None:
            if self.interrupted:
                raise KeyboardInterrupt
            self.interrupted = True
            tqdm.write("stopping after this step and saving; press Ctrl-C again to stop at once")

        previous = signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)


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


@contextmanager
def bf16_forward(model: SentenceTransformer, bf16: bool) -> Iterator[None]:
    """While open, the model's forward pass runs under bf16 autocast, if ``bf16``."""
    forward = model.forward

    def under_autocast(*args: Any, **kwargs: Any) -> Any:
        with autocast(model.device, bf16):
            return forward(*args, **kwargs)

    model.forward = under_autocast
    try:
        yield
    finally:
        del model.forward  # the class's own is seen again
