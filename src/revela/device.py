"""Which device computes, and in which precision."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import time
from pathlib import Path

import torch

from revela.settings import Precision

# A process returns what it has freed once it has so many times the size that it had after a batch,
# and half a GB; and every so many seconds, so that a service stays as large as it was.
GROWN = 1.25
RETURNED_AFTER = 60.0


def autocast(device: torch.device, bf16: bool) -> torch.autocast:
    """A context: bf16 autocast on this device, or none."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16)


def compute_device() -> torch.device:
    """The first GPU; without one, the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    freed_memory()
    return torch.device("cpu")


class FreedMemory:
    """What glibc keeps of freed memory: blocks of up to 1 GB, for the next batch. By default it
    returns them to the kernel, which clears every page of that batch: a fifth of the time that
    encoding takes.

    Texts of ever other lengths need blocks of ever other sizes, which do not fit into the gaps that
    the former ones have left. So all is returned every minute, and at once if the process has grown
    by a quarter.
    """

    def __init__(self) -> None:
        self._libc: ctypes.CDLL | None = None
        self._most = 0.0  # bytes of the process; 0: not known before the next batch
        self._returned = time.monotonic()
        trim_threshold, mmap_threshold = -1, -3  # malloc.h
        with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
            libc = ctypes.CDLL(None)
            libc.mallopt(mmap_threshold, 2**30)
            libc.mallopt(trim_threshold, 2**30)
            self._libc = libc

    def share(self) -> None:
        """Serve all threads that are begun later from one heap: of every other heap glibc keeps
        what is free at its end, however much is returned.
        """
        arena_max = -8  # malloc.h
        if self._libc is not None:
            self._libc.mallopt(arena_max, 1)

    def after_a_batch(self) -> None:
        """Return what is kept, if the process has grown too much or a minute has passed."""
        if self._libc is None:
            return
        size, now = self._size(), time.monotonic()
        if not self._most:
            self._most = GROWN * size + 2**29
        elif size > self._most or now - self._returned > RETURNED_AFTER:
            self._libc.malloc_trim(0)
            self._most, self._returned = 0.0, now

    def _size(self) -> int:
        """Bytes of this process in memory."""
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@functools.cache
def freed_memory() -> FreedMemory:
    """The one of this process, from now on."""
    return FreedMemory()


def after_a_batch(device: torch.device) -> None:
    """On a CPU, return what was freed now and then."""
    if device.type == "cpu":
        freed_memory().after_a_batch()


def has_fast_bf16(device: torch.device) -> bool:
    """Whether bf16 matrix products are native on this device; emulated ones are slow."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu":
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return False


def uses_bf16(precision: Precision, device: torch.device) -> bool:
    """Whether to compute in bf16: with "bf16", and with "auto" where it is fast."""
    return precision == "bf16" or (precision == "auto" and has_fast_bf16(device))
