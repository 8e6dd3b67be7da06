"""Sentence Transformers' trainer with groups as batches, checkpoints of what training changes, and
saves that cannot be half done.

A checkpoint holds every trainable tensor of retriever and objective (LoRA of both models, gates,
temperature) as safetensors, the clock, and the trainer's own optimiser, scheduler and RNG files. It
is written under a temporary name and renamed when whole; the one before it is deleted only then.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from itertools import count, islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformerTrainer
from torch import Tensor, nn
from torch.utils.data import BatchSampler

from revela.errors import RevelaError
from revela.files import atomic_write
from revela.groups.documents import Groups
from revela.training.progress import Clock

if TYPE_CHECKING:
    pass

TRAINABLE, CLOCK = "trainable.safetensors", "clock.json"
MARGIN = 0.005  # nDCG@10: what checks of equally good states differ by (docs/log.md)


class GroupSampler(BatchSampler):
    """Endless groups, epoch after epoch; the same order for the same seed, so that skipping n
    batches resumes exactly.

    Args:
        groups: epoch -> that epoch's groups of row indices.
        total: groups in all, for whoever asks how long this is.
        together: groups a batch, one after another.
    """

    def __init__(self, groups: Groups, total: int, together: int = 1) -> None:
        self.groups, self.total, self.together = groups, total, together

    def __iter__(self) -> Iterator[list[int]]:
        endless = (group for epoch in count() for group in self.groups(epoch))
        for _ in range(len(self)):
            yield [row for group in islice(endless, self.together) for row in group]

    def __len__(self) -> int:
        return self.total // self.together


class GroupTrainer(SentenceTransformerTrainer):
    """The trainer; see the module docstring."""

    def __init__(
        self, *, clock: Clock, checkpoints: Path, sampler: GroupSampler, **kwargs: Any
    ) -> None:
        self.clock, self.checkpoints, self._sampler, self._staging = clock, checkpoints, sampler, ""
        super().__init__(**kwargs)

    def get_batch_sampler(self, dataset: Dataset, *_args: Any, **_kwargs: Any) -> BatchSampler:
        return self._sampler

    def add_model_card_callback(self, default_args_dict: dict[str, Any]) -> None:
        """The card is written once, by revela.retriever.save."""

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Clip by the joint norm of all that is trained: gates, temperature and the LM's LoRA are
        the objective's, not the model's.
        """
        return super()._clip_grad_norm(self.loss)

    def _get_output_dir(self, trial: Any) -> str:
        return self._staging or super()._get_output_dir(trial)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        target = self.checkpoints / f"checkpoint-{self.state.global_step}"
        try:
            with atomic_write(target) as temporary:
                self._staging = str(
                    temporary.parent
                )  # where transformers makes a folder of the same name
                super()._save_checkpoint(model, trial)
                shutil.rmtree(target, ignore_errors=True)
        finally:
            self._staging = ""
        for old in saved_checkpoints(self.checkpoints)[:-1]:
            shutil.rmtree(old)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(trainable_state(self.loss), folder / TRAINABLE)
        (folder / CLOCK).write_text(
            json.dumps({"seconds": self.clock.seconds, "tokens": self.clock.tokens})
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        load_trainable(self.loss, folder / TRAINABLE)
        saved = json.loads((folder / CLOCK).read_text())
        self.clock.seconds, self.clock.tokens = saved["seconds"], saved["tokens"]


class Best:
    """The state that the label-free check likes best (by the mean of its scores), so that a run
    ends no worse than it began.

    A later state has to win by more than ``MARGIN``: the best of many checks that differ by chance
    alone is the luckiest, not the best.

    Each state that beats all before it stays in ``folder`` until the run ends: a run that is killed
    may resume from before the last.

    Args:
        module: whose trainable tensors are kept.
        folder: where.
        scored: (step, scores by task) of the checks of a run that is resumed.
    """

    def __init__(
        self, module: nn.Module, folder: Path, scored: Iterable[tuple[int, dict[str, float]]] = ()
    ) -> None:
        self.module, self.folder = module, folder
        self.step, self.scores = -1, dict[str, float]()
        for step, scores in scored:
            if self._beats(scores):
                self.step, self.scores = step, scores

    def offer(self, step: int, scores: dict[str, float]) -> None:
        """Keep the module's state if these scores are the best so far."""
        if not self._beats(scores):
            return
        with atomic_write(self._file(step)) as temporary:
            save_file(trainable_state(self.module), temporary)
        self.step, self.scores = step, scores

    def restore(self) -> None:
        """Put the best state back into the module."""
        load_trainable(self.module, self._file(self.step))

    def _beats(self, scores: dict[str, float]) -> bool:
        return self.step < 0 or fmean(scores.values()) > fmean(self.scores.values()) + MARGIN

    def _file(self, step: int) -> Path:
        return self.folder / f"best-{step}.safetensors"


def load_trainable(module: nn.Module, file: Path) -> None:
    """Copy the tensors of ``trainable_state`` back into the module."""
    saved = load_file(file)
    parameters = trainable_parameters(module)
    if saved.keys() != parameters.keys():
        raise RevelaError(
            f"{file.parent} was saved by another recipe: resume with the settings that the run began with"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(saved[name])


def saved_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(folder.glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter that a run changes, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def trainable_state(module: nn.Module) -> dict[str, Tensor]:
    """A copy of ``trainable_parameters``."""
    return {
        name: p.detach().cpu().clone().contiguous()
        for name, p in trainable_parameters(module).items()
    }
