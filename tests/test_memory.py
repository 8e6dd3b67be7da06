"""Memory that was freed is kept for the next batch, and returned every minute and when the process
has grown.
"""

from __future__ import annotations

import subprocess
import sys

import torch

from revela import memory
from revela.device import return_freed

GB = 2**30

FRAGMENTED = """
import random, torch
from revela.memory import FreedMemory
memory, rng, kept = FreedMemory(), random.Random(0), []
if memory._libc is None:
    print(0, 0)
    raise SystemExit
def batch():
    held = [torch.ones(rng.randrange(40, 60) * 2**18) for _ in range(20)]  # 40 to 60 MB each
    kept.append([bytearray(600) for _ in range(1000)])
    del held
batch()
memory.after_a_batch()
before = memory._size()
memory._most = 1  # as if it had grown
memory.after_a_batch()
print(before >> 20, memory._size() >> 20)
"""


THREADS = """
import sys, threading
from revela.memory import FreedMemory
memory, go_on = FreedMemory(), threading.Event()
if memory._libc is None:
    print(0, 0)
    raise SystemExit
if sys.argv[1] == "shared":
    memory.share()
def work(ended):
    held = [bytes(2**17) for _ in range(400)]  # 50 MB
    del held
    ended.release()
    go_on.wait()
ended = threading.Semaphore(0)
for _ in range(4):
    threading.Thread(target=work, args=[ended]).start()
    ended.acquire()
before = memory._size()
memory._most = 1  # as if it had grown
memory.after_a_batch()
print(before >> 20, memory._size() >> 20)
go_on.set()
"""


class Libc:
    def __init__(self) -> None:
        self.trims = 0

    def malloc_trim(self, pad: int) -> None:
        self.trims += 1


def test_a_process_returns_memory_once_it_has_grown_by_a_quarter(monkeypatch):
    freed, libc, sizes = memory.FreedMemory(), Libc(), []
    freed._libc = libc
    monkeypatch.setattr(freed, "_size", lambda: sizes[-1])
    trims = []
    for size in (2, 2.5, 2.9, 3.1, 4, 5.4, 5.6, 4):  # the size after 3.1 and 5.6 counts anew
        sizes.append(int(size * GB))
        freed.after_a_batch()
        trims.append(libc.trims)
    assert trims == [0, 0, 0, 1, 1, 1, 2, 2]


def test_memory_is_returned_at_once_before_something_large(monkeypatch):
    freed, libc = memory.FreedMemory(), Libc()
    freed._libc = libc
    monkeypatch.setattr(freed, "_size", lambda: 2 * GB)
    monkeypatch.setattr("revela.device.freed_memory", lambda: freed)
    return_freed(torch.device("cpu"))
    assert libc.trims == 1
    return_freed(torch.device("meta"))
    freed.after_a_batch()  # which counts anew
    assert libc.trims == 1


def test_a_process_returns_memory_every_minute(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(memory.time, "monotonic", lambda: clock[0])
    freed, libc = memory.FreedMemory(), Libc()
    freed._libc = libc
    trims = []
    for clock[0] in (1, 30, 59, 61, 62, 100, 122):
        freed.after_a_batch()
        trims.append(libc.trims)
    assert trims == [0, 0, 0, 1, 1, 1, 2]


def test_what_was_freed_is_returned():
    done = subprocess.run(
        [sys.executable, "-c", FRAGMENTED], capture_output=True, text=True, check=True
    )
    before, after = map(int, done.stdout.split())
    assert before == after == 0 or before - after > 500  # MB, of a gigabyte


def returned_by_threads(how: str) -> int:
    """MB."""
    done = subprocess.run(
        [sys.executable, "-c", THREADS, how], capture_output=True, text=True, check=True
    )
    before, after = map(int, done.stdout.split())
    return before - after


def test_what_threads_have_freed_is_returned_if_they_share_a_heap():
    shared, own = returned_by_threads("shared"), returned_by_threads("own")
    assert shared == own == 0 or (shared > 40 and own < 20)


def test_another_c_library_is_left_alone(monkeypatch):
    def none(name: None) -> object:
        raise OSError

    monkeypatch.setattr(memory.ctypes, "CDLL", none)
    memory.FreedMemory().after_a_batch()
