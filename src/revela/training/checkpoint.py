"""The output folder of a run, and its checkpoints: a run resumes as if it had not been stopped.

A run is resumed, or counts as finished, only with the same settings, corpus and models.

A checkpoint is a folder ``checkpoint-STEP`` of safetensors and JSON. It holds every trainable
tensor of retriever and loss, the optimiser's moments, and the budget spent. The learning rate
follows from the budget, random numbers from the number of a batch. The folder is written under a
temporary name and renamed when complete; then older ones are deleted. The fit to the corpus is kept
next to the checkpoints, because another machine would compute a slightly different one. All of this
stays after the run, so that ``--resume`` can extend it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from revela.encoders.model_files import CONTEXT, LOADED, commits
from revela.errors import RevelaError, first_line
from revela.files import (
    LOCK,
    atomic_write,
    check_free_for_run,
    flush,
    hidden_prefix,
    remove_unfinished,
    remove_whole,
    writing,
)
from revela.training import distributed
from revela.training.lm.language_model import LanguageModel
from revela.training.recipe import Recipe
from revela.training.record import METRICS, RUN_FILE, START_SCORES, TRACKER_FOLDER, Metrics, RunFile
from revela.training.step import Budget

log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
REPLACED = "replaced"
SAVED_LMS = "lm", "encoder-decoder"  # folders of --save-lm and dwell-spans
TRAINABLE, OPTIMIZER = "trainable.safetensors", "optimizer.safetensors"
SPENT, FIT = "clock.json", "fit.safetensors"
T = TypeVar("T")
State = tuple[nn.Module, torch.optim.Optimizer, Budget]
# Everything that a run may write before its first checkpoint.
BEFORE_CHECKPOINT = frozenset({LOCK, RUN_FILE, METRICS, START_SCORES, CHECKPOINTS, TRACKER_FOLDER})
# Everything that a finished run has, by its name's form.
WRITTEN = (*BEFORE_CHECKPOINT, *LOADED, ".*", "README.md", "[0-9]*_*", CONTEXT, *SAVED_LMS)
# Settings that may differ when a finished run is kept, and when a run is resumed. The models
# themselves are compared by digest.
IGNORED_WHEN_COMPARING_FINISHED_RUNS = frozenset(
    {"save_every", "log_every", "keep_checkpoints", "track", "offline_model"}
)
LIMITS = "max_steps", "max_epochs", "max_minutes", "max_tokens_read"
CHANGEABLE_ON_RESUME = IGNORED_WHEN_COMPARING_FINISHED_RUNS | {*(*LIMITS, "check_every", "threads")}


def begun(out: Path) -> RunFile | None:
    """The record of the run in ``out``; None if nothing has begun there.

    Raises:
        RevelaError: ``out`` holds something else, or the record is damaged.
    """
    with suppress(RevelaError):
        check_free_for_run(out)
        return None
    return read_record(out)


def check_out(out: Path, resume: bool, overwrite: bool) -> RunFile | None:
    """Refuse an output folder that is not free, or holds no run to resume or replace. Returns the
    record of that run.
    """
    if resume and overwrite:
        raise RevelaError("--resume continues a run and --overwrite replaces it: leave one out")
    if not (resume or overwrite):
        check_free_for_run(out)
        return None
    former = begun(out)
    if overwrite and former:
        names = (entry.name for entry in out.iterdir())
        others = [name for name in names if not any(fnmatch(name, form) for form in WRITTEN)]
        if others:
            raise RevelaError(f"{out} has a {min(others)} that no run wrote: move it away")
    return former


@contextmanager
def output_folder(out: Path, resume: bool, overwrite: bool = False) -> Iterator[Event]:
    """Hold the lock of the output folder, in the first process.

    A run that is refused before its first step leaves nothing behind. Neither does one that fails
    before its first checkpoint by another error (of a user's method, say), unless the event that is
    yielded is set. Of several processes, torchrun may start such a run again. A run that is to be
    replaced (``overwrite``) is put back if the new one has no checkpoint.

    Raises:
        RevelaError: the folder exists, or another process writes to it.
    """
    between_steps = Event()
    if not distributed.is_rank_zero():
        yield between_steps
        return
    check_out(out, resume, overwrite)
    replaced = out / f"{hidden_prefix(REPLACED)}run"
    with writing(out):
        try:
            _put_back(replaced, out)  # after a kill
            former = check_out(out, resume, overwrite)  # another run may have taken it
            remove_unfinished(out, [*BEFORE_CHECKPOINT, "model"])
            names = "checkpoint", "best", "fit", "groups", "negatives"
            remove_unfinished(out / CHECKPOINTS, names)
            if overwrite and former:
                _move_run(out, replaced)
            try:
                yield between_steps
            except Exception as error:
                is_kept = between_steps.is_set() or distributed.world_size() > 1
                if isinstance(error, RevelaError):
                    metrics = out / METRICS
                    is_kept = metrics.is_file() and '"loss"' in metrics.read_text()
                if not (former or is_kept or saved_checkpoints(out / CHECKPOINTS)):
                    shutil.rmtree(out)
                raise
        finally:
            _put_back(replaced, out)
            (out / LOCK).unlink(missing_ok=True)
            with suppress(OSError):
                out.rmdir()  # if it is empty


def _put_back(replaced: Path, out: Path) -> None:
    """Put back a run that was to be replaced, or remove it if the new one has a checkpoint."""
    if replaced.is_dir():
        if not (saved_checkpoints(out / CHECKPOINTS) or (out / "modules.json").exists()):
            _move_run(out, out / f"{hidden_prefix(REPLACED)}by")
            _move_run(replaced, out)
        remove_unfinished(out, [REPLACED])


def _move_run(source: Path, target: Path) -> None:
    """Move all entries of a folder but hidden ones; run.json, by which a run is known, last."""
    target.mkdir(exist_ok=True)
    for entry in sorted(source.iterdir(), key=lambda entry: entry.name == RUN_FILE):
        if not entry.name.startswith("."):
            entry.rename(target / entry.name)


def read_record(out: Path) -> RunFile:
    """The record of the run in ``out``; RevelaError if it holds none, or a damaged one."""
    if (out / RUN_FILE).is_file():
        record = RunFile.read(out)
        if "method" in record.settings and record.about.corpus_digest is not None:
            return record
    raise RevelaError(f"{out} holds no run of revela (no {RUN_FILE}): give another --out")


def recorded_run(out: Path) -> tuple[Recipe, list[Path]] | None:
    """The recipe and the corpus of the run in ``out``; None if nothing has begun there.

    Raises:
        RevelaError: ``out`` holds something else, or a damaged record.
    """
    if (record := begun(out)) is None:
        return None
    try:
        method = record.about.method_file or record.settings["method"]
        recipe, _ = Recipe().merge({**record.settings, "method": method})
    except RevelaError as error:
        raise RevelaError(
            f"{out / RUN_FILE} is damaged ({error}): repair it, or start again with another --out"
        ) from error
    return recipe, [*map(Path, record.about.sources)]


def write_record(record: RunFile, out: Path) -> None:
    """Write run.json; a resumed run keeps the first "about" except for the place of its corpus.

    Raises:
        RevelaError: a resumed run would read other weights than it began with.
    """
    if (out / RUN_FILE).is_file() and (first := RunFile.read(out).about).models:
        for flag, model in record.about.models.items():
            if first.models.get(flag, model)["digest"] != model["digest"]:
                name, flag = first.models[flag]["name"], flag.replace("_", "-")
                raise RevelaError(
                    f"{out} was started with other weights of --{flag} ({name}): use those weights "
                    "(set HF_HUB_OFFLINE=1 if the hub has a newer version), or give another --out"
                )
        sources = record.about.sources or first.sources
        record = replace(record, about=replace(first, sources=sources, finished=False))
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
    if value is None:
        found = find()  # in all processes: they may share the work
        value = distributed.from_rank_zero(lambda: found)
        if distributed.is_rank_zero():
            update_record(out, **{name: value})
    return value


def check_same_run(settings: Mapping[str, Any], out: Path, free: Collection[str]) -> None:
    """Check that the run in ``out`` has these settings, except ``free`` ones.

    Raises:
        RevelaError: they differ, or the folder has no run.
    """
    known = read_record(out).settings
    if changed := sorted(k for k in settings if k not in free and known.get(k) != settings[k]):
        raise RevelaError(
            f"{out} has other settings ({', '.join(changed)}): give the same, or another --out"
        )


def checkpoint_to_resume(recipe: Recipe, out: Path) -> Path | None:
    """The last checkpoint of the run in ``out``; None if there is none yet. Reads no corpus.

    Raises:
        RevelaError: the run has other settings, is finished within these limits, or lacks what it
            has written.
    """
    if (record := begun(out)) is None:
        return None
    checkpoints, finished = saved_checkpoints(out / CHECKPOINTS), record.about.finished
    check_same_run(recipe.to_dict(), out, CHANGEABLE_ON_RESUME)
    if not checkpoints and finished:
        raise RevelaError(f"{out} is finished and has no checkpoint to extend: give another --out")
    if not checkpoints:
        return None
    last, step = checkpoints[-1], step_of(checkpoints[-1])
    for name in (TRAINABLE, OPTIMIZER):
        with _reading(last / name) as file:
            file.stat()
    if all(row.step < step for row in Metrics(out / METRICS).written()):
        raise RevelaError(
            f"{out / METRICS} has no line of step {step}, the last checkpoint: give another --out"
        )
    budget, now = Budget.of(recipe.training, record.about.groups or 0), _fixed(out)
    began = {**now, **load_spent(last, budget)}
    if edited := sorted(name for name in now if now[name] != began[name]):
        raise RevelaError(f"{out / RUN_FILE} was edited ({', '.join(edited)}): undo that")
    if finished and budget.done(step) >= 1:
        spent = {"steps": step, "minutes": budget.minutes, "tokens_read": budget.tokens / 1e6}
        limits = {name: getattr(recipe.training, f"max_{name}") for name in spent}
        reached = [f"--max-{n.replace('_', '-')}" for n, v in spent.items() if 0 < limits[n] <= v]
        error = RevelaError(
            f"{out} is finished after {step:,} steps: raise {' and '.join(reached) or 'its limit'} "
            "to extend it"
        )
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):
            error.exit_code = 0  # it was finished when torchrun began all processes again
        raise error
    return last


def limits_in_words(recipe: Recipe) -> str:
    """The limits of a recipe, as flags."""
    limits = {name: getattr(recipe.training, name) for name in LIMITS}
    return ", ".join(f"--{n.replace('_', '-')} {limit:g}" for n, limit in limits.items() if limit)


def resume_run(recipe: Recipe, digest: str, out: Path) -> tuple[Path | None, Recipe]:
    """The last checkpoint of the run in ``out``, if any, and the recipe with the limits that the
    run had. Logs whether it starts, continues or is extended. Pins hub models to the revisions of
    its first part.

    Raises:
        RevelaError: as ``checkpoint_to_resume``, or the corpus is another.
    """
    checkpoint, record = checkpoint_to_resume(recipe, out), begun(out)
    if record is None:
        log.info(f"{out} has no run yet: starting one")
        return None, recipe
    if record.about.corpus_digest != digest:
        raise RevelaError(f"{out} was started on another corpus: give that one, or another --out")
    commits.update(record.about.revisions)
    if checkpoint is None:
        log.info(f"{out} was stopped before its first checkpoint: starting over")
    elif record.about.finished:
        log.info(f"{out}: extends the finished run of {step_of(checkpoint):,} steps")
    else:
        log.info(f"{out}: continues after step {step_of(checkpoint):,}")
    settings = record.settings
    return checkpoint, recipe.replace(**{n: settings[n] for n in LIMITS if n in settings})


def save_checkpoint(folder: Path, step: int, state: State, keep: int = 1) -> None:
    """Write the checkpoint of a step, then delete all but the newest ``keep``, at least one.

    The optimiser has ``trainable_parameters(module)``, in that order.
    """
    module, optimizer, budget = state
    target = folder / f"checkpoint-{step}"
    if (metrics := folder.parent / METRICS).is_file():  # which has a line for every checkpoint
        flush(metrics)
    with atomic_write(target) as temporary:
        temporary.mkdir()
        save_file(trainable_state(module), temporary / TRAINABLE)
        save_file(_moments(module, optimizer), temporary / OPTIMIZER)
        spent = {"seconds": budget.seconds, "tokens": budget.tokens, **_fixed(folder.parent)}
        (temporary / SPENT).write_text(json.dumps(spent))
        remove_whole(target)
    for old in saved_checkpoints(folder)[: -max(1, keep)]:
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
    load_spent(checkpoint, budget)


def load_spent(checkpoint: Path, budget: Budget) -> dict[str, Any]:
    """Restore a budget, and return what else its file has; RevelaError if it is damaged."""
    with _reading(checkpoint / SPENT) as file:
        spent: dict[str, Any] = json.loads(file.read_text())
        budget.seconds, budget.tokens = float(spent["seconds"]), int(spent["tokens"])
    return spent


def _fixed(out: Path) -> dict[str, Any]:
    """The settings of a run that a resumed one may not change; {} if it has no record."""
    recorded = RunFile.read(out).settings if (out / RUN_FILE).is_file() else {}
    return {name: recorded[name] for name in recorded if name not in CHANGEABLE_ON_RESUME}


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
        raise RevelaError(f"{file.parent} was saved by another recipe: give the run's settings")
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
