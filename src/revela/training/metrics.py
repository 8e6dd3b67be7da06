"""What a run measures and reports: its budget, metrics.jsonl, a progress bar, a tracker."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from revela.device import compute_device
from revela.distributed import is_rank_zero
from revela.errors import RevelaError
from revela.files import atomic_write, disk_errors
from revela.settings import Recipe
from revela.silence import duration
from revela.types import Encoder

if TYPE_CHECKING:
    from accelerate import Accelerator

TRACKER_FOLDER = "tracker"

Scores = dict[str, float]
Check = Callable[[Encoder], Scores]


class Budget:
    """Training time in seconds (without checks and saves) and tokens read, of all processes and
    kept over a resume; and how much of the run is done.

    Args:
        max_steps, max_minutes, max_million_tokens: limits of the run; 0: no such limit.
    """

    def __init__(
        self, max_steps: int, max_minutes: float = 0.0, max_million_tokens: float = 0.0
    ) -> None:
        self.max_steps, self.max_seconds = max_steps, 60 * max_minutes
        self.max_tokens = 1e6 * max_million_tokens
        self.seconds, self.tokens, self._counted = 0.0, 0, 0

    def count(self, tokens: int) -> None:
        """Count tokens that the retriever reads."""
        self._counted += tokens

    def counted(self) -> int:
        """What was counted since this was asked last."""
        tokens, self._counted = self._counted, 0
        return tokens

    def spend(self, seconds: Sequence[float], tokens: Sequence[int]) -> None:
        """Add a step, which each process has measured for itself."""
        self.seconds += max(seconds)
        self.tokens += sum(tokens)

    @property
    def minutes(self) -> float:
        return self.seconds / 60

    def done(self, step: int) -> float:
        """0 at the start, 1 when the nearest of the limits is reached."""
        by_step = step / self.max_steps if self.max_steps else 0.0
        by_time = self.seconds / self.max_seconds if self.max_seconds else 0.0
        by_tokens = self.tokens / self.max_tokens if self.max_tokens else 0.0
        return min(1.0, max(by_step, by_time, by_tokens))

    def learning_rate_factor(self, step: int, warmup_steps: int) -> float:
        """Linear warm-up by step, linear decay to zero over the run."""
        return min(1.0, (step + 1) / max(1, warmup_steps)) * (1.0 - self.done(step))


class Metrics:
    """metrics.jsonl: one JSON object per line, in order of step.

    Args:
        path: the file.
        keep_until: for a resumed run, the step of its checkpoint; later lines, and a line that was
            cut short, are dropped. None: a new file.
        tracker: also gets the numbers of each line by name, and its step.

    Raises:
        RevelaError: a line cannot be read.
    """

    def __init__(
        self, path: Path, keep_until: int | None = None, tracker: Accelerator | None = None
    ) -> None:
        self.path, self.tracker = path, tracker
        self.rows: list[dict[str, Any]] = []
        if keep_until is not None and path.exists():
            self.rows = list(_rows(path, keep_until))
            with atomic_write(path) as temporary:
                temporary.write_text("".join(json.dumps(row) + "\n" for row in self.rows))

    def write(self, step: int, **values: Any) -> None:
        """Append a line."""
        row = {"step": step, **values}
        self.rows.append(row)
        with disk_errors(self.path), self.path.open("a") as handle:
            handle.write(json.dumps(row) + "\n")
        if self.tracker is not None:
            self.tracker.log(dict(_named_numbers(values)), step)

    def close(self) -> None:
        """Tell the tracker that the run is over."""
        for tracker in self.tracker.trackers if self.tracker else ():
            tracker.finish()

    def checks(self) -> list[tuple[int, Scores]]:
        """(step, scores by task) of every check."""
        return [(row["step"], row["check"]) for row in self.rows if "check" in row]


def _rows(path: Path, keep_until: int) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            row = json.loads(line)
            if row["step"] <= keep_until:
                yield row
        except (ValueError, KeyError, TypeError) as error:
            raise RevelaError(
                f"{path}:{number} is no line of a run's metrics: remove that line"
            ) from error


def _named_numbers(values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """A tracker's names: "loss", "check/TASK"."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from ((f"{name}/{inside}", number) for inside, number in value.items())
        else:
            yield name, value


def start_tracker(recipe: Recipe, out: Path) -> Accelerator | None:
    """accelerate with the recipe's tracker, for which alone it is used."""
    if not (recipe.training.track and is_rank_zero()):
        return None
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    folders = ProjectConfiguration(project_dir=str(out), logging_dir=str(out / TRACKER_FOLDER))
    on_cpu = compute_device().type == "cpu"
    tracker = Accelerator(cpu=on_cpu, log_with=recipe.training.track, project_config=folders)
    plain = (str, int, float, bool)
    settings = recipe.to_dict().items()
    config = {k: v if isinstance(v, plain) else str(v) for k, v in settings}
    names = {"wandb": {"name": out.name}, "trackio": {"name": out.name}}
    tracker.init_trackers("revela", config, names)
    return tracker


class Progress:
    """The progress bar, and the line of metrics.jsonl of every few steps; in the first process."""

    def __init__(self, budget: Budget, metrics: Metrics) -> None:
        self.budget, self.metrics = budget, metrics
        self._bar: Any = None
        self._last = (0.0, 0)  # seconds and tokens at the last line

    @contextmanager
    def bar(self, step: int) -> Iterator[None]:
        """While open, a bar is shown that begins at this step."""
        total = self.budget.max_steps or None
        shape = "{desc} {n_fmt}" + ("/{total_fmt} |{bar}|" if total else "") + "{postfix}"
        self._last = (self.budget.seconds, self.budget.tokens)
        given: Any = dict(total=total, initial=step, desc="step", bar_format=shape)
        with tqdm(**given, disable=not is_rank_zero()) as self._bar:
            yield

    def advance(self) -> None:
        """One more step is done."""
        self._bar.update(1)

    def log(self, step: int, loss: float, grad_norm: float, learning_rate: float) -> None:
        """Write and show the mean loss since the last line, and the last step's numbers."""
        if not is_rank_zero():
            return
        budget = self.budget
        seconds, tokens = budget.seconds - self._last[0], budget.tokens - self._last[1]
        self._last = (budget.seconds, budget.tokens)
        rate = tokens / seconds if seconds > 0 else 0.0
        self.metrics.write(
            step=step,
            minutes=round(budget.minutes, 3),
            loss=loss,
            tokens_per_second=round(rate, 1),
            grad_norm=round(grad_norm, 8),
            learning_rate=round(learning_rate, 8),
        )
        done = budget.done(step)
        left = budget.minutes * (1 - done) / done if done > 0 else 0.0
        self._bar.set_postfix_str(f"loss {loss:.3f}, {rate:,.0f} tokens/s, {duration(left)} left")


@dataclass(frozen=True)
class Checks:
    """The label-free checks of a run: their time is not in its budget.

    Args:
        encoder: the retriever as it is at a check.
        check: gives scores by task.
        judge: gives scores that are recorded with every check and decide nothing.
        bm25: BM25's scores on the same tasks, to be shown beside.
        budget, metrics: of the run.
        offer: called with the step and the scores of every check.
    """

    encoder: Encoder
    check: Check
    judge: Check | None
    bm25: Scores
    budget: Budget
    metrics: Metrics
    offer: Callable[[int, Scores], None] | None

    def run(self, step: int) -> Scores:
        """Check, record the scores and show them."""
        scores = self.check(self.encoder)
        judged = {"judged": self.judge(self.encoder)} if self.judge is not None else {}
        minutes, tokens = round(self.budget.minutes, 3), self.budget.tokens
        self.metrics.write(step, minutes=minutes, tokens_read=tokens, check=scores, **judged)
        tqdm.write(f"step {step}: {describe(scores, self.bm25)}")
        if self.offer is not None:
            self.offer(step, scores)
        return scores


def describe(scores: Scores, bm25: Scores) -> str:
    """Scores in one line, each with BM25's where there is one."""
    beside = {task: f" (BM25 {score:.3f})" for task, score in bm25.items()}
    return ", ".join(f"{task} {v:.3f}{beside.get(task, '')}" for task, v in scores.items())
