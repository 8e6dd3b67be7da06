"""Documents and chunks on disk, read as a sequence: a corpus may be larger than memory.

Items are written batch by batch to a temporary Arrow file, which is memory-mapped and deleted with
the last view of it. Pages are released once they are read: the operating system would do so only
when memory runs short, and until then they count towards the process's memory limit.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from revela.corpus.parallel import batches
from revela.errors import RevelaError
from revela.types import Vectors

Item = TypeVar("Item")
Kept = TypeVar("Kept", covariant=True)
BATCH = 2**22  # characters per record batch


class ArrowList(Sequence[Kept], Generic[Kept]):
    """A list of dataclass instances in Arrow files; made by ``arrow_list`` or ``read``.

    Fields may be strings, integers and mappings of strings and numbers.

    Args:
        kind: the dataclass.
        paths: the files, each an Arrow stream.
        maps: the memory map of each file.
        batches: the record batches of all files.
        folder: a temporary folder, deleted with the last view of the list.
        rows: the items of this view, in order; None: all.
    """

    def __init__(
        self,
        kind: type[Kept],
        paths: Sequence[Path],
        maps: Sequence[mmap.mmap],
        batches: Sequence[Any],
        folder: Any,
        rows: NDArray[np.int64] | None = None,
    ) -> None:
        self.paths = list(paths)
        self._kind, self._maps, self._batches, self._folder = kind, maps, batches, folder
        fields = dataclasses.fields(kind)  # type: ignore[arg-type]
        self._mappings = [i for i, field in enumerate(fields) if field.default_factory is dict]
        self._ends = np.cumsum([batch.num_rows for batch in batches], dtype=np.int64)
        self._rows = rows

    def __len__(self) -> int:
        if self._rows is not None:
            return len(self._rows)
        return int(self._ends[-1]) if len(self._ends) else 0

    @overload
    def __getitem__(self, index: int) -> Kept: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Kept]: ...
    def __getitem__(self, index: int | slice) -> Kept | Sequence[Kept]:
        if isinstance(index, slice):
            found = [self[i] for i in range(*index.indices(len(self)))]
            self._release_pages()
            return found
        batch, row = self._place(index)
        return self._item([column[row].as_py() for column in batch.columns])

    def _item(self, values: list[Any]) -> Kept:
        for place in self._mappings:
            if place < len(values):  # older files have fewer columns
                values[place] = json.loads(values[place])
        return self._kind(*values)

    def value(self, index: int, name: str) -> Any:
        """One field of one item."""
        batch, row = self._place(index)
        return batch.column(name)[row].as_py()

    def _place(self, index: int) -> tuple[Any, int]:
        """The batch that holds an item, and its row there."""
        place = range(len(self))[index]  # resolves negative indices and raises IndexError
        row = place if self._rows is None else int(self._rows[place])
        batch = int(np.searchsorted(self._ends, row, side="right"))
        return self._batches[batch], row - (int(self._ends[batch - 1]) if batch else 0)

    def _read(self) -> Iterator[Any]:
        """All batches, one after another."""
        for batch in self._batches:
            yield batch
            self._release_pages()

    def _release_pages(self) -> None:
        """Free the memory of the pages read so far; reading them again loads them again."""
        for mapped in self._maps:
            if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
                mapped.madvise(mmap.MADV_DONTNEED)

    def validate(self) -> None:
        """Refuse files of others whose offsets point elsewhere, into memory that is not theirs.

        Raises:
            ValueError: they do, or a text is not UTF-8.
        """
        for batch in self._read():
            batch.validate(full=True)

    def __iter__(self) -> Iterator[Kept]:
        if self._rows is not None and (np.diff(self._rows) <= 0).any():
            yield from (self[i] for i in range(len(self)))
            return
        start = 0
        for batch, end in zip(self._read(), self._ends.tolist(), strict=True):
            if self._rows is not None:  # in the file's order, so that each batch is read once
                first, last = np.searchsorted(self._rows, (start, end))
                batch = batch.take(self._rows[first:last] - start)
            start = end
            columns = (column.to_pylist() for column in batch.columns)
            yield from (self._item(list(row)) for row in zip(*columns, strict=True))

    def column(self, name: str) -> NDArray[Any]:
        """One field of every item, as an array."""
        parts = [batch.column(name).to_numpy(zero_copy_only=False) for batch in self._read()]
        values = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
        return values if self._rows is None else values[self._rows]

    def arrays(self, name: str) -> Iterator[Any]:
        """One field of every item as Arrow arrays, one per batch, without a copy.

        Raises:
            ValueError: this is a view.
        """
        if self._rows is not None:
            raise ValueError("a view has no arrays of its own: copy it with arrow_list")
        for batch in self._read():
            yield batch.column(name)

    def take(self, indices: NDArray[np.int64], names: Sequence[str]) -> Any:
        """Some fields of these items, in this order, as an Arrow table; each batch is read once."""
        import pyarrow as pa

        rows = indices if self._rows is None else self._rows[indices]
        order = np.argsort(rows, kind="stable")
        bounds = np.searchsorted(rows[order], [0, *self._ends])
        parts = [self._batches[0].select(names).slice(0, 0)] if self._batches else []
        for i, batch in enumerate(self._read()):
            some = rows[order[bounds[i] : bounds[i + 1]]] - (self._ends[i - 1] if i else 0)
            if len(some):
                parts.append(batch.select(names).take(pa.array(some)))
        return pa.Table.from_batches(parts).combine_chunks().take(pa.array(np.argsort(order)))

    def chosen(self, rows: Iterable[int]) -> ArrowList[Kept]:
        """A view of these items, in this order."""
        chosen = np.fromiter(rows, dtype=np.int64)
        if self._rows is not None:
            chosen = self._rows[chosen]
        shared = (self._kind, self.paths, self._maps, self._batches, self._folder)
        return ArrowList(*shared, chosen)


class Texts(Sequence[str]):
    """The text of each item, computed when it is read.

    Args:
        items: any sequence.
        text: item -> its text.
    """

    def __init__(self, items: Sequence[Item], text: Callable[[Item], str]) -> None:
        self._items, self._text = items, text

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self._text(item) for item in self._items[index]]
        return self._text(self._items[index])


def vectors_on_disk(count: int, width: int) -> Vectors:
    """(count, width) zeros, memory-mapped from a temporary file that is deleted with the array."""
    if count * width == 0:
        return np.zeros((count, width), dtype=np.float32)
    with _disk_errors(), tempfile.TemporaryFile(prefix="revela-") as file:
        if hasattr(os, "posix_fallocate"):  # a disk that is full later ends the process
            os.posix_fallocate(file.fileno(), 0, 4 * count * width)
        return np.memmap(file, dtype=np.float32, mode="w+", shape=(count, width))


def arrow_list(kind: type[Item], items: Iterable[Item]) -> ArrowList[Item]:
    """Write items to a temporary file, and return the list that reads it.

    Args:
        kind: the items' dataclass.
        items: read once, in order.

    >>> from revela.types import Document
    >>> documents = arrow_list(Document, (Document(str(i), "a text") for i in range(1000)))
    >>> len(documents), documents[7].id
    (1000, '7')
    """
    with _disk_errors():
        folder = tempfile.TemporaryDirectory(prefix="revela-")
    path = Path(folder.name) / "items.arrow"
    write(kind, items, path)
    return read(kind, [path], folder)


def write(kind: type[Item], items: Iterable[Item], path: Path) -> None:
    """Write items to a file, as an Arrow stream; an empty file if there are none."""
    import pyarrow as pa

    names = [f.name for f in dataclasses.fields(kind)]  # type: ignore[arg-type]

    def characters(item: Item) -> int:
        values = (getattr(item, name) for name in names)
        return sum(len(value) for value in values if isinstance(value, str)) + 64

    writer = None
    with _disk_errors(path.parent):
        sink = pa.OSFile(os.fsencode(path), "wb")
    with sink:
        for some in batches(items, characters, BATCH):
            columns = {name: [_flat(getattr(item, name)) for item in some] for name in names}
            batch = pa.RecordBatch.from_pydict(columns)
            with _disk_errors(path.parent):  # not a fault of the items, which may be read here
                if writer is None:
                    writer = pa.ipc.new_stream(sink, batch.schema)
                writer.write_batch(batch)
        if writer is not None:
            with _disk_errors(path.parent):
                writer.close()


@contextmanager
def _disk_errors(folder: Path | None = None) -> Iterator[None]:
    """While open, an error of the disk is one sentence; None: of the temporary folder's disk."""
    try:
        yield
    except OSError as error:
        where = folder or tempfile.tempdir or "the temporary folder"  # before one is found
        raise RevelaError(
            f"{where} cannot be written ({error.strerror or error}): make room there, or set "
            "TMPDIR to a folder on another disk"
        ) from error


def _flat(value: Any) -> Any:
    """A mapping as JSON, as its keys and types differ between rows; other values unchanged."""
    return json.dumps(value) if isinstance(value, Mapping) else value


def read(kind: type[Item], paths: Sequence[Path], folder: Any = None) -> ArrowList[Item]:
    """The items in these files, one file after another; see ``ArrowList``."""
    import pyarrow as pa

    maps = [_memory_map(path) for path in paths if path.stat().st_size]
    streams = (pa.ipc.open_stream(pa.py_buffer(mapped)) for mapped in maps)
    return ArrowList(kind, paths, maps, [batch for stream in streams for batch in stream], folder)


def _memory_map(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
