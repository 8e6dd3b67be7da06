"""Parts of the training loop: the budget of a run, the batches of a step, the step, its progress,
and signals that end the run.

A step reads one or more batches in turn, sums their gradients, clips them by their joint norm, and
updates all trained parameters by AdamW.

Several processes share the batches of a step, or each batch (``Method.shares_batches``), and add up
their gradients before clipping. The random numbers of a batch depend on its number only. So the
weights after every step are those of one process that reads all batches.
"""

from __future__ import annotations

import math
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import count, groupby, islice
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from revela.errors import RevelaError
from revela.terminal import duration
from revela.training import distributed
from revela.training.device import Tensors, sent, work_so_far
from revela.training.groups.strategies import Groups
from revela.training.methods.base import Collate
from revela.training.record import Metrics, MetricsRow, Scores
from revela.training.settings import Optimizer, Training
from revela.training.training_set import TrainingSet
from revela.types import Chunk

MAX_GRAD_NORM = 1.0

Rows = Sequence[tuple[int, int]]
"""(epoch, row) of each row of a batch."""


class Budget:
    """Seconds trained (without checks and saves) and tokens read, over all processes and all parts
    of a resumed run.

    Args:
        max_steps, max_minutes, max_mtokens (millions): limits of the run. 0: no limit.
    """

    def __init__(self, max_steps: int, max_minutes: float = 0.0, max_mtokens: float = 0.0) -> None:
        self.max_steps = max_steps
        self.limits = max_steps, 60 * max_minutes, 1e6 * max_mtokens
        self.seconds, self.tokens, self._counted = 0.0, 0, 0

    @classmethod
    def of(cls, training: Training, groups: int) -> Budget:
        """The budget of a run with so many groups per epoch."""
        return cls(step_limit(training, groups), training.max_minutes, training.max_tokens_read)

    def count(self, tokens: int) -> None:
        """Count tokens that the retriever reads."""
        self._counted += tokens

    def take_count(self) -> int:
        """Tokens counted since the last call."""
        tokens, self._counted = self._counted, 0
        return tokens

    @property
    def minutes(self) -> float:
        return self.seconds / 60

    def done(self, step: int) -> float:
        """Fraction of the run that is done; 1 when a limit is reached."""
        spent, limits = (step, self.seconds, self.tokens), self.limits
        parts = (some / most for some, most in zip(spent, limits, strict=True) if most)
        return min(1.0, max(parts, default=0.0))

    def learning_rate_factor(self, step: int, settings: Optimizer, restarts: int = 0) -> float:
        """Factor of linear warm-up times the schedule, over the run, or over every ``restarts``
        steps.
        """
        done = self.done(step)
        if restarts:
            step %= restarts
            done = step / restarts
        decay = {"linear": 1.0 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
        warmup = min(1.0, (step + 1) / max(1, settings.warmup_steps))
        return warmup * decay.get(settings.schedule, 1.0)


def steps_of(epochs: int, groups: int, groups_per_step: int) -> int:
    """The steps of so many passes over the groups; the last may go on into the next pass."""
    return -(-epochs * groups // groups_per_step)


def step_limit(settings: Training, groups: int) -> int:
    """The nearer of ``max_steps`` and ``max_epochs`` (of so many groups), in steps; 0: no limit."""
    epochs = steps_of(settings.max_epochs, groups, settings.groups_per_step)
    return min(filter(None, (settings.max_steps, epochs)), default=0)


class Batch(NamedTuple):
    """A process's part of a batch.

    Attributes:
        number: the batch's number in the run.
        tensors: by name, SIDE_NAME.
        divisor: the loss is divided by this, for a mean over the step.
    """

    number: int
    tensors: Tensors
    divisor: int


class BatchReader:
    """Makes the batches of every step, in order.

    Args:
        groups: epoch -> groups of row indices.
        read: (epoch, row) pairs -> tensors of a batch.
        budget: counts the tokens that the retriever reads.
        groups_per_step, groups_per_batch: as in the settings; the second divides the first.
        is_shared: whether all processes read each batch, and embed their share of its texts.
        ahead: prefetch the batches of a step in a thread during the previous step. Only if groups
            and batches use neither a model nor torch's random numbers.
        step: steps already done; their batches are skipped.
    """

    def __init__(
        self,
        groups: Groups,
        read: Callable[[Rows], Tensors],
        budget: Budget,
        groups_per_step: int,
        groups_per_batch: int,
        is_shared: bool,
        ahead: bool,
        step: int = 0,
    ) -> None:
        self.read, self.budget, self.ahead, self.step = read, budget, ahead, step
        self.rank, self.processes = distributed.rank(), distributed.world_size()
        self.is_shared, self.batches_per_step = is_shared, groups_per_step // groups_per_batch
        self._batches = row_batches(groups, groups_per_batch)
        for _ in range(step * self.batches_per_step):
            next(self._batches)
        self._thread = ThreadPoolExecutor(1)
        self._future: Future[tuple[list[Batch], int]] | None = None

    def __enter__(self) -> BatchReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def next_step(self) -> tuple[list[Batch], int]:
        """The batches of this step, and the number of tokens that the retriever reads in them."""
        made = self._future.result() if self._future else self._make(self.step)
        self.step, self._future = self.step + 1, None
        if self.ahead and self.budget.done(self.step) < 1.0:
            self._future = self._thread.submit(self._make, self.step)
        return made

    def wait(self) -> None:
        """Wait for the thread, as a tokenizer is not thread-safe."""
        wait([self._future] if self._future else [])

    def _make(self, step: int) -> tuple[list[Batch], int]:
        mine = self.my_rows(step)
        batches = [Batch(number, self.read(rows), divisor) for number, rows, divisor in mine]
        return batches, self.budget.take_count()

    def my_rows(self, step: int) -> Iterator[tuple[int, Rows, int]]:
        """(batch number, rows, divisor) of this process in a step."""
        first = step * self.batches_per_step
        numbered = list(enumerate(islice(self._batches, self.batches_per_step), first))
        # Each process has the whole loss of a shared batch.
        mine = numbered if self.is_shared else numbered[self.rank :: self.processes]
        times = self.processes if self.is_shared else 1
        for number, rows in mine:
            yield number, rows, self.batches_per_step * times


def row_batches(groups: Groups, groups_per_batch: int) -> Iterator[list[tuple[int, int]]]:
    """Endless batches of (epoch, row) pairs, epoch after epoch.

    The order depends on the groups only, so skipping the first n batches resumes exactly.

    Args:
        groups: epoch -> groups of row indices, at least one.
        groups_per_batch: number of consecutive groups in a batch.
    """
    endless = ((epoch, group) for epoch in count() for group in groups(epoch))
    while True:
        batch = islice(endless, groups_per_batch)
        yield [(epoch, row) for epoch, group in batch for row in group]


def read_rows(row_of: Callable[[int], Chunk], collate: Collate, batch: Rows) -> Tensors:
    """The tensors that a method's collator makes of a batch."""
    rows: list[Mapping[str, Any]] = []
    for epoch, index in batch:
        c = row_of(index)
        rows.append(dict(document=c.document, text=c.text, query=c.query, row=index, epoch=epoch))
    return collate(rows)


def reads_ahead(data: TrainingSet) -> bool:
    """Whether batches need no model: not the retriever, no LM to write queries, no surrogate."""
    recipe = data.recipe
    made_by = recipe.negatives or recipe.method.model_of_batches(recipe.groups)
    return not made_by and data.generated_queries is None


def sides(tensors: Tensors) -> list[Tensors]:
    """Split tensors named SIDE_NAME by side (query, passage, chunk, ...), in their order."""
    by_side: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        side, _, rest = name.partition("_")
        by_side.setdefault(side, {})[rest] = tensor
    return list(by_side.values())


def make_optimizer(loss_module: nn.Module, settings: Optimizer) -> torch.optim.AdamW:
    """AdamW over the trained parameters, in their order.

    "times" of a parameter group is a factor of its learning rate: 1, or what the method
    ``learning_rate_multipliers`` of a module says.
    """
    times = {
        parameter: factor
        for module in loss_module.modules()
        for parameter, factor in getattr(module, "learning_rate_multipliers", dict)().items()
    }
    trained = [p for p in loss_module.parameters() if p.requires_grad]
    same_rate = groupby(trained, lambda p: times.get(p, 1.0))
    groups: list[dict[str, Any]] = [{"params": [*ps], "times": factor} for factor, ps in same_rate]
    fused = True if trained[0].device.type == "cuda" or len(groups) > 1 else None
    rate, decay = settings.learning_rate, settings.weight_decay
    return torch.optim.AdamW(groups, rate, settings.betas, weight_decay=decay, fused=fused)


def take_step(
    loss_module: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    learning_rate: float,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Update the weights; returns this process's part of the loss, and the norm of the gradient."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["times"]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    device = parameters[0].device
    total = torch.zeros((), device=device)
    for batch in batches:
        # The same in every process.
        torch.manual_seed(random.Random(f"{seed}/{batch.number}").getrandbits(63))
        on_device = {name: sent(tensor, device) for name, tensor in batch.tensors.items()}
        loss = loss_module(sides(on_device)) / batch.divisor
        loss.backward()
        total += loss.detach()
    distributed.add_gradients(parameters)
    grad_norm = torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return total, grad_norm


class Stopwatch:
    """Measures the seconds of each step.

    A GPU runs behind the CPU. So that it never waits, a lap ends when the GPU has computed the
    *previous* step; what is left of the last one counts towards the next lap.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.began = device, time.monotonic()
        self._wait_for_last: Callable[[], None] = lambda: None

    def lap(self) -> float:
        """Wait until the device has computed the previous step; returns the seconds of the lap."""
        self._wait_for_last()
        self._wait_for_last = work_so_far(self.device)
        began, self.began = self.began, time.monotonic()
        return self.began - began

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Exclude the time while open; first waits until the device has computed the last step."""
        self._wait_for_last()
        stopped = time.monotonic()
        yield
        self.began += time.monotonic() - stopped


def agree(budget: Budget, seconds: float, tokens: int, stop: int) -> int:
    """Add a step's cost in all processes to the budget; returns the number of a signal that any
    process received, or 0.
    """
    gathered = distributed.all_gather((seconds, tokens, stop))
    all_seconds, all_tokens, all_stops = zip(*gathered, strict=True)
    budget.seconds += max(all_seconds)
    budget.tokens += sum(all_tokens)
    return int(max(all_stops))


def check_finite(
    step: int, sums: Tensor, grad_norm: Tensor, loss_module: nn.Module
) -> tuple[float, float, Scores]:
    """The loss summed over all processes, the last gradient norm, and what the parts of the loss
    have ``logged``; waits for the device once.

    Args:
        step: steps done.
        sums: this process's losses and gradient norms, each summed since the last logged line.
        grad_norm: gradient norm of the last step.

    Raises:
        RevelaError: a loss or gradient since the last logged line was not finite.
    """
    logged: dict[str, Callable[[], Tensor]] = {}
    for part in loss_module.modules():
        logged |= getattr(part, "logged", {})
    own = (number().to(grad_norm) for number in logged.values())
    summed = distributed.all_reduce_sum(sums[0])
    loss, norms, norm, *numbers = torch.stack([summed, sums[1], grad_norm, *own]).tolist()
    if not all(map(math.isfinite, (loss, norms, norm))):
        raise RevelaError(
            f"the loss or its gradient was not finite at step {step} or shortly before: "
            "give a lower --learning-rate or --precision fp32, and another --out"
        )
    return loss, norm, dict(zip(logged, numbers, strict=True))


class Progress:
    """Shows the progress bar, and writes losses to the metrics, in the first process only."""

    def __init__(self, budget: Budget, metrics: Metrics) -> None:
        self.budget, self.metrics = budget, metrics
        self._bar: Any = None
        self._last = (0.0, 0)  # seconds and tokens at the last line

    @contextmanager
    def bar(self, step: int) -> Iterator[None]:
        """Show the bar, beginning at this step."""
        total = self.budget.max_steps or None
        shape = "{desc} {n_fmt}" + ("/{total_fmt} |{bar}|" if total else "") + "{postfix}"
        self._last = (self.budget.seconds, self.budget.tokens)
        off = not distributed.is_rank_zero()
        with tqdm(None, "step", total, initial=step, bar_format=shape, disable=off) as self._bar:
            yield

    def advance(self) -> None:
        """Count one step."""
        self._bar.update(1)

    def log(self, step: int, loss: float, grad_norm: float, rate: float, own: Scores) -> None:
        """Write and show the mean loss since the last line, and the last step's numbers: norm of
        the gradient, learning rate, the method's ``own``.
        """
        if not distributed.is_rank_zero():
            return
        budget = self.budget
        seconds, tokens = budget.seconds - self._last[0], budget.tokens - self._last[1]
        self._last = (budget.seconds, budget.tokens)
        speed = tokens / seconds if seconds > 0 else 0.0
        row = MetricsRow(
            step,
            round(budget.minutes, 3),
            loss=loss,
            tokens_per_second=round(speed, 1),
            grad_norm=round(grad_norm, 8),
            learning_rate=round(rate, 8),
            method={name: round(value, 6) for name, value in own.items()} or None,
            tokens_read=budget.tokens,
        )
        self.metrics.write(row)
        done = budget.done(step)
        left = budget.minutes * (1 - done) / done if done > 0 else 0.0
        self._bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s, {duration(left)} left")


@contextmanager
def handled(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle Ctrl-C and SIGTERM while open; does nothing outside of the main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Stop:
    """Handles Ctrl-C and SIGTERM: the first requests a stop after the step, the second stops at
    once.

    Attributes:
        requested: the number of the first signal; 0: none.
    """

    requested = 0

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = number
        tqdm.write("stopping after this step and saving; press Ctrl-C again to stop at once")
