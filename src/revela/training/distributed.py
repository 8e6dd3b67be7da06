"""Train one retriever in several processes, each on its own GPU or cores; check that they agree.

torchrun (or ``accelerate launch``) starts the processes, and ends them all when one fails. They add
their gradients and exchange values by torch.distributed: gloo for CPU tensors, nccl for GPU
tensors. All processes must call a function of this module at the same point of the program; in a
run of one process the functions do nothing.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist

from revela.errors import RevelaError, first_line

log = logging.getLogger(__name__)
Value = TypeVar("Value")

# The other ranks wait while rank 0 checks the retriever, writes questions or saves.
TIMEOUT = timedelta(hours=4)
JOINED = itertools.count()  # groups of this process, each with its own keys in torchrun's store
LOST = "closed by peer", "reset by peer", "Broken pipe"  # gloo's words for a lost connection


def started() -> int:
    """The number of processes that were started together."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def world_size() -> int:
    """The number of processes that train together inside ``joined``; 1 outside."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if world_size() > 1 else 0


def is_rank_zero() -> bool:
    """Whether this process is the one that checks, writes and prints."""
    return rank() == 0


def cores(threads: int) -> int:
    """Threads for this process; 0: its share of the available cores."""
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return threads or max(1, available_cores() // local_world_size)


def available_cores(root: Path = Path("/")) -> int:
    """The number of cores that this process may use, by its affinity and the quotas of its cgroups.
    ``root`` holds proc and sys.
    """
    has_affinity = hasattr(os, "sched_getaffinity")
    affinity = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return min([affinity, *_cpu_quotas(root)])


def _cpu_quotas(root: Path) -> Iterator[int]:
    """The CPU quotas of this process's cgroup (v2) and of its parents, in cores, rounded up."""
    file = root / "proc/self/cgroup"
    for line in file.read_text().splitlines() if file.is_file() else ():
        folder = root / "sys/fs/cgroup" / line.split(":", 2)[2].lstrip("/")
        for place in (folder, *folder.parents):  # in a container the mount itself
            with suppress(OSError, ValueError):  # "max" means no limit
                quota, period = map(int, (place / "cpu.max").read_text().split())
                yield math.ceil(quota / period)


def check_single_process() -> None:
    """Raise RevelaError if several processes were started, for work that takes one."""
    if started() > 1:
        raise RevelaError(
            f"this command runs in one process (WORLD_SIZE is {started()}): leave out torchrun"
        )


@contextmanager
def joined() -> Iterator[None]:
    """Connect the processes that were started together; inside only the first prints.

    Raises:
        RevelaError: they cannot reach each other, or another process has ended.
    """
    if started() == 1 or world_size() > 1:
        yield
        return
    from torch.distributed.distributed_c10d import PrefixStore  # not in every build of torch
    from torch.distributed.rendezvous import rendezvous

    has_gpu = torch.cuda.is_available()
    try:
        store, rank, size = next(rendezvous("env://"))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"revela-{attempt}-{next(JOINED)}", store)
        backend = "cpu:gloo,cuda:nccl" if has_gpu else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    except (ValueError, RuntimeError) as error:
        raise RevelaError(
            f"{started()} processes were started (WORLD_SIZE) and cannot reach each other "
            f"({first_line(error)}): start them by torchrun"
        ) from error
    with Path(os.devnull).open("w") as nowhere:
        try:
            with redirect_stdout(nowhere) if rank else nullcontext():
                log.info(f"{size} processes, {'a GPU each' if has_gpu else 'on the CPU'}")
                if has_gpu:
                    _take_own_gpu()
                yield
        except RuntimeError as error:
            if not any(words in str(error) for words in LOST):
                raise
            raise RevelaError(
                "another process has ended: see what it printed, and continue with --resume"
            ) from None
        finally:
            dist.destroy_process_group()


def _take_own_gpu() -> None:
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    if local_world_size > (gpus := torch.cuda.device_count()):
        raise RevelaError(f"{gpus} GPUs need {gpus} processes: give --nproc-per-node {gpus}")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK") or 0))


def from_rank_zero(make: Callable[[], Value]) -> Value:
    """Call ``make`` in rank 0 only, and give all processes what it returns."""
    if world_size() == 1:
        return make()
    made: list[Any] = [make() if is_rank_zero() else None]
    dist.broadcast_object_list(made, 0)
    value: Value = made[0]
    return value


def all_gather(value: Value) -> list[Value]:
    """The value of every process, by rank."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def gathered(value: Value) -> list[Value]:
    """In rank 0 the value of every process, by rank; in the others a list of their own value."""
    if world_size() == 1:
        return [value]
    values: list[Any] | None = [None] * world_size() if is_rank_zero() else None
    dist.gather_object(value, values, 0)
    return [value] if values is None else values


def my_share(length: int) -> slice:
    """This process's part of ``length`` items; the parts are in the order of the ranks."""
    return slice(rank() * length // world_size(), (rank() + 1) * length // world_size())


def gather_shares(mine_nD: Tensor, total: int) -> Tensor:
    """(total, D) vectors, of which each process has ``my_share``; with gradient, which sums what
    the losses of all processes give a share.
    """
    from torch.distributed.nn.functional import all_reduce

    share = my_share(total)
    mine_ND = nn.functional.pad(mine_nD, (0, 0, share.start, total - share.stop))
    gathered_ND: Tensor = all_reduce(mine_ND)  # type: ignore[no-untyped-call]
    return gathered_ND


def check_same(value: Any, sentence: str) -> None:
    """Raise RevelaError(sentence) in all processes unless all have the same value."""
    if any(other != value for other in all_gather(value)):
        raise RevelaError(sentence)


def all_reduce_sum(number: Tensor) -> Tensor:
    """The sum of a number over all processes."""
    if world_size() == 1:
        return number
    number = number.detach().clone()
    dist.all_reduce(number)
    return number


def add_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Replace each parameter's gradient by the sum over all processes, in one message. A gradient
    that is None in all of them stays None, as after one backward pass over all batches.
    """
    if world_size() == 1:
        return
    exists = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8)
    dist.all_reduce(exists, dist.ReduceOp.MAX)  # on the CPU, so as not to wait for a GPU
    moved = [p for p, has in zip(parameters, exists.tolist(), strict=True) if has]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in moved]
    if not gradients:
        return
    together = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(together)
    parts = torch.split(together, [gradient.numel() for gradient in gradients])
    for p, gradient, part in zip(moved, gradients, parts, strict=True):
        p.grad = gradient.copy_(part.view_as(gradient))


def copy_first(tensors: Iterable[Tensor]) -> None:
    """Copy rank 0's tensors into those of every process."""
    if world_size() > 1:
        for tensor in tensors:
            sent = tensor.detach().contiguous()
            dist.broadcast(sent, 0)
            tensor.detach().copy_(sent)


def digest(tensors: Iterable[Tensor]) -> str:
    """A hash of the bits of tensors."""
    found = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()
