"""Check that the processes of a run begin with the same data and end with the same weights."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from revela.training import distributed as distributed
from revela.training.lm.language_model import LanguageModel

log = logging.getLogger(__name__)


def log_unused_devices() -> None:
    """Log if one process trains where several were requested, or where there are more GPUs."""
    if distributed.world_size() > 1:
        return
    if distributed.LAUNCHED & os.environ.keys():
        log.info("1 process")  # accelerate launch starts only one without a GPU
    if (gpus := torch.cuda.device_count()) > 1:
        log.info(
            f"there are {gpus} GPUs, and a run uses the first: name another by "
            "CUDA_VISIBLE_DEVICES, or use all by torchrun (docs/scale.md)"
        )


def check_same_start(digest: str, settings: Any, out: Path) -> None:
    """Raise RevelaError if the processes have different data or settings.

    Args:
        digest: a hash of the data.
        settings: any value to compare, too.
        out: the output folder, for the error.
    """
    distributed.check_same(
        digest,
        "the processes read different groups: give a folder that all machines see, or the same "
        "copy of it",
    )
    distributed.check_same(
        settings,
        f"the processes were given different settings, or do not see the same {out}: "
        "start all by the same command, with an --out that all machines see",
    )


def run_tensors(objective: nn.Module) -> Iterator[Tensor]:
    """All parameters and buffers, without the frozen weights of language models."""
    lms = [module for module in objective.modules() if isinstance(module, LanguageModel)]
    frozen = {id(p) for lm in lms for p in lm.parameters() if not p.requires_grad}
    tensors = (*objective.parameters(), *objective.buffers())
    return (tensor for tensor in tensors if id(tensor) not in frozen)


def check_same_weights(objective: nn.Module, step: int) -> None:
    """Raise RevelaError if the processes' weights differ in any bit."""
    if distributed.world_size() > 1:
        distributed.check_same(
            distributed.digest(run_tensors(objective)),
            f"the processes have different weights after {step} steps: train by one process, and "
            "report this with your command and versions",
        )
