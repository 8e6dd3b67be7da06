"""What a run reports: the clock, metrics.jsonl, a progress bar, the label-free checks, and
training.png.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm.auto import tqdm

from revela.errors import RevelaError
from revela.files import atomic_write, disk_errors
from revela.processes import is_first
from revela.silence import duration

log = logging.getLogger(__name__)

Scores = dict[str, float]


class Clock:
    """Training time in seconds (without checks and saves) and tokens read, of all processes and
    kept over a resume; and how much of the run is done.

    Args:
        max_steps, max_minutes, max_million_tokens: limits of the run; 0: no such limit.
        cpu: count processor time, of all threads and processes together, in place of wall time.
    """

    def __init__(
        self, max_steps: int, max_minutes: float, max_million_tokens: float = 0.0, cpu: bool = False
    ) -> None:
        self.now, self.cpu = time.process_time if cpu else time.monotonic, cpu
        self.max_steps, self.max_seconds = max_steps, 60 * max_minutes
        self.max_tokens = 1e6 * max_million_tokens
        self.seconds, self.tokens = 0.0, 0
        self._since, self._counted = 0.0, 0

    def start(self) -> None:
        """Begin a step."""
        self._since = self.now()

    def stop(self) -> float:
        """End a step: its seconds in this process."""
        return self.now() - self._since

    def count(self, tokens: int) -> None:
        """Count tokens that the retriever reads."""
        self._counted += tokens

    def counted(self) -> int:
        """What was counted since this was asked last."""
        tokens, self._counted = self._counted, 0
        return tokens

    def add(self, seconds: Sequence[float], tokens: Sequence[int]) -> None:
        """Add a step, which each process has measured for itself."""
        self.seconds += sum(seconds) if self.cpu else max(seconds)
        self.tokens += sum(tokens)

    @property
    def minutes(self) -> float:
        return self.seconds / 60

    def progress(self, step: int) -> float:
        """0 at the start, 1 when the nearest of the limits is reached."""
        by_step = step / self.max_steps if self.max_steps else 0.0
        by_time = self.seconds / self.max_seconds if self.max_seconds else 0.0
        by_tokens = self.tokens / self.max_tokens if self.max_tokens else 0.0
        return min(1.0, max(by_step, by_time, by_tokens))

    def learning_rate_factor(self, step: int, warmup_steps: int) -> float:
        """Linear warm-up by step, linear decay to zero over the run."""
        return min(1.0, (step + 1) / max(1, warmup_steps)) * (1.0 - self.progress(step))


class Metrics:
    """metrics.jsonl: one JSON object per line, in order of step.

    Args:
        path: the file.
        keep_until: for a resumed run, the step of its checkpoint; later lines, and a line that was
            cut short, are dropped. None: a new file.
        track: also gets the numbers of each line by name, and its step.

    Raises:
        RevelaError: a line cannot be read.
    """

    def __init__(
        self,
        path: Path,
        keep_until: int | None = None,
        track: Callable[[dict[str, float], int], None] | None = None,
    ) -> None:
        self.path, self.track = path, track
        self.rows: list[dict[str, Any]] = []
        if keep_until is not None and path.exists():
            lines = path.read_bytes().split(b"\n")[:-1]
            for number, line in enumerate(lines, 1):
                try:
                    row = json.loads(line)
                    if row["step"] <= keep_until:
                        self.rows.append(row)
                except (ValueError, KeyError, TypeError) as error:
                    raise RevelaError(
                        f"{path}:{number} is no line of a run's metrics: remove that line"
                    ) from error
            with atomic_write(path) as temporary:
                temporary.write_text("".join(json.dumps(row) + "\n" for row in self.rows))

    def write(self, step: int, **values: Any) -> None:
        """Append a line."""
        row = {"step": step, **values}
        self.rows.append(row)
        with disk_errors(self.path), self.path.open("a") as handle:
            handle.write(json.dumps(row) + "\n")
        if self.track is not None:
            scores = {
                f"{k}/{name}": v
                for k, v in values.items()
                if isinstance(v, dict)
                for name, v in v.items()
            }
            self.track({k: v for k, v in values.items() if not isinstance(v, dict)} | scores, step)

    def checks(self) -> list[tuple[int, Scores]]:
        """(step, scores by task) of every check."""
        return [(row["step"], row["check"]) for row in self.rows if "check" in row]


class Progress:
    """The progress bar, and the line of metrics.jsonl of every few steps."""

    def __init__(self, clock: Clock, metrics: Metrics) -> None:
        self.clock, self.metrics = clock, metrics
        self._bar: Any = None
        self._last = (0.0, 0)  # seconds and tokens at the last line

    @contextmanager
    def bar(self, step: int) -> Iterator[None]:
        """While open, a bar is shown that begins at this step."""
        total = self.clock.max_steps or None
        shape = "{desc} {n_fmt}" + ("/{total_fmt} |{bar}|" if total else "") + "{postfix}"
        self._last = (self.clock.seconds, self.clock.tokens)
        quiet = not is_first()
        given: Any = dict(total=total, initial=step, desc="step", bar_format=shape, disable=quiet)
        with tqdm(**given) as self._bar:
            yield

    def advance(self) -> None:
        """One more step is done."""
        self._bar.update(1)

    def log(self, step: int, loss: float, grad_norm: float, learning_rate: float) -> None:
        """Write and show the mean loss since the last line, and the last step's numbers, in the
        first process.
        """
        if not is_first():
            return
        clock = self.clock
        seconds, tokens = clock.seconds - self._last[0], clock.tokens - self._last[1]
        self._last = (clock.seconds, clock.tokens)
        rate = tokens / seconds if seconds > 0 else 0.0
        self.metrics.write(
            step=step,
            minutes=round(clock.minutes, 3),
            loss=loss,
            tokens_per_second=round(rate, 1),
            grad_norm=round(grad_norm, 8),
            learning_rate=round(learning_rate, 8),
        )
        done = clock.progress(step)
        left = clock.minutes * (1 - done) / done if done > 0 else 0.0
        self._bar.set_postfix_str(f"loss {loss:.3f}, {rate:,.0f} tokens/s, {duration(left)} left")


class Checks:
    """The label-free checks of a run.

    Args:
        clock, metrics: of the run; the clock does not run during a check.
        check: gives scores by task for the model as it stands.
        every: steps between two checks; 0: none.
        parts: if above 0, check after each of so many equal parts of the run instead.
        bm25: BM25's scores on the same tasks, to be shown beside.
        judge: gives scores that are recorded with every check and decide nothing.
        offer: called with the step and the scores of every check.
    """

    def __init__(
        self,
        clock: Clock,
        metrics: Metrics,
        check: Callable[[], Scores],
        *,
        every: int,
        parts: int,
        bm25: Scores,
        judge: Callable[[], Scores] | None,
        offer: Callable[[int, Scores], None] | None,
    ) -> None:
        self.clock, self.metrics, self.check = clock, metrics, check
        self.every, self.parts, self.bm25 = every, parts, bm25
        self.judge, self.offer = judge, offer
        self._part = 0  # the last that was checked

    def begin(self, step: int) -> None:
        """Count the parts of the run that a resumed one has behind it."""
        self._part = self._parts_done(step)

    def is_due(self, step: int) -> bool:
        """Whether to check after this step."""
        if self.parts:
            return self._parts_done(step) > self._part
        return bool(self.every) and step % self.every == 0

    def run(self, step: int) -> Scores:
        """Check, record the scores and show them."""
        scores = self.check()
        judged = {"judged": self.judge()} if self.judge is not None else {}
        self._part = self._parts_done(step)
        minutes, tokens = round(self.clock.minutes, 3), self.clock.tokens
        self.metrics.write(step, minutes=minutes, tokens_read=tokens, check=scores, **judged)
        tqdm.write(f"step {step}: {describe(scores, self.bm25)}")
        if self.offer is not None:
            self.offer(step, scores)
        return scores

    def _parts_done(self, step: int) -> int:
        return int(self.clock.progress(step) * self.parts)


def describe(scores: Scores, bm25: Scores) -> str:
    """Scores in one line, each with BM25's where there is one."""
    beside = {task: f" (BM25 {score:.3f})" for task, score in bm25.items()}
    return ", ".join(f"{task} {v:.3f}{beside.get(task, '')}" for task, v in scores.items())


def plot(metrics: Metrics, bm25: dict[str, float], path: Path, loss: str) -> None:
    """Draw training.png: the loss and the checks over minutes of training, BM25 dashed.

    Args:
        metrics: of the run.
        bm25: scores of the check's tasks.
        path: of the PNG.
        loss: label of the loss axis.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        log.info(f"{path.name} is not drawn without matplotlib: run pip install 'revela[report]'")
        return

    losses = [(r["minutes"], r["loss"]) for r in metrics.rows if "loss" in r]
    checks = [(r["minutes"], r["check"]) for r in metrics.rows if "check" in r]
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    minutes = [m for m, _ in losses]
    left.plot(minutes, [v for _, v in losses], color="0.7", label="logged")
    if len(losses) >= 10:
        width = max(3, len(losses) // 10)
        windows = (losses[max(0, i - width) : i + 1] for i in range(len(losses)))
        smooth = [fmean(v for _, v in window) for window in windows]
        left.plot(minutes, smooth, color="C0", label=f"mean of {width}")
    left.set(xlabel="minutes of training", ylabel=loss, title="loss")
    left.legend(frameon=False)
    minutes = [m for m, _ in checks]
    for i, name in enumerate(sorted({n for _, c in checks for n in c})):
        right.plot(minutes, [c[name] for _, c in checks], marker="o", color=f"C{i}", label=name)
        if name in bm25:
            right.axhline(bm25[name], linestyle="--", color=f"C{i}", label=f"{name}, BM25")
    right.set(
        xlabel="minutes of training",
        ylabel="nDCG@10 on held-out documents",
        title="label-free check",
        ylim=(0, 1),
    )
    if checks:
        right.legend(frameon=False)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=110)
