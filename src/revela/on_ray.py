"""Work on a Ray cluster, and tables written by many processes: the only module that imports ray,
lance_ray and lance (pylance). It knows nothing of retrieval.

Ray Data streams items through three steps: tasks that read, actors that hold a model, tasks that
write. What flows between them are rows of bytes, so that Ray never divides what belongs together.
A step that a dead worker leaves is done again; Lance shows nothing of a fragment that is not
committed, so nothing is lost and nothing is there twice.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from revela.errors import RevelaError, extra, first_line

Row = dict[str, Any]
PER_ACTOR = 2  # units of work that wait at each actor
REACHED_S = 10.0  # seconds in which a cluster must answer
AHEAD = 4  # tasks per processor that are submitted before their results are read


@dataclass(frozen=True)
class Cluster:
    """Where work is done.

    Args:
        address: of a running Ray cluster, "auto" for the one of this machine; "": started here.
        workers: actors that hold a model; 0: one for each GPU, else one for two processors.
        gpus_per_worker: of each actor, where there are GPUs.
    """

    address: str = ""
    workers: int = 0
    gpus_per_worker: float = 1.0


@contextmanager
def connected(cluster: Cluster) -> Iterator[None]:
    """Connect to the cluster, or start Ray on this machine; it is left at the end.

    Raises:
        RevelaError: the extra is not installed, or there is no cluster at the address.
    """
    # Nothing is sent to anybody, and Ray's notes are for programmers.
    for name, value in (
        ("RAY_USAGE_STATS_ENABLED", "0"),
        ("RAY_BACKEND_LOG_LEVEL", "fatal"),
        ("RAY_DATA_DISABLE_PROGRESS_BARS", "1"),
    ):
        os.environ.setdefault(name, value)
    # Ray starts its processes by exec, after which no lock of Lance's is left.
    warnings.filterwarnings("ignore", "lance(db fork support is experimental| is not fork-safe)")
    with extra("ray", "--engine ray"):
        import lance_ray  # noqa: F401
        import ray
        import ray.data
    begun = not ray.is_initialized()
    if begun:
        try:
            _reach(cluster.address)
            ray.init(
                address=cluster.address or "local",
                include_dashboard=False if not cluster.address else None,
                log_to_driver=False,
                logging_level=logging.CRITICAL,
            )
        except (OSError, RuntimeError, ValueError) as error:
            reason = first_line(error).partition(". ")[0][:200]
            raise RevelaError(
                f"no Ray cluster answers at {cluster.address or 'this machine'} ({reason}): start "
                "one with ray start --head, or leave --address away"
            ) from error
    try:
        yield
    finally:
        if begun:
            ray.shutdown()


def _reach(address: str) -> None:
    """Raise OSError if nothing listens at host:port, where Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "//" not in address:
        socket.create_connection((host, int(port)), REACHED_S).close()


def machines() -> int:
    """How many machines the cluster has."""
    import ray

    return sum(bool(node["Alive"]) for node in ray.nodes())


def in_tasks(
    work: Callable[[Any], tuple[Any, Any]], items: Sequence[Any]
) -> Iterator[tuple[Any, Any]]:
    """``work`` on each item in a task, in order: its first result, and a reference to its second,
    which stays where it is.
    """
    import ray

    task = ray.remote(num_returns=2)(_caught).options(max_retries=-1)
    function = ray.put(work)
    ahead = AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
    waiting: list[tuple[Any, Any]] = []
    for item in items:
        waiting.append(task.remote(function, item))
        if len(waiting) > ahead:
            first, second = waiting.pop(0)
            yield _or_error(ray.get(first)), second
    for first, second in waiting:
        yield _or_error(ray.get(first)), second


def repeated(references: Sequence[Any], count: int, at_once: int = 5 * 10**7) -> list[int]:
    """A few of the numbers that stand twice or more in the arrays of uint64 at these references.

    Args:
        references: as ``in_tasks`` gives them.
        count: of all numbers.
        at_once: how many a task holds.
    """
    import ray

    parts = max(1, -(-count // at_once))
    task = ray.remote(_repeated_in_part).options(max_retries=-1)
    found = ray.get([task.remote(list(references), i, parts) for i in range(parts)])
    return [number for some in found for number in some]


def stream(
    items: Sequence[Any],
    read: Callable[[Any], Iterator[Row]],
    load: Callable[[], Callable[[Row], Row]],
    write: Callable[[list[Row]], Row],
    cluster: Cluster,
    together: int,
) -> Iterator[Row]:
    """``write`` of the rows that actors make of the rows that ``read`` gives for each item.

    Rows may come in any order; each is there once, also when workers die.

    Args:
        items: what is read, each by one task.
        read: an item -> rows of bytes and numbers, all with the same names.
        load: makes what an actor does to a row; called once in each actor.
        write: some rows -> one row.
        cluster: how many actors, and their GPUs.
        together: rows that are written together.

    Raises:
        RevelaError: a step has raised one.
    """
    import ray
    from ray.data import ActorPoolStrategy, DataContext

    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    resources = ray.cluster_resources()
    gpus = cluster.gpus_per_worker if resources.get("GPU", 0) else 0.0
    cpus = resources.get("CPU", 1.0)
    workers = cluster.workers or int(resources["GPU"] / gpus if gpus else max(1, cpus // 2))
    # Actors that took every processor would leave none to read and write, and nothing would move.
    share = min(1.0, max(cpus - 1, cpus / 2) / workers)
    rows = [{"item": pickle.dumps(item)} for item in items]
    data = ray.data.from_items(rows, override_num_blocks=min(len(rows), 4096))
    data.context.target_max_block_size = 1  # a block per row, so that no actor waits for another's
    data = data.map_batches(_reader, batch_size=1, fn_args=[read])
    data = data.map_batches(
        _Actor,
        batch_size=1,
        fn_constructor_args=[load, max(1, int(cpus // workers))],
        compute=ActorPoolStrategy(size=workers, max_tasks_in_flight_per_actor=PER_ACTOR),
        num_cpus=share,
        num_gpus=gpus,
    )
    data = data.map_batches(_writer, batch_size=together, fn_args=[write])
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    for row in data.iter_rows():
        yield _or_error(pickle.loads(row["row"]))


def shuffled(
    items: Sequence[Any],
    read: Callable[[Any], Iterator[Any]],
    key: str,
    work: Callable[[Any], Row],
    parts: int,
) -> Iterator[Row]:
    """``work`` on all rows that share a value of the column ``key``, as one Arrow table.

    Args:
        items: what is read, each by one task.
        read: an item -> Arrow tables with the same columns.
        key: a column of whole numbers.
        work: a table, which fits into a process's memory -> one row.
        parts: about how many values the key has.
    """
    import ray
    from ray.data import DataContext

    DataContext.get_current().enable_progress_bars = False
    rows = [{"item": pickle.dumps(item)} for item in items]
    data = ray.data.from_items(rows, override_num_blocks=min(len(rows), 4096))
    data = data.map_batches(_tables, batch_size=1, fn_args=[read])
    grouped = data.groupby(key, num_partitions=parts)
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    for row in grouped.map_groups(_whole, batch_format="pyarrow", fn_args=[work]).iter_rows():
        yield _or_error(pickle.loads(row["row"]))


def _tables(batch: Row, read: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
    yield from read(pickle.loads(batch["item"][0]))


def _whole(table: Any, work: Callable[[Any], Row]) -> Row:
    return _packed(_caught_second(work, table))


class _Actor:
    """Holds a model, on so many threads."""

    def __init__(self, load: Callable[[], Callable[[Row], Row]], threads: int) -> None:
        os.environ["OMP_NUM_THREADS"] = str(threads)  # torch reads it when it is imported
        self.error: RevelaError | None = None
        try:
            self.work = load()
        except RevelaError as error:
            self.error = error

    def __call__(self, batch: Row) -> Row:
        def work(row: Row) -> Row:
            if self.error is not None:
                raise self.error
            return self.work(row)

        return _packed(_caught_second(work, pickle.loads(batch["row"][0])))


def _reader(batch: Row, read: Callable[[Any], Iterator[Row]]) -> Iterator[Row]:
    try:
        for row in read(pickle.loads(batch["item"][0])):
            yield _packed(row)
    except RevelaError as error:
        yield _packed(error)


def _writer(batch: Row, write: Callable[[list[Row]], Row]) -> Row:
    rows = [pickle.loads(row) for row in batch["row"]]
    errors = (row for row in rows if isinstance(row, RevelaError))
    return _packed(next(errors, None) or _caught_second(write, rows))


def _packed(row: Row | RevelaError) -> Row:
    return {"row": [pickle.dumps(row)]}


def _caught(work: Callable[[Any], tuple[Any, Any]], item: Any) -> tuple[Any, Any]:
    try:
        return work(item)
    except RevelaError as error:
        return error, None


def _caught_second(work: Callable[[Any], Any], row: Any) -> Any:
    """The result, or the user's error instead of it, as Ray would wrap it into a traceback."""
    if isinstance(row, RevelaError):
        return row
    try:
        return work(row)
    except RevelaError as error:
        return error


def _or_error(result: Any) -> Any:
    if isinstance(result, RevelaError):
        raise result
    return result


def _repeated_in_part(references: list[Any], part: int, parts: int) -> list[int]:
    import numpy as np
    import ray

    arrays = (ray.get(reference) for reference in references)
    mine = np.concatenate([array[array % parts == part] for array in arrays])
    numbers, counts = np.unique(mine, return_counts=True)
    return [int(number) for number in numbers[counts > 1][:10]]


# Lance


def write_fragments(uri: str, rows: Any) -> list[bytes]:
    """Write an Arrow table beside a Lance table, which does not show it before ``commit``."""
    import lance
    from lance.fragment import write_fragments

    fragments = write_fragments(rows, lance.dataset(uri), mode="append")
    return [pickle.dumps(fragment) for fragment in fragments]


def commit(uri: str, version: int, fragments: Sequence[bytes], gone: Sequence[str]) -> int:
    """Add written fragments to a table, in one commit.

    Args:
        uri: of the table.
        version: that the caller knows of.
        fragments: from ``write_fragments``.
        gone: filters of rows that the same commit deletes.

    Returns:
        The table's new version.

    Raises:
        RevelaError: the table has another version: somebody else writes to it.
    """
    import lance

    dataset = lance.dataset(uri)
    if dataset.version != version:
        raise _written_by_others(uri)
    made = [pickle.loads(fragment) for fragment in fragments]
    operation: Any = lance.LanceOperation.Append(made)
    if rows := _rows_by_fragment(dataset, gone):
        left = {i: dataset.get_fragment(i).delete_rows(some) for i, some in rows.items()}
        operation = lance.LanceOperation.Update(
            removed_fragment_ids=[i for i, fragment in left.items() if fragment is None],
            updated_fragments=[fragment for fragment in left.values() if fragment is not None],
            new_fragments=made,
            fields_modified=[],
        )
    done = lance.LanceDataset.commit(dataset, operation, read_version=version)
    if done.version != version + 1:
        raise _written_by_others(uri)
    return int(done.version)


def _rows_by_fragment(dataset: Any, filters: Sequence[str]) -> dict[int, list[int]]:
    """The places of the rows that one of the filters holds for, by fragment."""
    rows: dict[int, list[int]] = {}
    for where in filters:
        found = dataset.scanner(columns=[], filter=where, with_row_address=True).to_table()
        for address in found["_rowaddr"].to_pylist():
            rows.setdefault(address >> 32, []).append(address & 0xFFFFFFFF)
    return rows


def _written_by_others(uri: str) -> RevelaError:
    return RevelaError(
        f"another process has written to {Path(uri).parent} meanwhile: let one at a time write to "
        "an index, and run the same command again"
    )


def clean(uri: str) -> None:
    """Remove former versions, and files of killed runs; nobody may read or write the table."""
    import lance

    dataset = lance.dataset(uri)
    dataset.cleanup_old_versions(older_than=timedelta(milliseconds=1), delete_unverified=True)
    for half_written in Path(uri, "data").glob(".tmp*"):  # Lance knows finished files only
        half_written.unlink()


def make_indices(uri: str, wanted: Sequence[tuple[str, str, dict[str, Any]]]) -> None:
    """Make indices by all machines of the cluster.

    Args:
        uri: of the table.
        wanted: column, kind and options of each.
    """
    import lance_ray

    for column, kind, options in wanted:
        make = lance_ray.create_index if kind.startswith("IVF") else lance_ray.create_scalar_index
        workers = max(2, machines())
        make(uri, column=column, index_type=kind, num_workers=workers, **options)
