"""The output folder of a run, and its run.json: settings, corpus and environment.

A run is resumed, or counts as finished, only with the same settings and corpus.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Event
from typing import Any

import torch

from revela import __version__
from revela.encoders.model_files import NEW, commits, fingerprint
from revela.errors import RevelaError
from revela.files import LOCK, atomic_write, check_free, hidden_prefix, remove_unfinished, writing
from revela.training import distributed
from revela.training.checkpoint import saved_checkpoints
from revela.training.find_model import find_model
from revela.training.metrics import TRACKER_FOLDER
from revela.training.queries.generated import QueryLM
from revela.training.settings import Retriever

RUN_FILE, METRICS, CHECKPOINTS = "run.json", "metrics.jsonl", "checkpoints"
# Everything that a run may write before its first checkpoint.
BEFORE_CHECKPOINT = frozenset({LOCK, RUN_FILE, METRICS, CHECKPOINTS, TRACKER_FOLDER})
# Settings that may differ when a finished run is kept, and when a run is resumed. The models
# themselves are compared by digest.
IGNORED_WHEN_COMPARING_FINISHED_RUNS = frozenset(
    {"save_every", "log_every", "track", "offline_model"}
)
CHANGEABLE_ON_RESUME = IGNORED_WHEN_COMPARING_FINISHED_RUNS | {
    *("max_steps", "max_minutes", "max_tokens_read", "check_every", "threads", "shard_lm")
}
LIBRARIES = (
    *("torch", "transformers", "sentence-transformers"),
    *("peft", "accelerate", "datasets", "numpy"),
)


@dataclass(frozen=True)
class Provenance:
    """Names of the corpus and the command, for run.json and the model card."""

    corpus: str = "a corpus"
    command: str = ""


UNKNOWN = Provenance()
Head = tuple[int, int]


@contextmanager
def output_folder(out: Path, resume: bool) -> Iterator[Event]:
    """Hold the lock of the output folder, in the first process.

    A run that is refused before its first step leaves nothing behind. Neither does one that fails
    before its first checkpoint by another error (of an own objective, say), unless the event that
    is yielded is set. Of several processes, torchrun may start such a run again.

    Raises:
        RevelaError: the folder exists, or another process writes to it.
    """
    between_steps = Event()
    if not distributed.is_rank_zero():
        yield between_steps
        return
    if resume:
        _read_record(out)
    else:
        check_free(out)
    with writing(out):
        try:
            if not resume:
                check_free(out)  # another run may have taken it
            remove_unfinished(out, [*BEFORE_CHECKPOINT, "model"])
            names = "checkpoint", "best", "fit", "groups", "negatives"
            remove_unfinished(out / CHECKPOINTS, names)
            try:
                yield between_steps
            except Exception as error:
                is_kept = between_steps.is_set() or distributed.world_size() > 1
                if isinstance(error, RevelaError):
                    is_kept = _has_losses(out)
                if not (resume or is_kept or saved_checkpoints(out / CHECKPOINTS)):
                    shutil.rmtree(out)
                raise
        finally:
            (out / LOCK).unlink(missing_ok=True)
            with suppress(OSError):
                out.rmdir()  # if it is empty


def _has_losses(out: Path) -> bool:
    metrics = out / METRICS
    return metrics.is_file() and '"loss"' in metrics.read_text()


def write_record(settings: dict[str, Any], about: dict[str, Any], out: Path) -> None:
    """Write run.json: all settings, and ``about``, of which a resumed run keeps the first version.

    Raises:
        RevelaError: a resumed run would read other weights than it began with.
    """
    path = out / RUN_FILE
    if path.is_file():
        begun = json.loads(path.read_text()).get("about", about)
        models = begun.get("models", {})
        for flag, model in about.get("models", {}).items():
            if models.get(flag, model)["digest"] != model["digest"]:
                name, flag = models[flag]["name"], flag.replace("_", "-")
                raise RevelaError(
                    f"{out} was begun with other weights of --{flag} (of {name}): "
                    "give those, by HF_HUB_OFFLINE=1 if they replaced a model of the hub, or "
                    "another --out"
                )
        about = begun
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps({**settings, "about": about}, indent=1))


def update_record(out: Path, **about: Any) -> dict[str, Any]:
    """Set entries of "about" in run.json, and return them."""
    record = _read_record(out)
    record["about"] |= about
    with atomic_write(out / RUN_FILE) as temporary:
        temporary.write_text(json.dumps(record, indent=1))
    return about


def check_same_run(settings: dict[str, Any], digest: str, out: Path, free: Collection[str]) -> None:
    """Check that the run in ``out`` has these settings, except ``free`` ones, and this corpus.

    Raises:
        RevelaError: they differ, or there is no run.
    """
    record = _read_record(out)
    if record["about"]["corpus_digest"] != digest:
        raise RevelaError(
            f"{out} was begun on another corpus: give that one, as it was, or another --out"
        )
    changed = sorted(k for k in settings if k not in free and record.get(k) != settings[k])
    if changed:
        raise RevelaError(
            f"{out} was begun with other settings ({', '.join(changed)}): give the same, or "
            "another --out"
        )


def models_of(
    retriever: Retriever, lm: str, folder: Path, query_lm: QueryLM | None
) -> dict[str, dict[str, str]]:
    """{flag: {"name": ..., "digest": ...}} of the models that a run reads. An offline model has its
    own name.

    Args:
        lm: the LM of the objective; "": none.
        folder: folder of the trained model.
        query_lm: the LM that writes queries during training, if any.
    """
    offline = retriever.offline_model
    found = {"model": (retriever.model, folder)}
    if not retriever.model.startswith(NEW):
        found["model"] = find_model(retriever.model, offline)
    if lm:
        found["lm"] = find_model(lm, offline)
    if query_lm is not None:
        found["query_lm"] = query_lm.name, query_lm.folder
    return {flag: {"name": n, "digest": fingerprint(place)} for flag, (n, place) in found.items()}


def heads_of_run(out: Path, find: Callable[[], list[Head]]) -> list[Head]:
    """The LM's (layer, head) pairs of the run, found if they are not in its record."""
    return [(int(layer), int(head)) for layer, head in recorded(out, "heads", find)]


def recorded(out: Path, name: str, find: Callable[[], Any]) -> Any:
    """An entry of run.json; if there is none, the result of ``find``, which is then added. All
    processes must call it.
    """
    value = distributed.from_rank_zero(lambda: _read_record(out)["about"].get(name))
    if value is not None:
        return value
    found = find()  # in all processes: they may share the LM
    return distributed.from_rank_zero(lambda: update_record(out, **{name: found})[name])


def checkpoint_to_resume(settings: dict[str, Any], digest: str, out: Path) -> Path | None:
    """The last checkpoint of the run in ``out``; None if it was stopped before the first.

    Hub models are pinned to the revisions of the first part of the run.

    Raises:
        RevelaError: the run is finished, or has other settings or another corpus.
    """
    check_same_run(settings, digest, out, CHANGEABLE_ON_RESUME)
    commits.update(_read_record(out)["about"].get("revisions", {}))
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
    _read_record(out)
    temporary = tuple(map(hidden_prefix, BEFORE_CHECKPOINT))
    others = {name for name in inside if not name.startswith(temporary)} - BEFORE_CHECKPOINT
    if others:
        raise RevelaError(
            f"{out} has a {min(others)} that no run wrote: move it away, or give another --out"
        )
    shutil.rmtree(out)


def environment() -> dict[str, Any]:
    """{"versions": {name: version}, "hardware": {...}} of this process."""
    versions = {"python": platform.python_version(), "revela": __version__}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):  # datasets is only needed to read from the hub
            versions[name] = version(name)
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


def _read_record(out: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads((out / RUN_FILE).read_text())
        if "objective" in record and "corpus_digest" in record["about"]:
            return record
    except (OSError, ValueError, TypeError, KeyError):
        pass
    raise RevelaError(f"{out} holds no run of revela (no {RUN_FILE}): give another --out")


def _cpu() -> str:
    """Model name (from /proc/cpuinfo on Linux) and number of available cores."""
    table = Path("/proc/cpuinfo")
    lines = table.read_text(errors="replace").splitlines() if table.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    name = next(names, platform.processor() or "unknown")
    return f"{name}, {distributed.available_cores()} cores"
