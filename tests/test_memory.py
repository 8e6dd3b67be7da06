"""Memory that was freed is kept for the next batch, and returned every minute and when the process
has grown.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from revela import memory
from revela.device import return_freed

GB = 2**30

MEASURED = """
import random, sys, threading
from revela.memory import FreedMemory
memory, rng, kept, go_on = FreedMemory(), random.Random(0), [], threading.Event()
if memory._libc is None:
    print(0, 0)
    raise SystemExit
def fragmented():
    import torch
    held = [torch.ones(rng.randrange(40, 60) * 2**18) for _ in range(20)]  # 40 to 60 MB each
    kept.append([bytearray(600) for _ in range(1000)])
    del held
def threads():
    memory.share()
    ended = threading.Semaphore(0)
    def work():
        held = [bytes(2**17) for _ in range(400)]  # 50 MB
        del held
        ended.release()
        go_on.wait()
    for _ in range(4):
        threading.Thread(target=work).start()
        ended.acquire()
{}()
before = memory._size()
memory._most = 1  # as if it had grown
memory.after_a_batch()
print(before >> 20, memory._size() >> 20)
go_on.set()
"""


@pytest.fixture
def freed(monkeypatch):
    """Memory of a process whose size is ``freed.size``, at the time ``freed.now``."""
    found = memory.FreedMemory()
    found.size, found.now, found.trims = 2 * GB, 0.0, 0

    class Libc:
        def malloc_trim(self, pad: int) -> None:
            found.trims += 1

    found._libc = Libc()
    monkeypatch.setattr(found, "_size", lambda: int(found.size))
    monkeypatch.setattr(memory.time, "monotonic", lambda: found.now)
    return found


def test_memory_is_returned_after_growth_by_a_quarter_and_every_minute(freed):
    trims = []
    for size in (2, 2.5, 2.9, 3.1, 4, 5.4, 5.6, 4):  # the size after 3.1 and 5.6 counts anew
        freed.size = size * GB
        freed.after_a_batch()
        trims.append(freed.trims)
    assert trims == [0, 0, 0, 1, 1, 1, 2, 2]
    trims = []
    for freed.now in (1, 30, 59, 61, 62, 100, 122):
        freed.after_a_batch()
        trims.append(freed.trims - 2)
    assert trims == [0, 0, 0, 1, 1, 1, 2]


def test_memory_is_returned_at_once_before_something_large(freed, monkeypatch):
    monkeypatch.setattr("revela.device.freed_memory", lambda: freed)
    return_freed(torch.device("cpu"))
    assert freed.trims == 1
    return_freed(torch.device("meta"))
    freed.after_a_batch()  # which counts anew
    assert freed.trims == 1


@pytest.mark.parametrize(("by", "least"), [("fragmented", 500), ("threads", 40)])
def test_what_was_freed_is_returned(by, least):
    """In MB; that of threads, if they share a heap."""
    command = [sys.executable, "-c", MEASURED.replace("{}", by)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert before == after == 0 or before - after > least


def test_another_c_library_is_left_alone(monkeypatch):
    def none(name: None) -> object:
        raise OSError

    monkeypatch.setattr(memory.ctypes, "CDLL", none)
    memory.FreedMemory().after_a_batch()
