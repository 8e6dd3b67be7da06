"""Which device computes, in which precision, and how tensors get there and back without waiting."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
"""Tensors by name: a batch, or one of its sides."""


def autocast(device: torch.device, bf16: bool) -> torch.autocast:
    """A context: bf16 autocast on this device, or none."""
    kind = "cpu" if device.type == "meta" else device.type  # which computes nothing
    return torch.autocast(kind, dtype=torch.bfloat16, enabled=bf16)


@cache
def _keep_freed() -> None:
    """Have glibc keep freed blocks of up to 1 GB for the next batch. By default it returns them to
    the kernel, which clears every page of the next batch: a quarter of the time that encoding on a
    CPU takes.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD


def compute_device() -> torch.device:
    """The first GPU; without one, the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    _keep_freed()
    return torch.device("cpu")


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on this device, without waiting for it; ``on_cpu`` gives the original."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()  # a GPU fetches from other memory only while one waits
    copy = tensor.to(device, non_blocking=True)
    if copy is not tensor:
        copy.__dict__["original"] = tensor
    return copy


def on_cpu(tensor: Tensor) -> Tensor:
    """The tensor on the CPU: the original of one that was ``sent``, else a copy, for which the CPU
    waits until a GPU has computed it.
    """
    original: Tensor = tensor.__dict__.get("original", tensor)
    return original.cpu()


def fetched(tensor: Tensor) -> Callable[[], Tensor]:
    """Begin to copy a tensor to the CPU; the function returned waits for the copy."""
    if not tensor.is_cuda:
        return lambda: on_cpu(tensor)
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    wait = work_so_far(tensor.device)

    def when_copied() -> Tensor:
        wait()
        return copy

    return when_copied


def work_so_far(device: torch.device) -> Callable[[], None]:
    """A function that waits until the device has done what it has been asked for by now."""
    if device.type != "cuda":
        return lambda: None
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    wait: Callable[[], None] = event.synchronize
    return wait
