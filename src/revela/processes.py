"""Several processes that train one retriever together, each on its own GPU or cores.

torchrun (or ``accelerate launch``) starts them. They add up their gradients and agree on everything
else by torch.distributed: gloo for what is on the CPU, nccl for what is on a GPU. Every function
here is called by all of them at the same place of the program, and does nothing in a run of one.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist

from revela.errors import RevelaError, first_line

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

log = logging.getLogger(__name__)
Value = TypeVar("Value")

LAUNCHED = {"WORLD_SIZE", "ACCELERATE_MIXED_PRECISION"}  # set by torchrun and accelerate
# The others wait while the first checks the retriever, writes questions or saves.
LONGEST_WAIT = timedelta(hours=4)
TIMES = itertools.count()  # that these processes were joined, each with a store of its own
AFTER_AN_ERROR = 20.0  # seconds in which the others notice that one has failed
LOST = "closed by peer", "reset by peer", "Broken pipe"  # what gloo says of a connection
KILLED = "another process was killed, or ran out of memory: continue with --resume"


def started() -> int:
    """How many processes were started together."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def count() -> int:
    """How many processes train together, inside ``joined``; 1 outside."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def index() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if count() > 1 else 0


def is_first() -> bool:
    """Whether this process is the one that checks, writes and prints."""
    return index() == 0


def cores(threads: int) -> int:
    """Threads for this process: as many as given; 0: its share of the machine's cores."""
    beside = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return threads or max(1, (os.cpu_count() or 1) // beside)


def refuse_several() -> None:
    """Refuse to be one of several processes, for work that is not shared out.

    Raises:
        RevelaError: WORLD_SIZE is above 1.
    """
    if started() > 1:
        raise RevelaError(
            f"this takes one process and {started()} were started (WORLD_SIZE): start revela "
            "without torchrun or accelerate"
        )


@contextmanager
def joined() -> Iterator[None]:
    """While open, the processes that were started together can talk; only the first prints.

    An error of one ends all of them: each raises the same sentence where it is (SystemExit, with
    code 2, in all but one, which prints it).

    Raises:
        RevelaError: a process has failed, or they cannot reach each other.
    """
    if started() == 1 or count() > 1:
        yield
        return
    from torch.distributed.distributed_c10d import PrefixStore  # not in every build of torch
    from torch.distributed.rendezvous import rendezvous

    has_gpu = torch.cuda.is_available()
    try:
        store, rank, size = next(rendezvous("env://"))
        # torchrun has one store for all its restarts, and what an ended process left there stays.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"revela-{attempt}-{next(TIMES)}", store)
        backend = "cpu:gloo,cuda:nccl" if has_gpu else "gloo"
        given: Any = dict(store=store, rank=rank, world_size=size, timeout=LONGEST_WAIT)
        dist.init_process_group(backend, **given)
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
        except Exception as error:
            _end_together(error, store, rank, size)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def of_first(make: Callable[[], Value]) -> Value:
    """What ``make`` gives in the first process, which alone calls it."""
    if count() == 1:
        return make()
    made: list[Any] = [make() if is_first() else None]
    dist.broadcast_object_list(made, 0)
    value: Value = made[0]
    return value


def of_all(value: Value) -> list[Value]:
    """The value of every process, in their order."""
    if count() == 1:
        return [value]
    values: list[Any] = [None] * count()
    dist.all_gather_object(values, value)
    return values


def gathered(value: Value) -> list[Value]:
    """In the first process, the value of every process; in the others, their own alone."""
    if count() == 1:
        return [value]
    values: list[Any] | None = [None] * count() if is_first() else None
    dist.gather_object(value, values, 0)
    return [value] if values is None else values


def my_share(length: int) -> slice:
    """This process's part of so many items, the parts in the order of the processes."""
    return slice(index() * length // count(), (index() + 1) * length // count())


def refuse_different(value: Any, sentence: str) -> None:
    """Stop all processes with this sentence if they do not have the same value."""
    if any(other != value for other in of_all(value)):
        raise RevelaError(sentence)


def total(number: Tensor) -> Tensor:
    """The sum of a number over all processes."""
    if count() == 1:
        return number
    number = number.detach().clone()
    dist.all_reduce(number)
    return number


def add_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Put the sum of all processes' gradients into each parameter's, in one message. A gradient
    that none of them has stays None, as after a backward pass over all their batches.
    """
    if count() == 1:
        return
    exists = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8)
    dist.all_reduce(exists, dist.ReduceOp.MAX)  # on the CPU: a GPU is not waited for
    moved = [p for p, has in zip(parameters, exists.tolist(), strict=True) if has]
    for p in moved:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    gradients = [p.grad for p in moved if p.grad is not None]
    if not gradients:
        return
    together = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(together)
    parts = torch.split(together, [gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def copy_first(tensors: Iterable[Tensor]) -> None:
    """Give every process the first one's numbers."""
    if count() > 1:
        for tensor in tensors:
            sent = tensor.detach().contiguous()
            dist.broadcast(sent, 0)
            if sent.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(sent)


def digest(tensors: Iterable[Tensor]) -> str:
    """Tells tensors from others, to the bit."""
    found = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def _take_own_gpu() -> None:
    beside, gpus = int(os.environ.get("LOCAL_WORLD_SIZE") or 1), torch.cuda.device_count()
    if beside > gpus:
        raise RevelaError(
            f"{beside} processes are on a machine with {gpus} GPUs: start no more of them there "
            "(torchrun --nproc-per-node), or hide the GPUs by CUDA_VISIBLE_DEVICES="
        )
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK") or 0))


def _end_together(error: Exception, store: Store, rank: int, size: int) -> None:
    """Tell the others, which notice when their connection to this process closes, and raise.

    The launcher kills the rest as soon as one is gone: so each waits for the others to be told.
    """
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sentence = str(error) if isinstance(error, RevelaError) else ""
    with suppress(RuntimeError):  # the store went with its process
        if not sentence and any(words in str(error) for words in LOST):
            sentence = _said(store, rank, size)
        crashed = f"process {rank} ended by a {type(error).__name__}: see its traceback"
        store.set(f"said-{rank}", sentence or crashed)
        dist.destroy_process_group()
        failed, deadline = store.add("failed", 1), time.monotonic() + AFTER_AN_ERROR
        while sentence not in ("", KILLED) and failed < size and time.monotonic() < deadline:
            time.sleep(0.05)
            failed = store.add("failed", 0)
        if sentence and store.add(f"printed {sentence}", 1) > 1:
            raise SystemExit(2)
    if not sentence:
        raise error
    raise RevelaError(sentence) from None


def _said(store: Store, rank: int, size: int) -> str:
    """The last words of another process, whose connection may close before they are here."""
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        for other in range(size):
            if other != rank and store.check([f"said-{other}"]):
                return str(store.get(f"said-{other}").decode())
        time.sleep(0.05)
    return KILLED


def tensors_beside(module: nn.Module, frozen: Iterable[nn.Module]) -> Iterator[Tensor]:
    """All tensors of a module, without the untrained parameters of some of its parts."""
    left_out = {id(p) for part in frozen for p in part.parameters() if not p.requires_grad}
    tensors = (*module.parameters(), *module.buffers())
    return (tensor for tensor in tensors if id(tensor) not in left_out)
