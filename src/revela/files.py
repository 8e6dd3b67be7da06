"""Atomic writes: files and folders are written under a temporary name and renamed at the end."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A temporary path that replaces ``path`` at the end; on an error ``path`` stays as it was.

    The temporary path has the same name, in a hidden folder beside ``path``; missing parent folders
    are created.

    Args:
        path: a file, which may exist, or a folder, which must be missing or empty.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with atomic_write(Path(folder, "runs", "scores.json")) as temporary:
    ...         _ = temporary.write_text("{}")
    ...     Path(folder, "runs", "scores.json").read_text()
    '{}'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as hidden:
        temporary = Path(hidden) / path.name
        yield temporary
        temporary.replace(path)


def make_readable(folder: Path) -> None:
    """Let everybody read what is in a folder: safetensors writes files for their owner only."""
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
