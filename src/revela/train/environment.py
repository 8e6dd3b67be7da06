"""Where a run runs: in one process; and versions and machine, which its numbers hang on. Kept in run.json, for whoever repeats it."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from revela.errors import RevelaError

LIBRARIES = ("revela", "torch", "transformers", "sentence-transformers", "peft", "accelerate", "datasets", "numpy")


def refuse_several_processes() -> None:
    """Refuse to be one of several that torchrun or accelerate started: they would train apart, and write into one folder.

    Raises:
        RevelaError: WORLD_SIZE is above 1.
    """
    if (count := int(os.environ.get("WORLD_SIZE") or 1)) > 1:
        raise RevelaError(f"a run takes one process and {count} were started (WORLD_SIZE): start revela without torchrun or accelerate")


def environment() -> dict[str, Any]:
    """{"versions": {name: version}, "hardware": {name: what}}; threads as torch has them now."""
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:  # run from a checkout
            continue
    hardware: dict[str, Any] = {"system": f"{platform.system()} {platform.machine()}", "cpu": _cpu(), "threads": torch.get_num_threads()}
    if hasattr(os, "sysconf"):
        hardware["memory"] = f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
    if torch.cuda.is_available():
        hardware["gpu"] = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return {"versions": versions, "hardware": hardware}


def _cpu() -> str:
    """Its name where the system tells (Linux), and how many cores it has."""
    table = Path("/proc/cpuinfo")
    lines = table.read_text(errors="replace").splitlines() if table.is_file() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor() or "unknown")
    return f"{name}, {os.cpu_count()} cores"
