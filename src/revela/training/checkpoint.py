"""Checkpoints: what a run needs to go on as if it had not been stopped, as safetensors and JSON.

A checkpoint is a folder ``checkpoint-STEP`` with every trainable tensor of retriever and objective
(LoRA of both models, gates, temperature), the optimiser's moments, and the budget spent, from which
the learning rate follows. Random numbers follow from the number of a batch. It is written under a
temporary name and renamed when complete; older ones are deleted after that. What was fitted to the
corpus before the first step stands beside them, since on other hardware it would be another fit.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from revela.errors import RevelaError, first_line
from revela.files import atomic_write, remove_whole
from revela.training.metrics import Budget

log = logging.getLogger(__name__)

TRAINABLE, OPTIMIZER = "trainable.safetensors", "optimizer.safetensors"
SPENT, FIT = "clock.json", "fit.safetensors"
MARGIN = 0.005  # nDCG@10: what checks of equally good states differ by (research/notebook.md)


def save_checkpoint(
    folder: Path, step: int, module: nn.Module, optimizer: torch.optim.Optimizer, budget: Budget
) -> None:
    """Write the checkpoint of a step, then delete older ones; the optimiser is over
    ``trainable_parameters(module)``, in that order.
    """
    target = folder / f"checkpoint-{step}"
    with atomic_write(target) as temporary:
        temporary.mkdir()
        save_file(trainable_state(module), temporary / TRAINABLE)
        save_file(_moments(module, optimizer), temporary / OPTIMIZER)
        spent = {"seconds": budget.seconds, "tokens": budget.tokens}
        (temporary / SPENT).write_text(json.dumps(spent))
        remove_whole(target)
    for old in saved_checkpoints(folder)[:-1]:
        remove_whole(old)


def load_checkpoint(
    checkpoint: Path, module: nn.Module, optimizer: torch.optim.Optimizer, budget: Budget
) -> None:
    """Put module, optimiser and budget into the state of a checkpoint.

    Raises:
        RevelaError: another recipe wrote it, or it is damaged.
    """
    load_trainable(module, checkpoint / TRAINABLE)
    index = {name: i for i, name in enumerate(trainable_parameters(module))}
    state: dict[int, dict[str, Tensor]] = {}
    with _reading(checkpoint / OPTIMIZER) as file:
        for key, tensor in load_file(file).items():
            name, _, moment = key.rpartition("/")
            state.setdefault(index[name], {})[moment] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    with _reading(checkpoint / SPENT) as file:
        spent = json.loads(file.read_text())
        budget.seconds, budget.tokens = float(spent["seconds"]), int(spent["tokens"])


def save_fit(folder: Path, fitted: dict[str, Tensor]) -> None:
    """Keep what was fitted to the corpus until the run ends."""
    with atomic_write(folder / FIT) as temporary:
        save_file({name: _copy(tensor) for name, tensor in fitted.items()}, temporary)


def load_fit(folder: Path) -> dict[str, Tensor] | None:
    """What was fitted before the run was stopped; None if that is not kept.

    Raises:
        RevelaError: the file is damaged.
    """
    if not (folder / FIT).is_file():
        return None
    with _reading(folder / FIT) as file:
        return dict(load_file(file))


def saved_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first; a copy by another name is none."""
    found = (path for path in folder.glob("checkpoint-*") if path.name[11:].isdecimal())
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """Optimiser steps that were done when a checkpoint was written."""
    return int(checkpoint.name.split("-")[1])


class BestState:
    """The trainable state with the best label-free check (by the mean of its scores), so that a run
    ends no worse than it began.

    A later state has to win by more than ``MARGIN``: among many checks that differ by chance alone,
    the highest is luck. Each state that was best at its time stays in ``folder`` until the run
    ends, since a killed run may resume from before the latest.

    Args:
        module: whose trainable tensors are kept.
        folder: of the run's checkpoints.
        scored: (step, scores by task) of the checks so far, for a resumed run.
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

    def restore(self) -> tuple[int, dict[str, float]]:
        """Put the best state back into the module; its step and scores."""
        load_trainable(self.module, self._file(self.step))
        log.info(f"the state after {self.step} steps had the best label-free check: it is saved")
        return self.step, self.scores

    def _beats(self, scores: dict[str, float]) -> bool:
        return self.step < 0 or fmean(scores.values()) > fmean(self.scores.values()) + MARGIN

    def _file(self, step: int) -> Path:
        return self.folder / f"best-{step}.safetensors"


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter that a run changes, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def trainable_state(module: nn.Module) -> dict[str, Tensor]:
    """A copy of ``trainable_parameters``, on the CPU."""
    return {name: _copy(p) for name, p in trainable_parameters(module).items()}


def load_trainable(module: nn.Module, file: Path) -> None:
    """Copy the tensors of ``trainable_state`` back into the module.

    Raises:
        RevelaError: the file holds other tensors, or is damaged.
    """
    with _reading(file):
        saved = load_file(file)
    parameters = trainable_parameters(module)
    if {n: t.shape for n, t in saved.items()} != {n: p.shape for n, p in parameters.items()}:
        raise RevelaError(
            f"{file.parent} was saved by another recipe: resume with the settings that the run "
            "began with"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(saved[name])


@contextmanager
def _reading(file: Path) -> Iterator[Path]:
    """While open, whatever is wrong with a file of a checkpoint is one sentence."""
    try:
        yield file
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise RevelaError(
            f"{file} cannot be read ({first_line(error)}): start again with another --out"
        ) from error


def _moments(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """{"NAME/exp_avg": ...}: what the optimiser keeps of each parameter that has had a gradient."""
    names = list(trainable_parameters(module))
    state = optimizer.state_dict()["state"]
    return {f"{names[i]}/{k}": _copy(v) for i, kept in state.items() for k, v in kept.items()}


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone().contiguous()
