"""What a run was begun with, kept in its folder, so that it is resumed with the same."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from revela.config import Recipe
from revela.errors import RevelaError
from revela.files import whole
from revela.train.trainer import saved_checkpoints

RUN_FILE = "run.json"
FREE = frozenset({"max_steps", "max_minutes", "max_tokens_read", "check_every", "checks", "save_every", "log_every", "threads"})


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """The settings of a run, as JSON gives them back."""
    settings: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(recipe)))
    return settings


def write_record(settings: dict[str, Any], about: dict[str, Any], out: Path) -> None:
    """run.json: every setting, and under ``about`` what the run began with; a resumed run keeps what its first part wrote there."""
    path = out / RUN_FILE
    if path.is_file():
        about = json.loads(path.read_text()).get("about", about)
    with whole(path) as temporary:
        temporary.write_text(json.dumps({**settings, "about": about}, indent=1))


def checkpoint_to_resume(settings: dict[str, Any], group_folder: str, out: Path) -> Path:
    """The last checkpoint of the run in ``out``; ``group_folder`` is the fingerprint of its folder of groups, "" if it has none.

    Raises:
        RevelaError: there is none, or the run was begun with something else.
    """
    if not (out / RUN_FILE).is_file():
        raise RevelaError(f"{out} holds no run to resume: it has no {RUN_FILE}")
    begun = json.loads((out / RUN_FILE).read_text())
    if begun.get("about", {}).get("group_folder", "") != group_folder:
        raise RevelaError(f"{out} was begun on other groups: resume with the folder of groups as it was, or start again with another --out")
    changed = sorted(k for k in settings if k not in FREE and begun.get(k) != settings[k])
    if changed:
        raise RevelaError(f"{out} was begun with other settings ({', '.join(changed)}): resume with the same")
    checkpoints = saved_checkpoints(out / "checkpoints")
    if not checkpoints:
        raise RevelaError(f"{out} has no checkpoint to resume from: start again with another --out")
    return checkpoints[-1]
