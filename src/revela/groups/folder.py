"""Groups on disk: a folder of Arrow shards that hold the chunks themselves, group after group, so
that training needs no corpus.

Groups are dealt to the shards in turn. An epoch visits the shards in turn as well, each in an order
of its own: so when P processes take batches in turn and P divides the number of shards, each reads
its own shards, and the order is the same for any P. The manifest says how long every shard is; the
folder gets its name when it is whole.
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from revela.corpus.arrow_list import ArrowList, read, write
from revela.corpus.judgements import judged
from revela.errors import RevelaError, first_line
from revela.files import atomic_write
from revela.groups.documents import Groups
from revela.processes import is_first
from revela.settings import Recipe
from revela.types import Chunk, Document

MANIFEST, SAMPLE, HELD_OUT = "groups.json", "documents.arrow", "held-out.arrow"
FORMAT = 1
SHARDS, FEWEST = 16, 4  # shards, and groups that a shard should have at least
KEPT = 2000  # documents kept whole, for the heads' probe
BLOCK = 2**16  # chunks looked up at a time
# Bytes of shards that the first process reads whole when it opens them, at some .5 GB/s, so that
# none has changed or points elsewhere; of a larger folder only the lengths are compared.
CHECKED = 2**34


@dataclass(frozen=True, slots=True)
class Member(Chunk):
    """A chunk in a group; ``name`` is its document's title, or id."""

    name: str = ""


class GroupFolder:
    """ArrowList groups; ``save_groups`` writes a folder of them.

    Args:
        folder: made by ``save_groups``.

    Attributes:
        size: chunks a group.
        rows: all chunks; group g is rows g * size up to (g + 1) * size, in the order of the corpus.
        documents: a sample of the documents that the groups were made of.
        held_out: documents that were held out of them.
        settings: what the groups were made by.
        fingerprint: of the groups themselves.

    Raises:
        RevelaError: it is none, or not as it was written.
    """

    def __init__(self, folder: Path) -> None:
        manifest = _manifest(folder)
        files = [folder / shard["file"] for shard in manifest["shards"]]
        checks = is_first() and sum(shard["bytes"] for shard in manifest["shards"]) <= CHECKED
        for file, shard in zip(files, manifest["shards"], strict=True):
            if not file.is_file() or file.stat().st_size != shard["bytes"]:
                found = (
                    f"has {file.stat().st_size:,} bytes of {shard['bytes']:,}"
                    if file.is_file()
                    else "is missing"
                )
                raise RevelaError(
                    f"{file} {found}: build the groups again with revela groups --out"
                )
            if checks:
                _refuse_changed(file, shard["digest"])
        self.folder, self.size, self.settings = (
            folder,
            int(manifest["size"]),
            dict[str, Any](manifest["settings"]),
        )
        self.fingerprint = hashlib.blake2b(
            json.dumps(manifest["shards"]).encode(), digest_size=8
        ).hexdigest()
        self._counts = [int(shard["groups"]) for shard in manifest["shards"]]
        try:
            for name in (SAMPLE, HELD_OUT) if checks and "digests" in manifest else ():
                _refuse_changed(folder / name, manifest["digests"][name])
            self.rows = read(Member, files)
            self.documents = read(Document, [folder / SAMPLE])
            self.held_out = read(Document, [folder / HELD_OUT])
            for items in (self.rows, self.documents, self.held_out) if checks else ():
                items.validate()
        except (OSError, ValueError) as error:
            raise RevelaError(
                f"{folder} is damaged ({first_line(error)}): build the groups again with "
                "revela groups"
            ) from error
        if len(self.rows) != len(self) * self.size:
            raise RevelaError(
                f"{folder} holds {len(self.rows):,} chunks, and {MANIFEST} says otherwise: build "
                "the groups again"
            )

    def __len__(self) -> int:
        return sum(self._counts)

    def members(self, group: Sequence[int]) -> list[Member]:
        """The chunks of a group, in this order."""
        return [self.rows[i] for i in group]

    def order(self, seed: int, together: int = 1) -> Groups:
        """epoch -> every group once, as indices of ``rows``; their order, and that of their chunks,
        depends on seed and epoch alone.

        Args:
            seed: of the run.
            together: groups a batch, which come from one shard (but for the last of a shard).
        """
        firsts = np.cumsum([0, *self._counts])

        def groups(epoch: int) -> Iterator[list[int]]:
            rng = np.random.default_rng([seed, epoch])
            lanes = [
                first + rng.permutation(count)
                for first, count in zip(firsts, self._counts, strict=False)
            ]
            lanes = [lanes[i] for i in rng.permutation(len(lanes))]
            for start in range(0, max(self._counts), together):
                for lane in lanes:
                    for group in lane[start : start + together].tolist():
                        yield (group * self.size + rng.permutation(self.size)).tolist()

        return groups


def is_group_folder(path: Path) -> bool:
    """Whether this is a folder of groups, whole or not."""
    return (path / MANIFEST).is_file() or any(path.glob("shard-*.arrow"))


def refuse_out(recipe: Recipe, out: Path) -> None:
    """Refuse a folder that is taken, and groups that nobody can build before training."""
    if out.exists():
        raise RevelaError(f"{out} exists: choose another --out")
    if recipe.groups.kind == "iterative":
        raise RevelaError(
            "iterative groups are built while a retriever trains: give --groups iterative to "
            "revela train"
        )
    if judged(recipe):
        raise RevelaError(
            "groups are stored without the judgements that --pairs reads: give --pairs to revela "
            "train, with the corpus itself"
        )


def save_groups(
    out: Path,
    rows: ArrowList[Chunk],
    groups: Iterable[list[int]],
    documents: ArrowList[Document],
    *,
    size: int,
    sample: Iterable[int],
    held_out: Iterable[Document],
    settings: dict[str, Any],
    shards: int = 0,
) -> GroupFolder:
    """Write groups into a folder that does not exist yet.

    Args:
        out: the folder.
        rows: the chunks.
        groups: indices of ``rows``, ``size`` each.
        documents: what the chunks' ``document`` refers to.
        size: chunks per group.
        sample: which documents to keep whole, for the heads' probe.
        held_out: documents kept for the label-free check.
        settings: what the groups were made by.
        shards: number of files; 0: ``SHARDS``, or fewer for few groups.
    """
    blocks = (
        _members(rows, np.sort(np.array(some, dtype=np.int64)).ravel(), documents)
        for some in batched(groups, max(1, BLOCK // size))
    )
    with new_folder(out) as folder:
        counts = write_shards(folder, blocks, size, shards)
        if not counts:
            raise RevelaError(
                f"no group of {size} can be made of {len(rows):,} chunks: add text, or lower "
                "--chunk-words or --group-size"
            )
        finish_folder(folder, counts, size, documents.chosen(sample), held_out, settings)
    return GroupFolder(out)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder that becomes ``out`` when it is whole.

    Raises:
        RevelaError: another process has made one meanwhile.
    """
    try:
        with atomic_write(out) as folder:
            folder.mkdir()
            yield folder
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        raise RevelaError(
            f"{out} was made by another process meanwhile: use that, or choose another --out"
        ) from error


def finish_folder(
    folder: Path,
    counts: Mapping[str, int],
    size: int,
    sample: Iterable[Document],
    held_out: Iterable[Document],
    settings: dict[str, Any],
) -> None:
    """Write what stands beside the shards.

    Args:
        folder: with the shards.
        counts: groups of each shard, by the name of its file.
        size, sample, held_out, settings: as for ``save_groups``.
    """
    write(Document, sample, folder / SAMPLE)
    write(Document, held_out, folder / HELD_OUT)
    shards = [
        {
            "file": name,
            "groups": counts[name],
            "bytes": (folder / name).stat().st_size,
            "digest": _digest(folder / name),
        }
        for name in sorted(counts)
    ]
    counted = {"format": FORMAT, "size": size, "groups": sum(counts.values())}
    digests = {name: _digest(folder / name) for name in (SAMPLE, HELD_OUT)}
    manifest = {**counted, "settings": settings, "shards": shards, "digests": digests}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def shard_name(number: int, shards: int) -> str:
    """The file of a shard; names sort as numbers do."""
    return f"shard-{number:0{max(2, len(str(shards - 1)))}}.arrow"


def write_shards(folder: Path, blocks: Iterable[Any], size: int, shards: int) -> dict[str, int]:
    """Deal groups to the shards in turn; the number of groups of each shard, by its file.

    Args:
        folder: of the shards.
        blocks: tables of ``Member``, some whole groups each.
        size: chunks per group.
        shards: as for ``save_groups``.
    """
    import pyarrow as pa

    writers: dict[str, Any] = {}
    counts: dict[str, int] = {}
    for table in blocks:
        groups = len(table) // size
        if not writers:
            number = min(shards, groups) or max(1, min(SHARDS, groups // FEWEST))
            names = [shard_name(i, number) for i in range(number)]
            writers = {name: pa.ipc.new_stream(folder / name, table.schema) for name in names}
            counts = dict.fromkeys(names, 0)
        which = np.repeat((sum(counts.values()) + np.arange(groups)) % len(writers), size)
        for i, (name, writer) in enumerate(writers.items()):
            mine = table.take(np.flatnonzero(which == i))
            writer.write_table(mine.combine_chunks())
            counts[name] += len(mine) // size
    for writer in writers.values():
        writer.close()
    return counts


def batched(groups: Iterable[list[int]], count: int) -> Iterator[list[list[int]]]:
    """So many groups at a time."""
    rest = iter(groups)
    while some := list(islice(rest, count)):
        yield some


def _digest(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()[:16]


def _refuse_changed(file: Path, digest: str) -> None:
    if _digest(file) != digest:
        raise RevelaError(
            f"{file} has changed since it was written: build the groups again with "
            "revela groups --out"
        )


def _members(
    rows: ArrowList[Chunk], indices: NDArray[np.int64], documents: ArrowList[Document]
) -> Any:
    """These chunks as a table of ``Member``."""
    import pyarrow as pa
    import pyarrow.compute as pc

    chunks = rows.take(indices, ["document", "text", "query"])
    owners, place = np.unique(chunks["document"].to_numpy(), return_inverse=True)
    known = documents.take(owners, ["id", "title"])
    names = pc.if_else(pc.equal(known["title"], ""), known["id"], known["title"]).take(
        pa.array(place)
    )
    return chunks.append_column("name", names)


def _manifest(folder: Path) -> dict[str, Any]:
    file = folder / MANIFEST
    if not file.is_file():
        raise RevelaError(
            f"{folder} is no whole group folder, it has no {MANIFEST}: build the groups again "
            "with revela groups --out"
        )
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise RevelaError(
                f"{folder} was written by another version of revela: build the groups again with "
                "revela groups --out"
            )
        _ = (
            manifest["size"],
            manifest["settings"],
            [(s["file"], s["groups"], s["bytes"], s["digest"]) for s in manifest["shards"]],
            # Folders of earlier versions have none.
            "digests" not in manifest or [manifest["digests"][n] for n in (SAMPLE, HELD_OUT)],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise RevelaError(
            f"{file} is damaged: build the groups again with revela groups --out"
        ) from error
    return dict(manifest)
