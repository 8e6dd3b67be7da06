"""What a process has freed: kept for the next batch, and returned to the system now and then."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import time
from pathlib import Path

GROWN = 1.25  # freed memory is returned once the process has so many times its size, and 0.5 GB
RETURNED_AFTER = 60.0  # seconds


class FreedMemory:
    """Keeps freed blocks of up to 1 GB for the next batch, by glibc's settings.

    By default glibc returns them to the kernel, which clears every page of the next batch: a fifth
    of the time that encoding takes. Varying batch sizes fragment the heap, so all is returned now
    and then.
    """

    def __init__(self) -> None:
        self._libc: ctypes.CDLL | None = None
        self._most = 0.0  # bytes of the process; 0: not known before the next batch
        self._returned = time.monotonic()
        with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
            libc = ctypes.CDLL(None)
            libc.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD
            libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD
            self._libc = libc

    def share(self) -> None:
        """One heap for all threads that are begun later; others are never returned whole."""
        if self._libc is not None:
            self._libc.mallopt(-8, 1)  # M_ARENA_MAX

    def after_a_batch(self) -> None:
        """Return what is kept, if the process has grown too much or a minute has passed."""
        if self._libc is None:
            return
        size = self._size()
        if not self._most:
            self._most = GROWN * size + 2**29
        elif size > self._most or time.monotonic() - self._returned > RETURNED_AFTER:
            self.give_back()

    def give_back(self) -> None:
        """Return what is kept."""
        if self._libc is not None:
            self._libc.malloc_trim(0)
        self._most, self._returned = 0.0, time.monotonic()

    def _size(self) -> int:
        """Bytes of this process in memory."""
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@functools.cache
def freed_memory() -> FreedMemory:
    """The one of this process, from now on."""
    return FreedMemory()
