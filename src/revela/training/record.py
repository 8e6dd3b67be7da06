"""What a run was begun with, kept in its folder, so that it is resumed, or taken for done, with the
same only.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Collection, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from revela.errors import RevelaError
from revela.files import atomic_write
from revela.groups.folder import GroupFolder
from revela.settings import Recipe
from revela.training.trainer import saved_checkpoints
from revela.types import Document

RUN_FILE = "run.json"
BEFORE_A_CHECKPOINT = frozenset(
    {RUN_FILE, "metrics.jsonl", "checkpoints"}
)  # all that a run has written by then
# What may be another when a run is resumed, and when a finished one is taken for done.
FREE = frozenset(
    {
        "max_steps",
        "max_minutes",
        "max_tokens_read",
        "check_every",
        "checks",
        "save_every",
        "log_every",
        "threads",
    }
)
FREE_WHEN_DONE = frozenset({"save_every", "log_every"})


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """The settings of a run, as JSON gives them back."""
    settings: dict[str, Any] = json.loads(json.dumps(recipe.flat()))
    return settings


def write_record(settings: dict[str, Any], about: dict[str, Any], out: Path) -> None:
    """run.json: every setting, and under ``about`` what the run began with; a resumed run keeps
    what its first part wrote there.
    """
    path = out / RUN_FILE
    if path.is_file():
        about = json.loads(path.read_text()).get("about", about)
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps({**settings, "about": about}, indent=1))


def corpus_digest(documents: Sequence[Document] | GroupFolder) -> str:
    """Tells one corpus from another: a digest of its documents' titles and texts, or of a folder's
    groups.
    """
    if isinstance(documents, GroupFolder):
        return documents.fingerprint
    digest = hashlib.blake2b(digest_size=8)
    for document in documents:
        digest.update(f"{document.title}\0{document.text}\0".encode())
    return digest.hexdigest()


def refuse_another(settings: dict[str, Any], digest: str, out: Path, free: Collection[str]) -> None:
    """Check that the run in ``out`` was begun with these settings, but for ``free`` ones, and on
    the corpus of this digest.

    Raises:
        RevelaError: it was not, or there is no run.
    """
    begun = _record(out)
    if (
        begun.get("about", {}).get("corpus_digest", digest) != digest
    ):  # runs of earlier versions have none
        raise RevelaError(
            f"{out} was begun on another corpus: give that one, as it was, or another --out"
        )
    changed = sorted(k for k in settings if k not in free and begun.get(k) != settings[k])
    if changed:
        raise RevelaError(
            f"{out} was begun with other settings ({', '.join(changed)}): give the same, or another --out"
        )


def checkpoint_to_resume(settings: dict[str, Any], digest: str, out: Path) -> Path:
    """The last checkpoint of the run in ``out``.

    Raises:
        RevelaError: there is none, or the run was begun with something else.
    """
    refuse_another(settings, digest, out, FREE)
    checkpoints = saved_checkpoints(out / "checkpoints")
    if not checkpoints:
        raise RevelaError(f"{out} has no checkpoint to resume from: start again with another --out")
    return checkpoints[-1]


def remove_begun(out: Path) -> None:
    """Remove a run that was stopped before its first checkpoint, if there is one.

    Raises:
        RevelaError: ``out`` holds something else.
    """
    inside = [path.name for path in out.iterdir()] if out.is_dir() else []
    if not inside:
        return
    _record(out)
    if others := sorted(
        name
        for name in inside
        if name not in BEFORE_A_CHECKPOINT and not name.startswith(f".{RUN_FILE}-")
    ):
        raise RevelaError(
            f"{out} has a {others[0]} that no run wrote: move it away, or give another --out"
        )
    shutil.rmtree(out)


def _record(out: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads((out / RUN_FILE).read_text())
        if "objective" in record:
            return record
    except (OSError, ValueError, TypeError):
        pass
    raise RevelaError(
        f"{out} holds no run of revela, as its {RUN_FILE} would tell: give another --out"
    )


LIBRARIES = (
    "revela",
    "torch",
    "transformers",
    "sentence-transformers",
    "peft",
    "accelerate",
    "datasets",
    "numpy",
)


def refuse_several_processes() -> None:
    """Refuse to be one of several that torchrun or accelerate started: they would train apart, and
    write into one folder.

    Raises:
        RevelaError: WORLD_SIZE is above 1.
    """
    if (count := int(os.environ.get("WORLD_SIZE") or 1)) > 1:
        raise RevelaError(
            f"a run takes one process and {count} were started (WORLD_SIZE): start revela without torchrun or accelerate"
        )


def environment() -> dict[str, Any]:
    """{"versions": {name: version}, "hardware": {name: what}}; threads as torch has them now."""
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:  # run from a checkout
            continue
    hardware: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
    }
    if hasattr(os, "sysconf"):
        hardware["memory"] = (
            f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
        )
    if torch.cuda.is_available():
        hardware["gpu"] = ", ".join(
            torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())
        )
    return {"versions": versions, "hardware": hardware}


def _cpu() -> str:
    """Its name where the system tells (Linux), and how many cores it has."""
    table = Path("/proc/cpuinfo")
    lines = table.read_text(errors="replace").splitlines() if table.is_file() else []
    name = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.processor() or "unknown",
    )
    return f"{name}, {os.cpu_count()} cores"
