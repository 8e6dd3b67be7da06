"""Find the arithmetic that is fast on this processor, and start OpenVINO on it."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Any

from revela.types import Precision

# Linux's flags for products in int8 (VNNI, AMX) and in bf16, on x86 and ARM.
INT8 = {"avx_vnni", "avx512_vnni", "amx_int8", "i8mm"}
BF16 = {"avx512_bf16", "amx_bf16"}
LIMIT = "ONEDNN_MAX_CPU_ISA"  # limits the instructions that OpenVINO and torch use

# OpenVINO would report each start to Google Analytics by this package; without it, it does not.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]


@cache
def flags() -> frozenset[str]:
    """The processor's flags, by Linux's names; empty on other systems."""
    table = Path("/proc/cpuinfo")
    text = table.read_text() if table.is_file() else ""
    lines = re.findall(r"^(?:flags|Features).*?:(.*)", text, re.M)
    return frozenset(" ".join(lines).split())


def fastest(int8: bool) -> Precision:
    """The fastest precision that the processor has instructions for: int8 (if ``int8``), bf16 or
    fp32. Without instructions for it, int8 is slower than fp32.
    """
    if int8 and flags() & INT8 and _within_limit("VNNI", "BF16", "AMX"):
        return "int8"
    return "bf16" if has_bf16() else "fp32"


def has_bf16() -> bool:
    """Whether the processor has instructions for bf16."""
    return bool(flags() & BF16) and _within_limit("BF16", "AMX")


def _within_limit(*names: str) -> bool:
    """Whether the limit, if set, allows any of these instructions."""
    limit = os.environ.get(LIMIT, "").upper()
    return not limit or any(name in limit for name in names)


@cache
def openvino_core() -> Any:
    """OpenVINO's core, one per process.

    Each core sets a signal stack in the thread that makes it, and restores the previous stack when
    it is deleted. With two cores, that stack may be a deleted core's, and Ctrl-C would cause a
    segmentation fault.
    """
    # With the default, 1,024 prepared operations, batches of many shapes take 150 MB more.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    import openvino

    return openvino.Core()


def has_gpu() -> bool:
    """Whether there is an NVIDIA GPU, and torch to use it."""
    return shutil.which("nvidia-smi") is not None and has_torch()


def has_torch() -> bool:
    """Whether torch is installed; it is not imported."""
    return importlib.util.find_spec("torch") is not None
