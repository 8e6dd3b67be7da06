"""Divide a corpus into parts for several processes: files, and row groups of large Parquet files.

A document's id and its place in its part do not depend on the process that reads it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from revela.errors import RevelaError
from revela.text.endings import COMPRESSED, suffix
from revela.text.load import filter_documents, first_claim
from revela.text.parallel import pack
from revela.text.readers import File, files_of, read_file
from revela.text.readers.common import FileChanged, ReadReport, size_and_time
from revela.text.readers.hub import PREFIX
from revela.text.readers.rows import Fields
from revela.text.readers.tables import read_parquet
from revela.types import Document, hash64

PART = 2**26  # bytes per part


@dataclass(frozen=True)
class Piece:
    """A file, or row groups of a Parquet file. ``state`` is the file's size and time of change."""

    file: File
    state: tuple[int, int]
    row_groups: range | None = None


Part = tuple[Piece, ...]


@dataclass(frozen=True)
class Owners:
    """The ids that rows of several parts have, and the first of these parts, as hashes (N,); the
    ids are in order.
    """

    ids_N: NDArray[np.uint64]
    parts_N: NDArray[np.uint64]

    @classmethod
    def of(cls, parts: Sequence[Part], ids: Sequence[NDArray[np.uint64]]) -> Owners:
        """From the hashes of each part's ids."""
        names = np.array([_hash_of(part) for part in parts], np.uint64)
        all_ids, first, counts = np.unique(
            np.concatenate([*ids, np.empty(0, np.uint64)]), return_index=True, return_counts=True
        )
        part_of = np.repeat(np.arange(len(parts)), [len(some) for some in ids])
        return cls(all_ids[counts > 1], names[part_of[first[counts > 1]]])

    def own(self, part: int, name: int) -> bool:
        """Whether a part's rows may have an id; both are hashes."""
        place = int(np.searchsorted(self.ids_N, np.uint64(name)))
        is_shared = place < len(self.ids_N) and int(self.ids_N[place]) == name
        return not is_shared or int(self.parts_N[place]) == part


def _hash_of(part: Part) -> int:
    return hash64(f"{part[0].file.path}:{part[0].row_groups}")


@dataclass(frozen=True)
class DocumentReader:
    """Reads the documents of a part; arguments as for ``load.read_corpus``. ``owners`` are needed
    for repeated ids if rows of several parts have the same.
    """

    fields: Fields
    min_words: int = 1
    rename_repeated: bool = False
    owners: Owners | None = None

    def documents(
        self, part: Part, report: ReadReport, taken: set[int] | None = None
    ) -> Iterator[Document]:
        """The documents of a part; RevelaError if a file has changed since it was listed. The
        hashes of its rows' ids are added to ``taken``.
        """
        if self.rename_repeated:
            report.names.update(piece.file.name for piece in part)
            is_first, owners, number = first_claim(taken), self.owners, _hash_of(part)
            report.claim = lambda name: (
                is_first(name) and (owners is None or owners.own(number, hash64(name)))
            )
        for piece in part:
            if size_and_time(piece.file.path) != piece.state:
                raise FileChanged(piece.file.path)
            reader = None
            if piece.row_groups is not None:
                reader = functools.partial(read_parquet, row_groups=piece.row_groups)
            documents = read_file(piece.file, self.fields, report, reader)
            yield from filter_documents(documents, False, self.min_words, report)


def parts_of(sources: Sequence[Path | str], report: ReadReport) -> list[Part]:
    """Divide a corpus, in order, into parts of about ``PART`` bytes. A larger file is a part of its
    own, unless it is Parquet.
    """
    pieces = list(_pieces(sources, report))
    runs = pack([length for _, length in pieces], PART)
    return [tuple(piece for piece, _ in pieces[run.start : run.stop]) for run in runs]


def _pieces(sources: Sequence[Path | str], report: ReadReport) -> Iterator[tuple[Piece, int]]:
    """Each piece, and its approximate bytes."""
    for source in sources:
        if str(source).startswith(PREFIX):
            raise RevelaError(
                f"{source}: --engine ray reads files that all workers see; download the dataset, "
                "or index it with --engine local"
            )
        for relative in files_of(source, report):
            file = replace(relative, path=relative.path.resolve())
            state = size_and_time(file.path)
            lengths = _row_group_lengths(file.path) if state[0] > PART else []
            if len(lengths) < 2:
                yield Piece(file, state), state[0]
            else:
                for run in pack(lengths, PART):
                    yield Piece(file, state, run), sum(lengths[run.start : run.stop])


def _row_group_lengths(path: Path) -> list[int]:
    """The bytes of each row group; [] if the file is damaged, or not Parquet."""
    if suffix(path) != ".parquet" or path.suffix in COMPRESSED:
        return []
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_metadata(path)
    except (pa.ArrowException, OSError):  # the error comes when it is read
        return []
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    return [sum(g.column(i).total_compressed_size for i in range(g.num_columns)) for g in groups]
