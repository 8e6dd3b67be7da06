"""Documents and chunks on disk, read as a sequence: a corpus may be larger than memory.

They are written batch by batch into an Arrow file and mapped back into memory. What has been read
is given back at once: the operating system would take it when it needs it, but until then every
page counts as this process's, and a limit on its memory may end it. The file is a temporary one,
and goes with the last view of it.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import multiprocessing
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from revela.types import Vectors

Item = TypeVar("Item")
Kept = TypeVar("Kept", covariant=True)
BATCH = 2**22  # characters written, and read back in order, at a time


class ArrowList(Sequence[Kept], Generic[Kept]):
    """Dataclass instances (of strings, whole numbers and mappings of plain values) in a file;
    ``arrow_list`` writes one.

    Args:
        kind: the dataclass.
        paths: the files, each an Arrow stream.
        maps: what maps each file into memory.
        batches: their record batches.
        folder: what to delete when nobody needs it any more.
        rows: which items, in this order; None: all.
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
            self._give_back()
            return found
        batch, row = self._place(index)
        return self._item([column[row].as_py() for column in batch.columns])

    def _item(self, values: list[Any]) -> Kept:
        for place in self._mappings:
            if place < len(values):  # files of earlier versions have fewer columns
                values[place] = json.loads(values[place])
        return self._kind(*values)

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

    def _read(self) -> Iterator[Any]:
        """All batches, one after another."""
        for batch in self._batches:
            yield batch
            self._give_back()

    def _give_back(self) -> None:
        """Let go of the pages that were read; whoever reads them again finds them again."""
        for mapped in self._maps:
            if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
                mapped.madvise(mmap.MADV_DONTNEED)

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
            yield from (
                self._item(list(row))
                for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)
            )

    def column(self, name: str) -> NDArray[Any]:
        """One field of every item, as an array."""
        parts = [batch.column(name).to_numpy(zero_copy_only=False) for batch in self._read()]
        whole = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
        return whole if self._rows is None else whole[self._rows]

    def arrays(self, name: str) -> Iterator[Any]:
        """One field of every item as Arrow arrays, batch by batch and without a copy; not of a
        view.
        """
        if self._rows is not None:
            raise ValueError("a view has no arrays of its own")
        for batch in self._read():
            yield batch.column(name)

    def take(self, indices: NDArray[np.int64], names: Sequence[str]) -> Any:
        """Some fields of these items, in this order, as an Arrow table; each item is looked up
        once, file after file.
        """
        import pyarrow as pa

        rows = indices if self._rows is None else self._rows[indices]
        order = np.argsort(rows, kind="stable")
        bounds = np.searchsorted(rows[order], [0, *self._ends])
        parts = [self._batches[0].select(names).slice(0, 0)] if self._batches else []
        for i, batch in enumerate(self._read()):
            some = rows[order[bounds[i] : bounds[i + 1]]]
            if len(some):
                parts.append(
                    batch.select(names).take(pa.array(some - (self._ends[i - 1] if i else 0)))
                )
        return pa.Table.from_batches(parts).combine_chunks().take(pa.array(np.argsort(order)))

    def chosen(self, rows: Iterable[int]) -> ArrowList[Kept]:
        """A view of these items, in this order."""
        mine = np.fromiter(rows, dtype=np.int64)
        return ArrowList(
            self._kind,
            self.paths,
            self._maps,
            self._batches,
            self._folder,
            mine if self._rows is None else self._rows[mine],
        )


class Texts(Sequence[str]):
    """A text of each item, made when it is asked for.

    Args:
        items: read one by one.
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
    """(count, width) zeros in a temporary file, which goes with the array; the operating system
    keeps in memory what is in use.
    """
    if count * width == 0:
        return np.zeros((count, width), dtype=np.float32)
    with tempfile.TemporaryFile(prefix="revela-") as file:
        return np.memmap(file, dtype=np.float32, mode="w+", shape=(count, width))


def arrow_list(kind: type[Item], items: Iterable[Item]) -> ArrowList[Item]:
    """Write items to a temporary file, and give them back as a sequence that reads it."""
    folder = tempfile.TemporaryDirectory(prefix="revela-")
    path = Path(folder.name) / "items.arrow"
    write(kind, items, path)
    return read(kind, [path], folder)


def write(kind: type[Item], items: Iterable[Item], path: Path) -> None:
    """Write items to a file, as an Arrow stream; an empty file if there are none."""
    import pyarrow as pa

    names = [f.name for f in dataclasses.fields(kind)]  # type: ignore[arg-type]
    writer = None
    with pa.OSFile(str(path), "wb") as sink:
        for some in batches(
            items,
            lambda item: sum(len(v) for n in names if isinstance(v := getattr(item, n), str)) + 64,
            BATCH,
        ):
            batch = pa.RecordBatch.from_pydict(
                {name: [_flat(getattr(item, name)) for item in some] for name in names}
            )
            if writer is None:
                writer = pa.ipc.new_stream(sink, batch.schema)
            writer.write_batch(batch)
        if writer is not None:
            writer.close()


def _flat(value: Any) -> Any:
    """A mapping as JSON: its fields and their types differ from one batch to the next, which no
    column can.
    """
    return json.dumps(value) if isinstance(value, Mapping) else value


def read(kind: type[Item], paths: Sequence[Path], folder: Any = None) -> ArrowList[Item]:
    """The items in these files, one file after another; see ``ArrowList``."""
    import pyarrow as pa

    maps = [_mapped(path) for path in paths if path.stat().st_size]
    return ArrowList(
        kind,
        paths,
        maps,
        [batch for mapped in maps for batch in pa.ipc.open_stream(pa.py_buffer(mapped))],
        folder,
    )


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


Result = TypeVar("Result")


AHEAD = 3  # batches a worker may be ahead of the reader


def batches(items: Iterable[Item], size: Callable[[Item], int], limit: int) -> Iterator[list[Item]]:
    """Neighbours together until their sizes reach ``limit``; at least one item each."""
    batch: list[Item] = []
    total = 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= limit:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def ordered_map(
    work: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Iterator[Result]:
    """``map`` over processes: results in the order of the items, only a few items ahead of the
    reader.

    Args:
        work: a function that can be pickled.
        items: read as they are needed.
        workers: processes; with one, or with fewer items than workers, everything happens here.
    """
    stream = iter(items)
    first = list(islice(stream, workers))
    if workers <= 1 or len(first) < workers:
        yield from map(work, first)
        yield from map(work, stream)
        return
    methods = multiprocessing.get_all_start_methods()
    # A forked child starts at once and runs Python only; spawned ones would run a caller's
    # unguarded script again.
    context = multiprocessing.get_context("fork" if "fork" in methods else None)
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        waiting: deque[Future[Result]] = deque(pool.submit(work, item) for item in first)
        for item in stream:
            waiting.append(pool.submit(work, item))
            if len(waiting) >= AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
