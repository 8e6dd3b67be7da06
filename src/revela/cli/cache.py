"""``revela cache``: the indices that search and serve keep of folders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from revela.cli.flags import Switch
from revela.cli.printing import print_table
from revela.encoders.model_files import name_of
from revela.errors import RevelaError
from revela.files import bytes_of, cache_folder, remove_whole, writing
from revela.searching.folder_index import choice_file
from revela.searching.state import STATE, State
from revela.searching.sync import absolute
from revela.terminal import megabytes


def cache(path: Path | None = None, *, clear: Switch = False) -> None:
    """List the cached indices of folders and files that search and serve use, or remove them.

    Parameters
    ----------
    path:
        A folder or file whose indices --clear removes.
    clear:
        Remove the indices of the path, or all indices if no path is given.
    """
    if path is not None and not clear:
        raise RevelaError(f"revela cache lists all indices: leave {path} out, or give --clear")
    if clear:
        print(f"{megabytes(clear_cache(path))} freed")
        return
    found = sorted(cached_indices(), key=lambda cached: cached.last_use, reverse=True)
    rows = [[c.path, c.model, megabytes(c.bytes), f"{c.last_use:%Y-%m-%d %H:%M}"] for c in found]
    print_table("", ["path", "model", "size", "last use"], rows)


class CachedIndex(NamedTuple):
    """An index in the cache: the path of its text, its model, its size and its last use."""

    folder: Path
    path: str
    model: str
    bytes: int
    last_use: datetime


def cached_indices() -> Iterator[CachedIndex]:
    """The indices in the cache; an index that cannot be opened has no path."""
    for file in sorted((cache_folder() / "indices").glob(f"*/index/{STATE}")):
        folder, path, model = file.parent, "", "cannot be opened"
        used = datetime.fromtimestamp(file.stat().st_mtime)
        with suppress(RevelaError):
            state = State(folder)
            path = next(iter(state.sources.get("sources", [])), "")
            model = name_of(Path(state.info.model))
        yield CachedIndex(folder, path, model, bytes_of(folder), used)


def clear_cache(path: str | Path | None = None) -> int:
    """Remove the indices of a path from the cache, or all indices; returns their bytes.

    Raises:
        RevelaError: another process is writing to one, or the path has none.
    """
    source = None if path is None else absolute(path)
    found = [cached for cached in cached_indices() if source in (None, cached.path)]
    if source and not found:
        raise RevelaError(f"the cache holds no index of {path}: revela cache lists what it holds")
    for cached in found:
        # A process that synchronises the index, such as a server, locks only the index itself.
        with writing(cached.folder.parent), writing(cached.folder, wait=True):
            remove_whole(cached.folder)
            choice_file(cached.path).unlink(missing_ok=True)
    return sum(cached.bytes for cached in found)
