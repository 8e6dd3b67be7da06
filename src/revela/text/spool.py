"""Store documents and chunks on disk, as a sequence that may be larger than memory.

Items are written in batches to a temporary Arrow file, which is memory-mapped.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from revela.errors import RevelaError
from revela.text.parallel import batches
from revela.types import Vectors

Item = TypeVar("Item")
Kept = TypeVar("Kept", covariant=True)
BATCH = 2**22  # characters per record batch


class ArrowList(Sequence[Kept], Generic[Kept]):
    """A list of dataclass instances in Arrow files; made by ``arrow_list`` or ``read``.

    Fields may be strings, integers and mappings of strings and numbers.

    Args:
        kind: the dataclass.
        batches: Arrow record batches.
        folder: a temporary folder, deleted with the last view of the list.
        rows: indices of this view's items; None: all.
    """

    def __init__(
        self,
        kind: type[Kept],
        batches: Sequence[Any],
        folder: tempfile.TemporaryDirectory[str] | None,
        rows: NDArray[np.int64] | None = None,
    ) -> None:
        self._kind, self._batches, self._folder, self._rows = kind, batches, folder, rows
        fields = dataclasses.fields(kind)  # type: ignore[arg-type]
        self._mappings = [i for i, field in enumerate(fields) if field.default_factory is dict]
        self._ends = np.cumsum([0, *(batch.num_rows for batch in batches)])[1:]

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
            return [self[i] for i in range(*index.indices(len(self)))]
        batch, row = self._place(index)
        return self._item([column[row].as_py() for column in batch.columns])

    def __iter__(self) -> Iterator[Kept]:
        if self._rows is not None:
            yield from (self[i] for i in range(len(self)))
            return
        for batch in self._batches:
            columns = (column.to_pylist() for column in batch.columns)
            yield from (self._item(list(row)) for row in zip(*columns, strict=True))

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
        number = int(np.searchsorted(self._ends, row, side="right"))
        batch = self._batches[number]
        return batch, row - int(self._ends[number]) + batch.num_rows

    def column(self, name: str) -> NDArray[Any]:
        """One field of every item, as an array."""
        parts = [batch.column(name).to_numpy(zero_copy_only=False) for batch in self._batches]
        values = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
        return values if self._rows is None else values[self._rows]

    def take(self, indices: NDArray[np.int64], names: Sequence[str]) -> Any:
        """Some fields of these items, in this order, as an Arrow table."""
        import pyarrow as pa

        rows = indices if self._rows is None else self._rows[indices]
        order = np.argsort(rows, kind="stable")
        bounds = np.searchsorted(rows[order], [0, *self._ends])
        parts = []
        for i, batch in enumerate(self._batches):
            in_batch = rows[order[bounds[i] : bounds[i + 1]]] - (self._ends[i] - batch.num_rows)
            parts.append(batch.select(names).take(pa.array(in_batch)))
        return pa.Table.from_batches(parts).combine_chunks().take(pa.array(np.argsort(order)))

    def select(self, rows: Iterable[int]) -> ArrowList[Kept]:
        """A view of these items, in this order."""
        selected = np.fromiter(rows, dtype=np.int64)
        if self._rows is not None:
            selected = self._rows[selected]
        return ArrowList(self._kind, self._batches, self._folder, selected)


class LazyTexts(Sequence[str]):
    """A sequence of the items' texts, each computed when it is read."""

    def __init__(self, items: Sequence[Item], text: Callable[[Item], str]) -> None:
        self._items, self._text = items, text

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._text(item) for item in self._items[index]]
        return self._text(self._items[index])


def vectors_on_disk(count: int, width: int) -> Vectors:
    """Zeros (count, width), memory-mapped from a temporary file that is deleted with the array."""
    if count * width == 0:
        return np.zeros((count, width), dtype=np.float32)
    with _disk_errors(), tempfile.TemporaryFile(prefix="revela-") as file:
        if hasattr(os, "posix_fallocate"):  # if the disk filled up later, the process would die
            os.posix_fallocate(file.fileno(), 0, 4 * count * width)
        return np.memmap(file, dtype=np.float32, mode="w+", shape=(count, width))


def arrow_list(kind: type[Item], items: Iterable[Item]) -> ArrowList[Item]:
    """Write items to a temporary file, and return the list that reads it.

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
        for part in batches(items, characters, BATCH):
            columns = {name: [_flat(getattr(item, name)) for item in part] for name in names}
            try:
                batch = pa.RecordBatch.from_pydict(columns)
            except UnicodeEncodeError as error:
                text = f"{error.object[max(0, error.start - 20) : error.end]!a}"
                raise RevelaError(
                    f"a text is not Unicode (half of a surrogate pair, {text}): correct it"
                ) from error
            with _disk_errors(path.parent):  # not around ``items``, whose errors are others
                writer = writer or pa.ipc.new_stream(sink, batch.schema)
                writer.write_batch(batch)
        if writer is not None:
            with _disk_errors(path.parent):
                writer.close()


@contextmanager
def _disk_errors(folder: Path | None = None) -> Iterator[None]:
    """Turn errors of a disk into a RevelaError about ``folder``; None: the temporary folder."""
    try:
        yield
    except OSError as error:
        where = folder or tempfile.tempdir or "the temporary folder"
        raise RevelaError(
            f"{where} cannot be written ({error.strerror or error}): make room there, or set "
            "TMPDIR to a folder on another disk"
        ) from error


def _flat(value: Any) -> Any:
    """A mapping as JSON, as keys and types differ between rows."""
    return json.dumps(value) if isinstance(value, Mapping) else value


def read(
    kind: type[Item], paths: Sequence[Path], folder: tempfile.TemporaryDirectory[str] | None = None
) -> ArrowList[Item]:
    """Read the items of these files, one file after another; arguments as for ``ArrowList``."""
    import pyarrow as pa

    mapped = (pa.memory_map(os.fsencode(path)) for path in paths if path.stat().st_size)
    streams = map(pa.ipc.open_stream, mapped)
    return ArrowList(kind, [batch for stream in streams for batch in stream], folder)
