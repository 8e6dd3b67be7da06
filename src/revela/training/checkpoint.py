"""Checkpoints: a run resumes from one as if it had not been stopped.

A checkpoint is a folder ``checkpoint-STEP`` of safetensors and JSON. It holds every trainable
tensor of retriever and objective, the optimiser's moments, and the budget spent. The learning rate
follows from the budget, random numbers from the number of a batch. The folder is written under a
temporary name and renamed when complete; then older ones are deleted. The fit to the corpus is kept
beside the checkpoints, because another machine would compute a slightly different one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from revela.errors import RevelaError, first_line
from revela.files import atomic_write, remove_whole
from revela.training.metrics import Budget

TRAINABLE, OPTIMIZER = "trainable.safetensors", "optimizer.safetensors"
SPENT, FIT = "clock.json", "fit.safetensors"


def save_checkpoint(
    folder: Path, step: int, module: nn.Module, optimizer: torch.optim.Optimizer, budget: Budget
) -> None:
    """Write the checkpoint of a step, then delete older ones.

    The optimiser has ``trainable_parameters(module)``, in that order.
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
    """Restore module, optimiser and budget from a checkpoint.

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
    """Save the fit to the corpus, for a resumed run."""
    with atomic_write(folder / FIT) as temporary:
        save_file({name: _copy(tensor) for name, tensor in fitted.items()}, temporary)


def load_fit(folder: Path) -> dict[str, Tensor] | None:
    """Load the fit to the corpus that a run has saved; None if there is none.

    Raises:
        RevelaError: the file is damaged.
    """
    if not (folder / FIT).is_file():
        return None
    with _reading(folder / FIT) as file:
        return dict(load_file(file))


def saved_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    complete = (path for path in folder.glob("checkpoint-*") if path.name[11:].isdecimal())
    return sorted(complete, key=step_of)


def step_of(checkpoint: Path) -> int:
    """Optimiser steps done at a checkpoint."""
    return int(checkpoint.name.split("-")[1])


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Every trained parameter, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def trainable_state(module: nn.Module) -> dict[str, Tensor]:
    """A CPU copy of ``trainable_parameters``."""
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
    """Raise RevelaError for a damaged file."""
    try:
        yield file
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise RevelaError(
            f"{file} cannot be read ({first_line(error)}): start again with another --out"
        ) from error


def _moments(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """{"NAME/exp_avg": ...}: AdamW's state, of parameters that have had a gradient."""
    names = list(trainable_parameters(module))
    state = optimizer.state_dict()["state"]
    return {f"{names[i]}/{k}": _copy(v) for i, moments in state.items() for k, v in moments.items()}


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone().contiguous()
