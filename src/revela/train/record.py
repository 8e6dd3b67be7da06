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


def record_of(recipe: Recipe, group_folder: str) -> dict[str, Any]:
    """The settings of a run, and the fingerprint of its folder of groups ("" if it has none), as JSON gives them back."""
    record: dict[str, Any] = json.loads(json.dumps({**dataclasses.asdict(recipe), "group_folder": group_folder}))
    return record


def write_record(record: dict[str, Any], out: Path) -> None:
    """Write a record into the folder of its run."""
    with whole(out / RUN_FILE) as temporary:
        temporary.write_text(json.dumps(record, indent=1))


def checkpoint_to_resume(record: dict[str, Any], out: Path) -> Path:
    """The last checkpoint of the run in ``out``.

    Raises:
        RevelaError: there is none, or the run was begun with something else than this record says.
    """
    if not (out / RUN_FILE).is_file():
        raise RevelaError(f"{out} holds no run to resume: it has no {RUN_FILE}")
    begun = json.loads((out / RUN_FILE).read_text())
    if begun.get("group_folder", "") != record["group_folder"]:
        raise RevelaError(f"{out} was begun on other groups: resume with the folder of groups as it was, or start again with another --out")
    changed = sorted(k for k in record if k not in {*FREE, "group_folder"} and begun.get(k) != record[k])
    if changed:
        raise RevelaError(f"{out} was begun with other settings ({', '.join(changed)}): resume with the same")
    checkpoints = saved_checkpoints(out / "checkpoints")
    if not checkpoints:
        raise RevelaError(f"{out} has no checkpoint to resume from: start again with another --out")
    return checkpoints[-1]
