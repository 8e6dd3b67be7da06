"""The budget of a run, and its reports: metrics.jsonl, a progress bar, a tracker."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from revela.errors import RevelaError
from revela.files import atomic_write, disk_errors
from revela.terminal import duration
from revela.training.device import compute_device
from revela.training.distributed import is_rank_zero

if TYPE_CHECKING:
    from accelerate import Accelerator

TRACKER_FOLDER = "tracker"

Scores = dict[str, float]
"""Task -> nDCG@10."""


class Budget:
    """Seconds trained (without checks and saves) and tokens read, over all processes and all parts
    of a resumed run.

    Args:
        max_steps, max_minutes, max_million_tokens: limits of the run. 0: no limit.
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

    def take_count(self) -> int:
        """Tokens counted since the last call."""
        tokens, self._counted = self._counted, 0
        return tokens

    def spend(self, seconds: Sequence[float], tokens: Sequence[int]) -> None:
        """Add a step, given the seconds and tokens of each process."""
        self.seconds += max(seconds)
        self.tokens += sum(tokens)

    @property
    def minutes(self) -> float:
        return self.seconds / 60

    def done(self, step: int) -> float:
        """Fraction of the run that is done; 1 when a limit is reached."""
        by_step = step / self.max_steps if self.max_steps else 0.0
        by_time = self.seconds / self.max_seconds if self.max_seconds else 0.0
        by_tokens = self.tokens / self.max_tokens if self.max_tokens else 0.0
        return min(1.0, max(by_step, by_time, by_tokens))

    def learning_rate_factor(self, step: int, warmup_steps: int) -> float:
        """Factor of linear warm-up over steps times linear decay to 0 over the run."""
        return min(1.0, (step + 1) / max(1, warmup_steps)) * (1.0 - self.done(step))


class Metrics:
    """metrics.jsonl: one JSON object per line, in order of step.

    Args:
        path: the file.
        keep_until: the checkpoint's step in a resumed run; later lines and an incomplete last line
            are dropped. None: keep the file as it is.
        tracker: every line is also sent to it.

    Raises:
        RevelaError: a line cannot be read.
    """

    def __init__(
        self, path: Path, keep_until: int | None = None, tracker: Accelerator | None = None
    ) -> None:
        self.path, self.tracker = path, tracker
        self.rows: list[dict[str, Any]] = []
        if keep_until is not None and path.exists():
            self.rows = list(_read_rows(path, keep_until))
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
        """Finish the tracker."""
        for tracker in self.tracker.trackers if self.tracker else ():
            tracker.finish()

    def checks(self) -> list[tuple[int, Scores]]:
        """(step, scores by task) of every check."""
        return [(row["step"], row["check"]) for row in self.rows if "check" in row]


def _read_rows(path: Path, keep_until: int) -> Iterator[dict[str, Any]]:
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
    """Numbers by a tracker's names: "loss", "check/TASK"."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from ((f"{name}/{inside}", number) for inside, number in value.items())
        else:
            yield name, value


def start_tracker(track: str, settings: Mapping[str, Any], out: Path) -> Accelerator | None:
    """Start a tracker through accelerate; None if ``track`` is empty, or in other ranks."""
    if not (track and is_rank_zero()):
        return None
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    folders = ProjectConfiguration(project_dir=str(out), logging_dir=str(out / TRACKER_FOLDER))
    on_cpu = compute_device().type == "cpu"
    tracker = Accelerator(cpu=on_cpu, log_with=track, project_config=folders)
    plain = (str, int, float, bool)
    config = {k: v if isinstance(v, plain) else str(v) for k, v in settings.items()}
    names = {"wandb": {"name": out.name}, "trackio": {"name": out.name}}
    tracker.init_trackers("revela", config, names)
    return tracker


class Progress:
    """Shows the progress bar, and writes losses to metrics.jsonl, in the first process only."""

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
        options: Any = dict(total=total, initial=step, desc="step", bar_format=shape)
        with tqdm(**options, disable=not is_rank_zero()) as self._bar:
            yield

    def advance(self) -> None:
        """Count one step."""
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
