"""``revela cache``: the indices that search and serve keep of folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from revela.cli.printing import print_table
from revela.errors import RevelaError


def cache(
    path: Path | None = None, *, clear: Annotated[bool, Parameter(negative=())] = False
) -> None:
    """List the indices that search and serve keep of folders and files, or remove them.

    Parameters
    ----------
    path:
        Of a folder or a file, whose indices --clear removes.
    clear:
        Remove the indices of a path, or all.
    """
    if path is not None and not clear:
        raise RevelaError(f"revela cache lists all indices: leave {path} out, or give --clear")
    from revela.searching.folder_index import cached_indices, clear_cache, megabytes

    if clear:
        print(f"{megabytes(clear_cache(path))} are free again")
        return
    found = sorted(cached_indices(), key=lambda cached: cached.last_use, reverse=True)
    rows = [[c.path, c.model, megabytes(c.bytes), f"{c.last_use:%Y-%m-%d %H:%M}"] for c in found]
    print_table("", ["path", "model", "size", "last use"], rows)
