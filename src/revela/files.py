"""Files and folders that are whole or not there: written under a temporary name, and renamed when
whole.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of ``path`` at the end; if anything is raised,
    ``path`` stays as it was.

    The folder of ``path`` is made if need be. What is given has the same name, in a hidden folder
    beside ``path``.

    Args:
        path: a file, which may exist, or a folder, which may not unless it is empty.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as hidden:
        temporary = Path(hidden) / path.name
        yield temporary
        temporary.replace(path)
