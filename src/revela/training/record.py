"""The output folder of a run, and run.json in it: the settings, corpus and environment of the run,
so that it is resumed, or taken for finished, with the same only.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from revela import __version__, distributed
from revela.errors import RevelaError
from revela.files import LOCK, atomic_write, check_free, hidden_prefix, remove_unfinished, writing
from revela.model_files import commits
from revela.settings import Recipe
from revela.training.checkpoint import saved_checkpoints
from revela.training.metrics import TRACKER_FOLDER

RUN_FILE, METRICS, CHECKPOINTS = "run.json", "metrics.jsonl", "checkpoints"
# All that a run may have written before its first checkpoint.
BEFORE_A_CHECKPOINT = frozenset({LOCK, RUN_FILE, METRICS, CHECKPOINTS, TRACKER_FOLDER})
# Settings that may differ when a finished run is not repeated, and when a run is resumed.
FREE_WHEN_DONE = frozenset({"save_every", "log_every", "track"})
FREE = FREE_WHEN_DONE | {
    *("max_steps", "max_minutes", "max_tokens_read", "check_every", "threads", "shard_lm")
}
LIBRARIES = (
    *("torch", "transformers", "sentence-transformers"),
    *("peft", "accelerate", "datasets", "numpy"),
)


@contextmanager
def output_folder(out: Path, resume: bool) -> Iterator[None]:
    """While open, the first process holds the lock of the output folder. A run that is refused
    before its first step leaves nothing behind.

    Raises:
        RevelaError: the folder is in the way, or another process writes to it.
    """
    if not distributed.is_rank_zero():
        yield
        return
    if resume:
        _record(out)
    else:
        check_free(out)
    with writing(out):
        try:
            if not resume:
                check_free(out)  # another run may have been faster
            remove_unfinished(out, [*BEFORE_A_CHECKPOINT, "model"])
            names = "checkpoint", "best", "fit", "groups", "negatives"
            remove_unfinished(out / CHECKPOINTS, names)
            try:
                yield
            except RevelaError:
                if not resume and not _has_steps(out):
                    shutil.rmtree(out)
                raise
        finally:
            (out / LOCK).unlink(missing_ok=True)
            with suppress(OSError):
                out.rmdir()  # if it is empty


def _has_steps(out: Path) -> bool:
    metrics = out / METRICS
    has_losses = metrics.is_file() and '"loss"' in metrics.read_text()
    return has_losses or bool(saved_checkpoints(out / CHECKPOINTS))


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """The settings of a run, as run.json gives them back (a tuple as a list)."""
    settings: dict[str, Any] = json.loads(json.dumps(recipe.to_dict()))
    return settings


def write_record(settings: dict[str, Any], about: dict[str, Any], out: Path) -> None:
    """Write run.json: every setting, and under ``about`` the run's corpus, command, environment.

    A resumed run keeps the ``about`` of its first part.
    """
    path = out / RUN_FILE
    if path.is_file():
        about = json.loads(path.read_text()).get("about", about)
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps({**settings, "about": about}, indent=1))


def check_another(settings: dict[str, Any], digest: str, out: Path, free: Collection[str]) -> None:
    """Check that the run in ``out`` has these settings, but for ``free``, and a corpus of this
    digest.

    Raises:
        RevelaError: the run has others, or there is no run.
    """
    begun = _record(out)
    if begun["about"]["corpus_digest"] != digest:
        raise RevelaError(
            f"{out} was begun on another corpus: give that one, as it was, or another --out"
        )
    changed = sorted(k for k in settings if k not in free and begun.get(k) != settings[k])
    if changed:
        raise RevelaError(
            f"{out} was begun with other settings ({', '.join(changed)}): give the same, or "
            "another --out"
        )


def model_of_run(out: Path) -> str:
    """The model that the run in ``out`` began with.

    Raises:
        RevelaError: there is no run.
    """
    return str(_record(out)["model"])


def checkpoint_to_resume(settings: dict[str, Any], digest: str, out: Path) -> Path | None:
    """The last checkpoint of the run in ``out``; None if it was stopped before the first. Models of
    the hub are read as they were when it began.

    Raises:
        RevelaError: the run is finished, or has other settings or another corpus.
    """
    check_another(settings, digest, out, FREE)
    commits.update(_record(out)["about"].get("revisions", {}))
    checkpoints = saved_checkpoints(out / CHECKPOINTS)
    if not checkpoints and (out / "modules.json").exists():
        remove_unfinished(out, [CHECKPOINTS])
        raise RevelaError(
            f"{out} has no checkpoint to resume from, for its run is finished: start again with "
            "another --out"
        )
    return checkpoints[-1] if checkpoints else None


def remove_begun(out: Path) -> None:
    """Remove a run that was stopped before its first checkpoint, if there is one.

    Raises:
        RevelaError: ``out`` holds something else.
    """
    inside = [path.name for path in out.iterdir()] if out.is_dir() else []
    if not inside:
        return
    _record(out)
    half_written = tuple(map(hidden_prefix, BEFORE_A_CHECKPOINT))
    others = {name for name in inside if not name.startswith(half_written)} - BEFORE_A_CHECKPOINT
    if others:
        raise RevelaError(
            f"{out} has a {min(others)} that no run wrote: move it away, or give another --out"
        )
    shutil.rmtree(out)


def environment() -> dict[str, Any]:
    """{"versions": {name: version}, "hardware": {...}}, with torch's present number of threads."""
    versions = {"python": platform.python_version(), "revela": __version__}
    versions |= {name: version(name) for name in LIBRARIES}
    system = f"{platform.system()} {platform.machine()}"
    hardware: dict[str, Any] = {"system": system, "cpu": _cpu()}
    hardware["threads"] = torch.get_num_threads()
    hardware["processes"] = distributed.world_size()
    if hasattr(os, "sysconf"):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        hardware["memory"] = f"{memory / 2**30:.0f} GiB"
    if torch.cuda.is_available():
        gpus = range(torch.cuda.device_count())
        hardware["gpu"] = ", ".join(torch.cuda.get_device_name(i) for i in gpus)
    return {"versions": versions, "hardware": hardware}


def _record(out: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads((out / RUN_FILE).read_text())
        if "objective" in record and "corpus_digest" in record["about"]:
            return record
    except (OSError, ValueError, TypeError, KeyError):
        pass
    raise RevelaError(f"{out} holds no run of revela (no {RUN_FILE}): give another --out")


def _cpu() -> str:
    """Model name, where /proc/cpuinfo has it (Linux), and number of cores."""
    table = Path("/proc/cpuinfo")
    lines = table.read_text(errors="replace").splitlines() if table.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, platform.processor() or 'unknown')}, {os.cpu_count()} cores"
