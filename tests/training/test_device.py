"""What a batch has freed is kept for the next one."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from revela.training import device

MEASURED = """
import mmap
import torch
from revela.training.device import compute_device

def size():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE >> 20

compute_device()
held = torch.ones(25 * 2**20)  # 100 MB
before = size()
del held
print(before - size())
"""


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or torch.cuda.is_available(), reason="of glibc on a CPU"
)
def test_what_a_batch_has_freed_stays_in_the_process():
    done = subprocess.run([sys.executable, "-c", MEASURED], capture_output=True, text=True)
    assert done.returncode == 0 and int(done.stdout) < 50, done.stderr


def test_another_c_library_is_left_alone(monkeypatch):
    def none(name: None) -> object:
        raise OSError

    monkeypatch.setattr(device.ctypes, "CDLL", none)
    device._keep_freed.__wrapped__()
