"""What a person sees of a run: the clock, a progress bar, metrics.jsonl, training.png, and the
label-free check.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from revela.files import atomic_write


class Clock:
    """Training time in seconds (checks and saves left out) and tokens read, carried over a resume;
    and how much of the run is done.

    ``cpu`` counts this process's processor time instead, of all threads together.
    """

    def __init__(
        self, max_steps: int, max_minutes: float, max_million_tokens: float = 0.0, cpu: bool = False
    ) -> None:
        self.now = time.process_time if cpu else time.monotonic
        self.max_steps, self.max_seconds, self.max_tokens = (
            max_steps,
            60 * max_minutes,
            1e6 * max_million_tokens,
        )
        self.seconds, self.tokens = 0.0, 0
        self._since: float | None = None

    def start(self) -> None:
        self._since = self.now()

    def stop(self) -> None:
        if self._since is not None:
            self.seconds += self.now() - self._since
            self._since = None

    def lap(self) -> None:
        self.stop()
        self.start()

    def progress(self, step: int) -> float:
        """0 at the start, 1 when the nearest of the limits is reached."""
        shares = (
            (step, self.max_steps),
            (self.seconds, self.max_seconds),
            (self.tokens, self.max_tokens),
        )
        return min(1.0, max(done / limit if limit else 0.0 for done, limit in shares))

    def learning_rate_factor(self, step: int, warmup_steps: int) -> float:
        """Linear warm-up by step, linear decay to zero over the run."""
        return min(1.0, (step + 1) / max(1, warmup_steps)) * (1.0 - self.progress(step))


class Metrics:
    """metrics.jsonl: one JSON object a line, in order of step. A resumed run drops what came after
    its checkpoint, and a line cut short.
    """

    def __init__(self, path: Path, keep_until: int | None = None) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        if keep_until is not None and path.exists():
            written = path.read_text()
            rows = [json.loads(line) for line in written[: written.rfind("\n") + 1].splitlines()]
            self.rows = [row for row in rows if row["step"] <= keep_until]
            with atomic_write(path) as temporary:
                temporary.write_text("".join(json.dumps(row) + "\n" for row in self.rows))

    def write(self, **row: Any) -> None:
        self.rows.append(row)
        with self.path.open("a") as handle:
            handle.write(json.dumps(row) + "\n")


class Watch(TrainerCallback):
    """Times, shows, checks, stops and saves on Ctrl-C.

    Args:
        check: gives scores by task for the model as it stands; called every ``check_every``
            updates, or ``checks`` times over the run.
        describe: scores as a person reads them.
        judge: scores that are written down with every check, and decide nothing.

    ``offer`` is told the step and the scores of every check.
    """

    def __init__(
        self,
        clock: Clock,
        metrics: Metrics,
        *,
        check: Callable[[], dict[str, float]] | None,
        check_every: int,
        describe: Callable[[dict[str, float]], str],
        checks: int = 0,
        judge: Callable[[], dict[str, float]] | None = None,
    ) -> None:
        self.clock, self.metrics, self.check, self.describe, self.judge = (
            clock,
            metrics,
            check,
            describe,
            judge,
        )
        self.check_every, self.checks = check_every, checks
        self.offer: Callable[[int, dict[str, float]], None] | None = None
        self.interrupted = False
        self._checked = 0  # of ``checks``
        self._bar: Any = None
        self._previous: Any = None
        self._last = (0.0, 0)  # seconds and tokens at the last log
        self._logged = -1

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._previous = signal.signal(signal.SIGINT, self._interrupt)
        total = self.clock.max_steps or None
        shape = "{desc} {n_fmt}" + ("/{total_fmt} |{bar}|" if total else "") + "{postfix}"
        self._bar = tqdm(total=total, initial=state.global_step, desc="step", bar_format=shape)
        self._last = (self.clock.seconds, self.clock.tokens)
        self._checked = int(self.clock.progress(state.global_step) * self.checks)
        self.clock.start()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.clock.lap()
        self._bar.update(1)
        done = self.clock.progress(state.global_step) >= 1.0
        if self.check is not None and not done and self._is_due(state.global_step):
            self.clock.stop()
            self.record_check(state.global_step)
            self.clock.start()
        if done or self.interrupted:
            control.should_training_stop = True
            control.should_save = True

    def _is_due(self, step: int) -> bool:
        if self.checks:
            return int(self.clock.progress(step) * self.checks) > self._checked
        return bool(self.check_every) and step % self.check_every == 0

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Any = None,
        **kwargs: Any,
    ) -> None:
        if (
            not logs or "loss" not in logs or state.global_step == self._logged
        ):  # the last step comes twice
            return
        seconds, tokens = self.clock.seconds - self._last[0], self.clock.tokens - self._last[1]
        self._last, self._logged = (self.clock.seconds, self.clock.tokens), state.global_step
        rate = tokens / seconds if seconds > 0 else 0.0
        extra = {k: round(float(logs[k]), 8) for k in ("grad_norm", "learning_rate") if k in logs}
        self.metrics.write(
            step=state.global_step,
            minutes=round(self.clock.seconds / 60, 3),
            loss=logs["loss"],
            tokens_per_second=round(rate, 1),
            **extra,
        )
        progress = self.clock.progress(state.global_step)
        left = self.clock.seconds * (1 - progress) / progress / 60 if progress > 0 else 0.0
        self._bar.set_postfix_str(
            f"loss {logs['loss']:.3f}, {rate:,.0f} tokens/s, {left:.1f} min left"
        )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.clock.stop()
        self._bar.close()
        signal.signal(signal.SIGINT, self._previous)

    def count(self, tokens: int) -> None:
        """These tokens were read; for the rate that is shown."""
        self.clock.tokens += tokens

    def record_check(self, step: int) -> dict[str, float]:
        """Run the check, print it and write it down."""
        assert self.check is not None
        scores = self.check()
        judged = {"judged": self.judge()} if self.judge is not None else {}
        self._checked = int(self.clock.progress(step) * self.checks)
        self.metrics.write(
            step=step,
            minutes=round(self.clock.seconds / 60, 3),
            tokens_read=self.clock.tokens,
            check=scores,
            **judged,
        )
        tqdm.write(f"step {step}: {self.describe(scores)}")
        if self.offer is not None:
            self.offer(step, scores)
        return scores

    def _interrupt(self, *_args: Any) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True
        tqdm.write("stopping after this step and saving; press Ctrl-C again to stop at once")


def plot(metrics: Metrics, bm25: dict[str, float], path: Path, loss: str) -> None:
    """training.png: the loss, under this name, and each check with BM25 as a dashed line, over
    minutes of training.
    """
    from matplotlib.figure import Figure

    losses = [(r["minutes"], r["loss"]) for r in metrics.rows if "loss" in r]
    checks = [(r["minutes"], r["check"]) for r in metrics.rows if "check" in r]
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot([m for m, _ in losses], [v for _, v in losses], color="0.7", label="logged")
    if len(losses) >= 10:
        width = max(3, len(losses) // 10)
        smooth = [
            fmean(v for _, v in losses[max(0, i - width) : i + 1]) for i in range(len(losses))
        ]
        left.plot([m for m, _ in losses], smooth, color="C0", label=f"mean of {width}")
    left.set(xlabel="minutes of training", ylabel=loss, title="loss")
    left.legend(frameon=False)
    for i, name in enumerate(sorted({n for _, c in checks for n in c})):
        right.plot(
            [m for m, c in checks],
            [c[name] for _, c in checks],
            marker="o",
            color=f"C{i}",
            label=name,
        )
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
