"""What a process has freed: kept for the next batch, and returned to the system now and then."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import time
from pathlib import Path

# A process returns what it has freed once it has so many times the size that it had after a batch,
# and half a GB; and every so many seconds, so that a service stays as large as it was.
GROWN = 1.25
RETURNED_AFTER = 60.0


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
