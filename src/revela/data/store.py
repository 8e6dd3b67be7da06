"""Documents and chunks on disk, read as a sequence: a corpus may be larger than memory.

They are written batch by batch into an Arrow file and mapped back into memory, of which the operating system keeps what is in use.
The file is a temporary one, and goes with the last view of it.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from revela.data.batches import batches

Item = TypeVar("Item")
BATCH = 2**22  # characters written, and read back in order, at a time


class Stored(Sequence[Item], Generic[Item]):
    """Dataclass instances (of strings and whole numbers) in a file; ``stored`` writes one.

    Args:
        kind: the dataclass.
        path: the file, an Arrow stream.
        batches: its record batches.
        folder: what to delete when nobody needs it any more.
        rows: which items, in this order; None: all.
    """

    def __init__(self, kind: type[Item], path: Path, batches: Sequence[Any], folder: Any, rows: NDArray[np.int64] | None = None) -> None:
        self.path = path
        self._kind, self._batches, self._folder = kind, batches, folder
        self._ends = np.cumsum([batch.num_rows for batch in batches], dtype=np.int64)
        self._rows = rows

    def __len__(self) -> int:
        if self._rows is not None:
            return len(self._rows)
        return int(self._ends[-1]) if len(self._ends) else 0

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | Sequence[Item]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        batch, row = self._place(index)
        return self._kind(*(column[row].as_py() for column in batch.columns))

    def value(self, index: int, name: str) -> Any:
        """One field of one item."""
        batch, row = self._place(index)
        return batch.column(name)[row].as_py()

    def _place(self, index: int) -> tuple[Any, int]:
        """The batch that holds an item, and where in it."""
        place = range(len(self))[index]  # counts from the end, and refuses what is outside
        row = place if self._rows is None else int(self._rows[place])
        batch = int(np.searchsorted(self._ends, row, side="right"))
        return self._batches[batch], row - (int(self._ends[batch - 1]) if batch else 0)

    def __iter__(self) -> Iterator[Item]:
        if self._rows is not None and (np.diff(self._rows) <= 0).any():
            yield from (self[i] for i in range(len(self)))
            return
        start = 0
        for batch, end in zip(self._batches, self._ends.tolist(), strict=True):
            if self._rows is not None:  # in the file's order, so that each batch is read once
                first, last = np.searchsorted(self._rows, (start, end))
                batch = batch.take(self._rows[first:last] - start)
            start = end
            yield from (self._kind(*row) for row in zip(*(column.to_pylist() for column in batch.columns), strict=True))

    def column(self, name: str) -> NDArray[Any]:
        """One field of every item, as an array."""
        parts = [batch.column(name).to_numpy(zero_copy_only=False) for batch in self._batches]
        whole = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
        return whole if self._rows is None else whole[self._rows]

    def arrays(self, name: str) -> Iterator[Any]:
        """One field of every item as Arrow arrays, batch by batch and without a copy; not of a view."""
        if self._rows is not None:
            raise ValueError("a view has no arrays of its own")
        for batch in self._batches:
            yield batch.column(name)

    def chosen(self, rows: Iterable[int]) -> Stored[Item]:
        """A view of these items, in this order."""
        mine = np.fromiter(rows, dtype=np.int64)
        return Stored(self._kind, self.path, self._batches, self._folder, mine if self._rows is None else self._rows[mine])


def stored(kind: type[Item], items: Iterable[Item]) -> Stored[Item]:
    """Write items to a temporary file, and give them back as a sequence that reads it."""
    import pyarrow as pa

    names = [f.name for f in dataclasses.fields(kind)]  # type: ignore[arg-type]
    folder = tempfile.TemporaryDirectory(prefix="revela-")
    path = Path(folder.name) / "items.arrow"
    writer = None
    with pa.OSFile(str(path), "wb") as sink:
        for some in batches(items, lambda item: sum(len(v) for n in names if isinstance(v := getattr(item, n), str)) + 64, BATCH):
            batch = pa.RecordBatch.from_pydict({name: [getattr(item, name) for item in some] for name in names})
            if writer is None:
                writer = pa.ipc.new_stream(sink, batch.schema)
            writer.write_batch(batch)
        if writer is not None:
            writer.close()
    read = [] if writer is None else list(pa.ipc.open_stream(pa.memory_map(str(path))))
    return Stored(kind, path, read, folder)
