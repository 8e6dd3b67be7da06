"""The parts of the training loop: the batches of a step, the step, and what ends the run.

A step reads one or more batches one after another, sums their gradients, clips these by their joint
norm, and moves all trained parameters by AdamW.

Several processes deal a step's batches out, add their gradients up before the clipping, and so have
the same weights after every step as one process that reads all batches. What a batch draws at
random depends on its number alone.
"""

from __future__ import annotations

import math
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import count, groupby, islice
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from revela import distributed as distributed
from revela.device import sent
from revela.errors import RevelaError
from revela.groups.strategies import Groups
from revela.retriever.static_trainable import TwoHalves
from revela.settings import Recipe
from revela.training.metrics import Budget

MAX_GRAD_NORM = 1.0

Tensors = dict[str, Tensor]
Rows = Sequence[tuple[int, int]]
"""(epoch, row) of each row of a batch."""
Collate = Callable[[Rows], Tensors]
"""Rows -> their tensors, named SIDE_NAME."""


class Batch(NamedTuple):
    """What a process reads of a batch.

    Attributes:
        number: of the batch in the run.
        tensors: of the rows that this process reads.
        share: what their mean loss is divided by.
    """

    number: int
    tensors: Tensors
    share: int


class BatchReader:
    """Makes the batches of one step after another.

    Args:
        recipe: groups per step and per batch.
        groups: epoch -> groups of row indices.
        collate: makes the tensors of a batch.
        budget: counts the tokens that the retriever reads.
        ahead: make the batches of a step in a thread during the one before. Neither groups nor
            batches may then depend on a model, or draw from torch's generator.
        step: steps that are done; their batches are skipped.
    """

    def __init__(
        self,
        recipe: Recipe,
        groups: Groups,
        collate: Collate,
        budget: Budget,
        *,
        ahead: bool,
        step: int = 0,
    ) -> None:
        self.collate, self.budget, self.ahead, self.step = collate, budget, ahead, step
        self.across_groups = recipe.objective.across_groups
        self.batches_per_step = recipe.training.groups_per_step // recipe.training.groups_per_batch
        self._batches = row_batches(groups, recipe.training.groups_per_batch)
        for _ in range(step * self.batches_per_step):
            next(self._batches)
        self._thread = ThreadPoolExecutor(1)
        self._future: Future[tuple[list[Batch], int]] | None = None

    def __enter__(self) -> BatchReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def next_step(self) -> tuple[list[Batch], int]:
        """The batches of this step and the tokens that the retriever reads in them; those of the
        next are begun.
        """
        found = self._future.result() if self._future else self._read(self.step)
        self.step, self._future = self.step + 1, None
        if self.ahead and self.budget.done(self.step) < 1.0:
            self._future = self._thread.submit(self._read, self.step)
        return found

    def wait(self) -> None:
        """Wait for the thread: a tokenizer serves one at a time."""
        wait([self._future] if self._future else [])

    def _read(self, step: int) -> tuple[list[Batch], int]:
        mine = self.my_rows(step)
        batches = [Batch(number, self.collate(rows), share) for number, rows, share in mine]
        return batches, self.budget.counted()

    def my_rows(self, step: int) -> Iterator[tuple[int, Rows, int]]:
        """The number, rows and share of what this process reads in a step."""
        first, world_size = step * self.batches_per_step, distributed.world_size()
        numbered = list(enumerate(islice(self._batches, self.batches_per_step), first))
        if self.across_groups:
            for number, rows in numbered:
                mine = rows[distributed.my_share(len(rows))]
                yield number, mine, self.batches_per_step * world_size
        else:
            for number, rows in numbered[distributed.rank() :: world_size]:
                yield number, rows, self.batches_per_step


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


def sides(tensors: Tensors) -> list[Tensors]:
    """The tensors of each side (query, passage, chunk, ...), which their names begin with, in the
    order of the sides.
    """
    found: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        side, _, rest = name.partition("_")
        found.setdefault(side, {})[rest] = tensor
    return list(found.values())


def make_optimizer(objective: nn.Module, learning_rate: float) -> torch.optim.AdamW:
    """AdamW over the trained parameters in their order; the rows of a table take "times" the
    learning rate of a transformer's weights.
    """
    times = {
        parameter: factor
        for module in objective.modules()
        if isinstance(module, TwoHalves)
        for parameter, factor in module.learning_rate_multipliers().items()
    }
    trained = [p for p in objective.parameters() if p.requires_grad]
    same_rate = groupby(trained, lambda p: times.get(p, 1.0))
    groups: list[dict[str, Any]] = [{"params": [*ps], "times": factor} for factor, ps in same_rate]
    fused = True if trained[0].device.type == "cuda" or len(groups) > 1 else None
    return torch.optim.AdamW(groups, lr=learning_rate, weight_decay=0.0, fused=fused)


def take_step(
    objective: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    learning_rate: float,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """The mean loss of this process's batches, and the gradient's norm before clipping."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["times"]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    device = parameters[0].device
    total = torch.zeros((), device=device)
    for batch in batches:
        torch.manual_seed(batch_seed(seed, batch.number))
        there = {name: sent(tensor, device) for name, tensor in batch.tensors.items()}
        loss = objective(sides(there)) / batch.share
        loss.backward()
        total += loss.detach()
    distributed.add_gradients(parameters)
    grad_norm = torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return total, grad_norm


def batch_seed(seed: int, number: int) -> int:
    """What torch's generator begins with at a batch, whichever process reads it."""
    return random.Random(f"{seed}/{number}").getrandbits(63)


def agree(budget: Budget, seconds: float, tokens: int, stop: bool) -> bool:
    """Add to the budget what a step took in each process; whether one of them is to stop."""
    shared = distributed.all_gather((seconds, tokens, stop))
    all_seconds, all_tokens, all_stops = zip(*shared, strict=True)
    budget.spend(all_seconds, all_tokens)
    return any(all_stops)


def check_finite(step: int, sums: Tensor, grad_norm: Tensor) -> tuple[float, float]:
    """The summed loss of all processes and the last gradient's norm, for which the device is waited
    for once.

    Args:
        step: steps done.
        sums: of this process's losses and of the gradients' norms since the last line.
        grad_norm: of the last step.

    Raises:
        RevelaError: a loss or a gradient since the last line was not finite.
    """
    numbers = torch.stack([distributed.all_reduce_sum(sums[0]), sums[1], grad_norm]).tolist()
    if not all(map(math.isfinite, numbers)):
        raise RevelaError(
            f"the loss or its gradient was not finite at step {step} or shortly before: "
            "give a lower --learning-rate or --precision fp32, and another --out; or --resume"
        )
    return numbers[0], numbers[2]


class Stop:
    """While open, the first Ctrl-C or SIGTERM asks the run to end after its step, the second ends
    it at once.
    """

    SIGNALS = signal.SIGINT, signal.SIGTERM

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> Stop:
        self._before = [signal.signal(number, self._ask) for number in self.SIGNALS]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in zip(self.SIGNALS, self._before, strict=True):
            signal.signal(number, handler)

    def _ask(self, _number: int, _frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        tqdm.write("stopping after this step and saving; press Ctrl-C again to stop at once")
