"""Search a folder of files, or a file, as if it were an index: its index is made, found or brought
up to date in the user's cache folder, by path, model and settings.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from revela.corpus.load import Reading
from revela.embedded import cache_folder
from revela.encoder.prompts import OWN, Given, Prompts, named_prompts, prompts_of
from revela.encoder.static_encoder import gives_tokens
from revela.errors import RevelaError
from revela.files import remove_whole, writing
from revela.index.fusion import check_weight
from revela.index.index import Index
from revela.index.manifest import FORMAT, INFO, is_finished, read_info
from revela.index.sources import FILE, Sources
from revela.index.sync import Scan, Synced, absolute, make, sync
from revela.model_files import fingerprint, name_of, resolve
from revela.retriever import load
from revela.settings import OFFLINE_EMBEDDER, Indexing
from revela.silence import duration
from revela.types import Hits

log = logging.getLogger(__name__)
READING = Reading(max_bad_share=1)  # the log names what cannot be read


def open_any(
    path: str | Path,
    model: str | Path | None = None,
    *,
    cached: bool = True,
    progress: bool = False,
    prompts: Given = OWN,
    **options: Any,
) -> Index:
    """Open an index; or that of a folder of files or a file, which is brought up to date first.

    Args:
        path: of an index, or of text.
        model: the retriever; by default that of the index, or embedded:minilm-l6 for text.
        cached: keep the index of text in the cache; if not, it is removed with the last reference
            to what is returned.
        progress: show a bar.
        prompts: of queries and of passages, in place of the model's own (None).
        options: as for ``Index.open``.

    Raises:
        RevelaError: the path is neither, it holds no document, or as for ``Index.open``.
    """
    check_weight(options.get("weight"))
    path = Path(path)
    if (path / INFO).is_file():
        return Index.open(path, model, prompts=prompts, **options)
    if not path.exists():
        raise RevelaError(
            f"{path} is not an index, and no folder or file of text either: give the path of one"
        )
    folder = resolve(str(model or OFFLINE_EMBEDDER))
    settings = Indexing(keep_tokens=gives_tokens(folder))
    options |= dict(default_rerank="tokens" if settings.keep_tokens else None)
    options |= dict(prompts=prompts_of(folder, prompts))
    if cached:
        place = _place(path.resolve(), folder, settings, options["prompts"])
        with writing(place.parent, wait=True):
            index = _synced(path, folder, settings, place, progress, options)
        os.utime(place / FILE)  # when it was used last
    else:
        temporary = tempfile.TemporaryDirectory(prefix="revela-")
        place = Path(temporary.name) / "index"
        index = _synced(path, folder, settings, place, progress, options)
        weakref.finalize(index, temporary.cleanup)
    return index


def search(
    path: str | Path,
    query: str,
    k: int = 10,
    model: str | Path | None = None,
    prompts: Given = OWN,
    **options: Any,
) -> Hits:
    """The k best documents of a folder of files, a file or an index (``open_any``).

    Args:
        path, model, prompts: as for ``open_any``.
        query, k, options: as for ``Index.search``.
    """
    return open_any(path, model, prompts=prompts).search(query, k, **options)


def _place(path: Path, model: Path, settings: Indexing, prompts: Prompts) -> Path:
    """Where the index of a text is kept."""
    made: list[Any] = [os.fsencode(path).hex(), fingerprint(model), asdict(settings), FORMAT]
    if prompts != named_prompts(model):
        made.append(prompts)
    digest = hashlib.blake2b(json.dumps(made, sort_keys=True).encode(), digest_size=8)
    return cache_folder() / "indices" / digest.hexdigest() / "index"


def _synced(
    path: Path, model: Path, settings: Indexing, place: Path, progress: bool, options: Any
) -> Index:
    """The index of a text in its place, up to date."""
    start = time.perf_counter()
    how: Any = dict(yes=True, progress=progress)
    if is_finished(place):
        index = Index.open(place, model, **options)
        synced, report = sync(index, [path], READING, wait=True, **how)
    else:
        load.keep_graph(model)
        scan = Scan([path], READING)

        def create(_: object) -> Index:
            return Index.create(place, model, settings=settings, prompts=options["prompts"])

        made, synced = make(scan, create, **how)
        report, index = scan.report, Index.open(place, model, encoder=made.encoder, **options)
    for line in report.lines()[1:] if synced.any else []:
        log.info(line)
    log.info(_summary(path, place, synced, time.perf_counter() - start))
    return index


def _summary(path: Path, place: Path, synced: Synced, seconds: float) -> str:
    kept = f"its index is {place} ({megabytes(bytes_of(place))})"
    if not synced.any:
        return f"{path} is unchanged, {synced.unchanged:,} documents; {kept}"
    spent = ((step, seconds) for step, seconds in synced.seconds.items() if seconds >= 0.05)
    steps = ", ".join(f"{step} {seconds:.1f}" for step, seconds in spent)
    return f"{path}: {synced.describe()}; {duration(seconds / 60)} ({steps}); {kept}"


def bytes_of(folder: Path) -> int:
    """The size of a folder on disk."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def megabytes(size: int) -> str:
    """A size, for people."""
    return f"{size / 1e6:,.1f} MB"


@dataclass(frozen=True)
class CachedIndex:
    """An index in the cache: of which text, by which model, its bytes, and when it was used."""

    folder: Path
    path: str
    model: str
    bytes: int
    last_use: datetime


def cached_indices() -> Iterator[CachedIndex]:
    """The indices in the cache."""
    for file in sorted((cache_folder() / "indices").glob(f"*/index/{FILE}")):
        folder = file.parent
        used = datetime.fromtimestamp(file.stat().st_mtime)
        with Sources.opened(folder) as record:
            path = next(iter(record.paths), "")
        model = name_of(Path(read_info(folder).model))
        yield CachedIndex(folder, path, model, bytes_of(folder), used)


def clear_cache(path: str | Path | None = None) -> int:
    """Remove the indices of a text from the cache, or all; returns their bytes.

    Raises:
        RevelaError: another process is writing to one, or the text has none.
    """
    source = None if path is None else absolute(path)
    found = [cached for cached in cached_indices() if source in (None, cached.path)]
    if source and not found:
        raise RevelaError(f"the cache holds no index of {path}: revela cache lists what it holds")
    for cached in found:
        with writing(cached.folder.parent):
            remove_whole(cached.folder)
    return sum(cached.bytes for cached in found)
