"""Store groups on disk: a folder of Arrow shards of chunks, group after group, to train on without
the corpus.

Groups are assigned to shards round-robin, and an epoch visits the shards round-robin. If P
processes take batches in turn, and P divides the number of shards, each reads shards of its own.
The order is the same for any P.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from revela.errors import RevelaError, first_line
from revela.files import atomic_write
from revela.text.spool import ArrowList, read, write
from revela.training.groups.strategies import Groups, Indices
from revela.types import Chunk, Document

MANIFEST, SAMPLE, HELD_OUT = "groups.json", "documents.arrow", "held-out.arrow"
FORMAT = 1
SHARDS, MIN_GROUPS = 16, 4  # at most so many shards, and so many groups in each at least
SAMPLE_SIZE = 2000  # documents stored whole, for the probe of heads
BLOCK = 2**16  # chunks looked up at a time
AGAIN = "build the groups again with revela groups --out"


@dataclass(frozen=True, slots=True)
class Member(Chunk):
    """A chunk in a group; ``name`` is its document's title, or the id if it has none."""

    name: str = ""


@dataclass(frozen=True)
class GroupedCorpus:
    """Training documents, held-out documents, chunks (``rows``), and groups of chunk indices."""

    documents: ArrowList[Document]
    held_out: Sequence[Document]
    rows: ArrowList[Chunk]
    groups: Iterable[list[int]]


class GroupFolder:
    """Groups stored by ``save_groups``.

    Opening checks the sizes of files; ``check`` reads all shards.

    Attributes:
        size: chunks per group.
        rows: all chunks; group g is rows g * size up to (g + 1) * size, in the order of the corpus.
        documents: a sample of the documents.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        file = folder / MANIFEST
        if not file.is_file():
            raise RevelaError(f"the group folder {folder} lacks {MANIFEST}: {AGAIN}")
        try:
            manifest = json.loads(file.read_text(encoding="utf-8"))
            if manifest["format"] != FORMAT:
                raise RevelaError(f"{folder} was written by another version of revela: {AGAIN}")
            self.size = int(manifest["size"])
            self.settings: dict[str, Any] = manifest["settings"]
            self._shards: list[dict[str, Any]] = manifest["shards"]
            self._counts = [int(shard["groups"]) for shard in self._shards]
            for shard in self._shards:
                file, size = folder / shard["file"], int(shard["bytes"])
                if (found := file.stat().st_size) != size:
                    raise RevelaError(f"{file} has {found:,} bytes of {size:,}: {AGAIN}")
            for name, digest in manifest["digests"].items():
                _check_digest(folder / name, digest)
            self.rows = read(Member, [folder / shard["file"] for shard in self._shards])
            self.documents = read(Document, [folder / SAMPLE])
            self.held_out = read(Document, [folder / HELD_OUT])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RevelaError(f"{folder} is damaged ({first_line(error)}): {AGAIN}") from error
        if len(self.rows) != len(self) * self.size:
            raise RevelaError(f"{folder} does not have the number of chunks in {MANIFEST}: {AGAIN}")
        shards = json.dumps(self._shards).encode()
        self.fingerprint = hashlib.blake2b(shards, digest_size=8).hexdigest()

    def __len__(self) -> int:
        return sum(self._counts)

    def check(self) -> None:
        """Raise RevelaError if a shard has changed since it was written."""
        for shard in self._shards:
            _check_digest(self.folder / shard["file"], shard["digest"])

    def check_settings(self, given: Mapping[str, Any]) -> None:
        """Raise RevelaError if a run on these groups is given a setting of the corpus that differs
        from the stored one.
        """
        for name, value in given.items():
            if name != "language" and self.settings.get("corpus", {}).get(name, value) != value:
                flag = name.replace("_", "-")
                raise RevelaError(
                    f"--{flag} has no effect on {self.folder}, whose groups were stored with "
                    f"--{flag} {self.settings['corpus'][name]}: leave it out, or build others by "
                    "revela groups"
                )

    def members(self, group: Sequence[int]) -> list[Member]:
        """The chunks of a group, given as indices."""
        return [self.rows[i] for i in group]

    def order(self, seed: int, batch: int = 1, size: int = 0) -> Groups:
        """Epoch -> every group once, as indices of ``rows``; ``batch`` consecutive groups are from
        one shard.

        The order of groups and of their chunks depends on seed and epoch only. Groups of another
        ``size`` than the stored one are cut from the stored groups of a shard in sequence: each
        stored group gives two of half its size; groups of 12 from groups of 16 have chunks of one
        or two. Fewer than ``size`` chunks of a shard are left over.
        """
        size = size or self.size
        together = math.lcm(batch * size, self.size) // self.size  # stored groups read at a time
        firsts = np.cumsum([0, *self._counts])

        def groups(epoch: int) -> Iterator[list[int]]:
            rng = np.random.default_rng([seed, epoch])
            counts = zip(firsts, self._counts, strict=False)
            shards = [first + rng.permutation(count) for first, count in counts]
            shards = [shards[i] for i in rng.permutation(len(shards))]
            for start in range(0, max(self._counts), together):
                for shard in shards:
                    stored = shard[start : start + together, None]
                    chunks = (stored * self.size + np.arange(self.size)).ravel()
                    for first in range(0, len(chunks) - size + 1, size):
                        yield chunks[first + rng.permutation(size)].tolist()

        return groups


def is_group_folder(path: Path) -> bool:
    """Whether this is a folder of groups, complete or not."""
    return (path / MANIFEST).is_file() or any(path.glob("shard-*.arrow"))


def save_groups(
    out: Path, corpus: GroupedCorpus, size: int, settings: dict[str, Any]
) -> GroupFolder:
    """Write groups of ``size`` chunks into a new folder."""
    rows, documents = corpus.rows, corpus.documents
    groups = iter(corpus.groups)
    batches = iter(lambda: list(islice(groups, max(1, BLOCK // size))), [])
    blocks = (
        _members(rows, np.sort(np.array(batch, dtype=np.int64)).ravel(), documents)
        for batch in batches
    )
    rng = random.Random(settings.get("seed", 0))
    sample = rng.sample(range(len(documents)), min(SAMPLE_SIZE, len(documents)))
    with atomic_write(out) as folder:
        folder.mkdir()
        counts = _write_shards(folder, blocks, size)
        if not counts:
            raise RevelaError(
                f"no group of {size} can be made of {len(rows):,} chunks: add text, or lower "
                "--chunk-words or --group-size"
            )
        write(Document, documents.select(sorted(sample)), folder / SAMPLE)
        write(Document, corpus.held_out, folder / HELD_OUT)
        shards = []
        for name in sorted(counts):
            about = {"bytes": (folder / name).stat().st_size, "digest": _digest(folder / name)}
            shards.append({"file": name, "groups": counts[name], **about})
        manifest = {
            "format": FORMAT,
            "size": size,
            "groups": sum(counts.values()),
            "settings": settings,
            "shards": shards,
            "digests": {name: _digest(folder / name) for name in (SAMPLE, HELD_OUT)},
        }
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return GroupFolder(out)


def _write_shards(folder: Path, blocks: Iterable[Any], size: int) -> dict[str, int]:
    """Assign groups to shards round-robin; returns file -> number of groups.

    A block is a table of ``Member`` with complete groups.
    """
    import pyarrow as pa

    writers: dict[str, Any] = {}
    counts: dict[str, int] = {}
    for table in blocks:
        groups = len(table) // size
        if not writers:
            number = max(1, min(SHARDS, groups // MIN_GROUPS))
            names = [f"shard-{i:02}.arrow" for i in range(number)]
            writers = {name: pa.ipc.new_stream(folder / name, table.schema) for name in names}
            counts = dict.fromkeys(names, 0)
        shard_of = np.repeat((sum(counts.values()) + np.arange(groups)) % len(writers), size)
        for i, (name, writer) in enumerate(writers.items()):
            rows = table.take(np.flatnonzero(shard_of == i))
            writer.write_table(rows.combine_chunks())
            counts[name] += len(rows) // size
    for writer in writers.values():
        writer.close()
    return counts


def _members(rows: ArrowList[Chunk], indices: Indices, documents: ArrowList[Document]) -> Any:
    """These chunks as a table of ``Member``."""
    import pyarrow as pa
    import pyarrow.compute as pc

    chunks = rows.take(indices, ["document", "text", "query"])
    owners, place = np.unique(chunks["document"].to_numpy(), return_inverse=True)
    columns = documents.take(owners, ["id", "title"])
    names = pc.if_else(pc.equal(columns["title"], ""), columns["id"], columns["title"])
    return chunks.append_column("name", names.take(pa.array(place)))


def _digest(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()[:16]


def _check_digest(file: Path, digest: str) -> None:
    if _digest(file) != digest:
        raise RevelaError(f"{file} has changed since it was written: {AGAIN}")
