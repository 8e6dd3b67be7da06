"""Atomic writes: files and folders are written under a temporary name and renamed at the end, when
the disk has them, so that a power cut too leaves the old or the new.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A temporary path that replaces ``path`` at the end; on an error ``path`` stays as it was.

    The temporary path has the same name, in a hidden folder beside ``path``; missing parent folders
    are created. Of a link the target is replaced, a file keeps its mode, and a pipe or a device is
    written to directly.

    Args:
        path: a file, which may exist, or a folder, which must be missing or empty.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with atomic_write(Path(folder, "runs", "scores.json")) as temporary:
    ...         _ = temporary.write_text("{}")
    ...     Path(folder, "runs", "scores.json").read_text()
    '{}'
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        yield path
        return
    if path.is_symlink():
        path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{path.name[:50]}-"  # with the whole of a long name it would be too long
    with tempfile.TemporaryDirectory(prefix=prefix, dir=path.parent) as hidden:
        temporary = Path(hidden) / path.name
        yield temporary
        if path.is_file():
            temporary.chmod(path.stat().st_mode)
        flush(temporary)
        temporary.replace(path)
        _flush_one(path.parent)


def flush(path: Path) -> None:
    """Wait until a file, or a folder with all that is in it, is on the disk."""
    for inside in path.rglob("*"):
        _flush_one(inside)
    _flush_one(path)


def _flush_one(path: Path) -> None:
    if os.name != "posix":  # elsewhere folders cannot be opened
        return
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def make_readable(folder: Path) -> None:
    """Let everybody read what is in a folder: safetensors writes files for their owner only."""
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
