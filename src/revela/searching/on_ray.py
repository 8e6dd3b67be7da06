"""Run work on a Ray cluster, and write a Lance table from many processes. The only module that
imports ray and lance (pylance); it has no code of retrieval.

Ray Data streams items through three steps: tasks that read, actors that hold a model, tasks that
write. What passes between them is pickled into one row each, which Ray cannot divide. The step of a
worker that dies is repeated. Lance hides fragments until they are committed, so each row is written
exactly once.
"""

from __future__ import annotations

import functools
import logging
import os
import pickle
import socket
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from revela.errors import RevelaError, extra, first_line

Item = TypeVar("Item")
Batch = TypeVar("Batch")
Written = TypeVar("Written")
Row = dict[str, Any]  # of Ray's: pickled items
PER_ACTOR = 2  # tasks in flight per actor
REACHED_S = 10.0  # seconds to wait for a cluster's answer


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster, and how to divide it."""

    address: str = ""
    """Address of a running Ray cluster; auto: this machine's. Empty: start Ray here, and stop it at
    the end."""
    workers: int = 0
    "With --engine ray: processes that hold a model. 0: one per GPU, or one per two processors."
    gpus_per_worker: float = 1.0
    "With --engine ray: GPUs per process, where there are any."


@contextmanager
def connected(cluster: Cluster) -> Iterator[None]:
    """Connect to the cluster, or start Ray on this machine; disconnect at the end."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
    # Ray starts its processes by exec, which leaves no lock of Lance's behind.
    warnings.filterwarnings("ignore", "lance(db fork support is experimental| is not fork-safe)")
    with extra("ray", "--engine ray"):
        import lance  # noqa: F401
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
    """Raise OSError if nothing listens at host:port, which Ray would retry for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "//" not in address:
        socket.create_connection((host, int(port)), REACHED_S).close()


def in_tasks(work: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    """Call ``work`` on each item in a task of its own; yield results in the order of the items."""
    import ray

    task = ray.remote(_packed).options(max_retries=-1)
    function = ray.put(work)
    for result in [task.remote(function, item) for item in items]:
        yield _unpacked(ray.get(result)["row"][0])


def stream(
    items: Sequence[Item],
    read: Callable[[Item], Iterator[Batch]],
    load: Callable[[], Callable[[list[Batch]], Batch]],
    write: Callable[[list[Batch]], Written],
    cluster: Cluster,
    together: int,
) -> Iterator[Written]:
    """Read items in tasks, work on their batches in actors, and write them in tasks.

    Batches may come in any order. Each is written exactly once, also when workers die.

    Args:
        items: each is read by one task.
        read: an item -> its batches.
        load: makes the function from a list of one batch to a batch that an actor runs; called once
            per actor.
        write: a list of batches -> a result.
        together: batches per call of ``write``.

    Yields:
        The results of ``write``.
    """
    import ray.data

    resources = ray.cluster_resources()
    gpus = cluster.gpus_per_worker if resources.get("GPU", 0) else 0.0
    cpus = resources.get("CPU", 1.0)
    workers = cluster.workers or int(resources["GPU"] / gpus if gpus else max(1, cpus // 2))
    # Leave processors to the tasks that read and write; without any the stream would hang.
    share = min(1.0, max(cpus - 1, cpus / 2) / workers)
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    packed = [{"row": pickle.dumps(item)} for item in items]
    data = ray.data.from_items(packed, override_num_blocks=min(len(packed), 4096))
    data.context.print_on_execution_start = False
    data.context.target_max_block_size = 1  # a block per row: no actor waits for another's rows
    data = data.map_batches(_read, batch_size=1, fn_args=[read])
    data = data.map_batches(
        _Actor,
        batch_size=1,
        fn_constructor_args=[load, max(1, int(cpus // workers))],
        compute=ray.data.ActorPoolStrategy(size=workers, max_tasks_in_flight_per_actor=PER_ACTOR),
        num_cpus=share,
        num_gpus=gpus,
    )
    data = data.map_batches(_step, batch_size=together, fn_args=[write])
    for row in data.iter_rows():
        yield _unpacked(row["row"])


class _Actor:
    """An actor that holds a model and computes on ``threads`` threads."""

    def __init__(self, load: Callable[[], Callable[[list[Any]], Any]], threads: int) -> None:
        os.environ["OMP_NUM_THREADS"] = str(threads)  # torch reads it when it is imported
        self.load = functools.cache(load)

    def __call__(self, batch: Row) -> Row:
        return _step(batch, lambda rows: self.load()(rows))


def _read(batch: Row, read: Callable[[Any], Iterator[Any]]) -> Iterator[Row]:
    try:
        for found in read(_unpacked(batch["row"][0])):
            yield {"row": [pickle.dumps(found)]}
    except RevelaError as error:
        yield {"row": [pickle.dumps(error)]}


def _step(batch: Row, work: Callable[[list[Any]], Any]) -> Row:
    """Call ``work`` on the rows of a batch; an error of an earlier step takes its place."""
    return _packed(lambda rows: work([*map(_unpacked, rows)]), batch["row"])


def _packed(work: Callable[[Any], Any], given: Any) -> Row:
    """What ``work`` returns, or the RevelaError that it raises, which Ray would wrap in a
    traceback: as a batch of one pickled row, which Ray cannot divide.
    """
    try:
        return {"row": [pickle.dumps(work(given))]}
    except RevelaError as error:
        return {"row": [pickle.dumps(error)]}


def _unpacked(row: bytes) -> Any:
    """What is pickled in a row; a RevelaError is raised."""
    value = pickle.loads(row)
    if isinstance(value, RevelaError):
        raise value
    return value


# Lance


def write_fragments(uri: str, rows: Any) -> list[bytes]:
    """Write rows of an Arrow table as fragments of a Lance table; ``commit`` makes them visible."""
    import lance
    from lance.fragment import write_fragments

    fragments = write_fragments(rows, lance.dataset(uri), mode="append")
    return [pickle.dumps(fragment) for fragment in fragments]


def commit(uri: str, version: int, fragments: Sequence[bytes], rows: Sequence[int]) -> None:
    """Add fragments and delete rows in one commit.

    Args:
        version: the table's version that the caller has read.
        fragments: from ``write_fragments``.
        rows: numbers of the rows to delete.

    Raises:
        RevelaError: the table has another version by now.
    """
    import lance

    dataset = lance.dataset(uri)
    if dataset.version != version:
        raise RevelaError(
            f"another process has written to {Path(uri).parent} meanwhile: let one at a time write "
            "to an index, and run the same command again"
        )
    assert not dataset.has_stable_row_ids  # a row's number is its fragment and its place in it
    places: dict[int, list[int]] = {}
    for row in rows:
        places.setdefault(row >> 32, []).append(row & 0xFFFFFFFF)
    left = {i: dataset.get_fragment(i).delete_rows(some) for i, some in places.items()}
    operation = lance.LanceOperation.Update(
        removed_fragment_ids=[i for i, fragment in left.items() if fragment is None],
        updated_fragments=[fragment for fragment in left.values() if fragment is not None],
        new_fragments=[pickle.loads(fragment) for fragment in fragments],
        fields_modified=[],
    )
    lance.LanceDataset.commit(dataset, operation, read_version=version)
