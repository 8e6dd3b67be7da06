"""The output folder of a run, and its checkpoints: a run resumes as if it had not been stopped.

A run is resumed, or counts as finished, only with the same settings, corpus and models.

A checkpoint is a folder ``checkpoint-STEP`` of safetensors and JSON. It holds every trainable
tensor of retriever and loss, the optimiser's moments, and the budget spent. The learning rate
follows from the budget, random numbers from the number of a batch. The folder is written under a
temporary name and renamed when complete; then older ones are deleted. The fit to the corpus is kept
beside the checkpoints, because another machine would compute a slightly different one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from revela.encoders.model_files import commits
from revela.errors import RevelaError, first_line
from revela.files import (
    LOCK,
    atomic_write,
    check_free_for_run,
    hidden_prefix,
    remove_unfinished,
    remove_whole,
    writing,
)
from revela.training import distributed
from revela.training.lm.language_model import LanguageModel
from revela.training.record import METRICS, RUN_FILE, START_SCORES, TRACKER_FOLDER, RunFile
from revela.training.step import Budget

CHECKPOINTS = "checkpoints"
TRAINABLE, OPTIMIZER = "trainable.safetensors", "optimizer.safetensors"
SPENT, FIT = "clock.json", "fit.safetensors"
T = TypeVar("T")
# Everything that a run may write before its first checkpoint.
BEFORE_CHECKPOINT = frozenset({LOCK, RUN_FILE, METRICS, START_SCORES, CHECKPOINTS, TRACKER_FOLDER})
# Settings that may differ when a finished run is kept, and when a run is resumed. The models
# themselves are compared by digest.
IGNORED_WHEN_COMPARING_FINISHED_RUNS = frozenset(
    {"save_every", "log_every", "track", "offline_model"}
)
CHANGEABLE_ON_RESUME = IGNORED_WHEN_COMPARING_FINISHED_RUNS | {
    *("max_steps", "max_epochs", "max_minutes", "max_tokens_read", "check_every", "threads"),
    "shard_lm",
}


@contextmanager
def output_folder(out: Path, resume: bool) -> Iterator[Event]:
    """Hold the lock of the output folder, in the first process.

    A run that is refused before its first step leaves nothing behind. Neither does one that fails
    before its first checkpoint by another error (of an own method, say), unless the event that is
    yielded is set. Of several processes, torchrun may start such a run again.

    Raises:
        RevelaError: the folder exists, or another process writes to it.
    """
    between_steps = Event()
    if not distributed.is_rank_zero():
        yield between_steps
        return
    if resume:
        read_record(out)
    else:
        check_free_for_run(out)
    with writing(out):
        try:
            if not resume:
                check_free_for_run(out)  # another run may have taken it
            remove_unfinished(out, [*BEFORE_CHECKPOINT, "model"])
            names = "checkpoint", "best", "fit", "groups", "negatives"
            remove_unfinished(out / CHECKPOINTS, names)
            try:
                yield between_steps
            except Exception as error:
                is_kept = between_steps.is_set() or distributed.world_size() > 1
                if isinstance(error, RevelaError):
                    metrics = out / METRICS
                    is_kept = metrics.is_file() and '"loss"' in metrics.read_text()
                if not (resume or is_kept or saved_checkpoints(out / CHECKPOINTS)):
                    shutil.rmtree(out)
                raise
        finally:
            (out / LOCK).unlink(missing_ok=True)
            with suppress(OSError):
                out.rmdir()  # if it is empty


def read_record(out: Path) -> RunFile:
    """The record of the run in ``out``; RevelaError if it holds none."""
    with suppress(OSError, RevelaError):
        record = RunFile.read(out)
        if "method" in record.settings and record.about.corpus_digest is not None:
            return record
    raise RevelaError(f"{out} holds no run of revela (no {RUN_FILE}): give another --out")


def write_record(record: RunFile, out: Path) -> None:
    """Write run.json, of which a resumed run keeps the first "about".

    Raises:
        RevelaError: a resumed run would read other weights than it began with.
    """
    if (out / RUN_FILE).is_file():
        begun = RunFile.read(out).about
        for flag, model in record.about.models.items():
            if begun.models.get(flag, model)["digest"] != model["digest"]:
                name, flag = begun.models[flag]["name"], flag.replace("_", "-")
                raise RevelaError(
                    f"{out} was begun with other weights of --{flag} (of {name}): "
                    "give those, by HF_HUB_OFFLINE=1 if they replaced a model of the hub, or "
                    "another --out"
                )
        record = replace(record, about=begun)
    record.write(out)


def update_record(out: Path, **entries: Any) -> None:
    """Set entries of "about" in run.json."""
    record = read_record(out)
    replace(record, about=replace(record.about, **entries)).write(out)


def recorded(out: Path, name: str, find: Callable[[], T]) -> T:
    """An entry of "about" in run.json; if there is none, the result of ``find``, which is then
    added. All processes must call it.
    """
    value: T | None = distributed.from_rank_zero(lambda: getattr(read_record(out).about, name))
    if value is not None:
        return value
    found = find()  # in all processes: they may share the LM
    found = distributed.from_rank_zero(lambda: found)
    if distributed.is_rank_zero():
        update_record(out, **{name: found})
    return found


def check_same_run(
    settings: Mapping[str, Any], digest: str, out: Path, free: Collection[str]
) -> None:
    """Check that the run in ``out`` has these settings, except ``free`` ones, and this corpus.

    Raises:
        RevelaError: they differ, or there is no run.
    """
    record = read_record(out)
    if record.about.corpus_digest != digest:
        raise RevelaError(
            f"{out} was begun on another corpus: give that one, as it was, or another --out"
        )
    changed = sorted(k for k in settings if k not in free and record.settings.get(k) != settings[k])
    if changed:
        raise RevelaError(
            f"{out} was begun with other settings ({', '.join(changed)}): give the same, or "
            "another --out"
        )


def checkpoint_to_resume(settings: Mapping[str, Any], digest: str, out: Path) -> Path | None:
    """The last checkpoint of the run in ``out``; None if it was stopped before the first.

    Hub models are pinned to the revisions of the first part of the run.

    Raises:
        RevelaError: the run is finished, or has other settings or another corpus.
    """
    check_same_run(settings, digest, out, CHANGEABLE_ON_RESUME)
    commits.update(read_record(out).about.revisions)
    checkpoints = saved_checkpoints(out / CHECKPOINTS)
    if not checkpoints and (out / "modules.json").exists():
        remove_unfinished(out, [CHECKPOINTS])
        raise RevelaError(
            f"{out} has no checkpoint to resume from, for its run is finished: start again with "
            "another --out"
        )
    return checkpoints[-1] if checkpoints else None


def remove_unstarted(out: Path) -> None:
    """Remove a run that was stopped before its first checkpoint.

    Raises:
        RevelaError: ``out`` holds something else.
    """
    inside = [path.name for path in out.iterdir()] if out.is_dir() else []
    if not inside:
        return
    read_record(out)
    temporary = tuple(map(hidden_prefix, BEFORE_CHECKPOINT))
    others = {name for name in inside if not name.startswith(temporary)} - BEFORE_CHECKPOINT
    if others:
        raise RevelaError(
            f"{out} has a {min(others)} that no run wrote: move it away, or give another --out"
        )
    shutil.rmtree(out)


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


def run_tensors(loss_module: nn.Module) -> Iterator[Tensor]:
    """All parameters and buffers, without the frozen weights of language models."""
    lms = [module for module in loss_module.modules() if isinstance(module, LanguageModel)]
    frozen = {id(p) for lm in lms for p in lm.parameters() if not p.requires_grad}
    tensors = (*loss_module.parameters(), *loss_module.buffers())
    return (tensor for tensor in tensors if id(tensor) not in frozen)


def check_same_weights(module: nn.Module, step: int) -> None:
    """Raise RevelaError if the processes' weights differ in any bit after this step."""
    if distributed.world_size() > 1:
        distributed.check_same(
            distributed.digest(run_tensors(module)),
            f"the processes have different weights after {step} steps: train by one process, and "
            "report this with your command and versions",
        )


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
