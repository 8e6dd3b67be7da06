"""Label-free checks during a run, and the best state by their scores."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from safetensors.torch import save_file
from torch import nn
from tqdm.auto import tqdm

from revela.encoders.base import TextEncoder
from revela.files import atomic_write
from revela.training.checkpoint import load_trainable, trainable_state
from revela.training.record import NOISE, Metrics, MetricsRow, Scores
from revela.training.retriever.module import RetrieverEncoder
from revela.training.step import Budget

log = logging.getLogger(__name__)

Check = Callable[[TextEncoder], Scores]
"""Encoder -> scores by task."""
Judge = Callable[[RetrieverEncoder, int], Scores]
"""Encoder, steps done -> scores by collection."""


@dataclass(frozen=True)
class CheckPlan:
    """The checks of a run.

    Attributes:
        check: the label-free check. None: no check.
        bm25: BM25's scores on the same tasks, for comparison.
        judge: a second evaluation, recorded at every check; it does not select a state.
        points: check after each of this many equal parts of the run. 0: by ``check_every``.
    """

    check: Check | None = None
    bm25: Scores = field(default_factory=dict)
    judge: Judge | None = None
    points: int = 0


NO_CHECKS = CheckPlan()


@dataclass(frozen=True)
class Checks:
    """Runs the checks of a plan; their time does not count towards the budget.

    Args:
        plan: a plan with a check or a judge.
        check_every: steps between checks without the plan's ``points``. 0: none.
        encoder: the retriever in training.
        budget, metrics: those of the run.
        best: keeps the best state; None: none is kept.
    """

    plan: CheckPlan
    check_every: int
    encoder: RetrieverEncoder
    budget: Budget
    metrics: Metrics
    best: BestState | None

    def is_due(self, step: int, before: float) -> bool:
        """Whether to check after a step; ``before`` is the fraction of the run done before it."""
        if points := self.plan.points:
            return int(self.budget.done(step) * points) > int(before * points)
        return bool(self.check_every) and step % self.check_every == 0

    def run(self, step: int) -> Scores:
        """Check, record and print the scores, and keep the state if it is the best."""
        plan = self.plan
        scores = plan.check(self.encoder) if plan.check else {}
        judged = plan.judge(self.encoder, step) if plan.judge else None
        minutes, tokens = round(self.budget.minutes, 3), self.budget.tokens
        row = MetricsRow(step, minutes, tokens_read=tokens, check=scores or None, judged=judged)
        self.metrics.write(row)
        tqdm.write(f"step {step}: {format_scores({**scores, **(judged or {})}, plan.bm25)}")
        if self.best is not None:
            self.best.offer(step, scores)
        return scores


def format_scores(scores: Scores, bm25: Scores) -> str:
    """Scores in one line, each followed by BM25's score if known."""
    known = {task: f" (BM25 {score:.3f})" for task, score in bm25.items()}
    return ", ".join(f"{task} {v:.3f}{known.get(task, '')}" for task, v in scores.items())


class BestState:
    """Keeps the trainable state with the best mean score, so that a run ends no worse than it
    began.

    A later state must be better by more than ``NOISE``, as the maximum of many noisy checks is
    luck. Every state that was the best at its time stays in ``folder`` until the run ends: a killed
    run may resume from before the latest one. The best one stays after the run, for its extension.

    Args:
        module: the module with the trainable tensors.
        folder: the folder of the run's checkpoints.
        scored: (step, scores by task) of earlier checks of a resumed run.
    """

    def __init__(
        self, module: nn.Module, folder: Path, scored: Iterable[tuple[int, Scores]] = ()
    ) -> None:
        self.module, self.folder = module, folder
        self.step, self.scores = -1, dict[str, float]()
        for step, scores in scored:
            if self._file(step).is_file() and self._is_better(scores):
                self.step, self.scores = step, scores

    def offer(self, step: int, scores: Scores) -> None:
        """Keep the module's state if its scores are the best so far."""
        if not self._is_better(scores):
            return
        with atomic_write(self._file(step)) as temporary:
            save_file(trainable_state(self.module), temporary)
        self.step, self.scores = step, scores

    def restore(self) -> tuple[int, Scores]:
        """Load the best state into the module; returns its step and scores."""
        load_trainable(self.module, self._file(self.step))
        log.info(f"the state after {self.step} steps had the best label-free check: it is saved")
        return self.step, self.scores

    def remove_others(self) -> None:
        """Remove the states that were the best before."""
        for file in set(self.folder.glob("best-*.safetensors")) - {self._file(self.step)}:
            file.unlink()

    def _is_better(self, scores: Scores) -> bool:
        return self.step < 0 or fmean(scores.values()) > fmean(self.scores.values()) + NOISE

    def _file(self, step: int) -> Path:
        return self.folder / f"best-{step}.safetensors"
