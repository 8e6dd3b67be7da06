"""Read tensors of a folder's safetensors files, memory-mapped, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from revela.encoders.model_files import COPY_AGAIN

# safetensors' dtypes -> numpy's, which has no bf16.
FLOATS = {"F16": "<f2", "BF16": "<u2", "F32": "<f4", "F64": "<f8"}
FORMER = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
INTEGERS = {"I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}


class Weights:
    """Reads tensors by name from all safetensors files directly in a folder."""

    def __init__(self, folder: Path) -> None:
        self._places: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with file.open("rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(size))
            header.pop("__metadata__", None)
            for name, about in header.items():
                for former, new in FORMER.items():
                    name = name.replace(former, new)
                self._places[name] = file, 8 + size, about

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor."""
        return {name: tuple(about["shape"]) for name, (_, _, about) in self._places.items()}

    def stored(self, name: str, integers: bool = False) -> NDArray[Any]:
        """A tensor as stored; bf16 as its bits. Quantised weights are no ``integers``, as they have
        a scale elsewhere.

        Raises:
            ValueError: the tensor is missing, its dtype is not supported, or the file is too short.
        """
        if name not in self._places:
            raise ValueError(f"its weights lack {name}: {COPY_AGAIN}")
        file, start, about = self._places[name]
        dtype = (FLOATS | INTEGERS if integers else FLOATS).get(about["dtype"])
        if dtype is None:
            raise ValueError(f"{name} of {file.name} is {about['dtype']}, not fp16, bf16 or fp32")
        place, shape = start + about["data_offsets"][0], tuple(about["shape"])
        return np.asarray(np.memmap(file, dtype, "r", place, shape))

    def fp32(self, name: str) -> NDArray[np.float32]:
        """A tensor in fp32."""
        return fp32(self.stored(name))


def fp32(numbers: NDArray[Any]) -> NDArray[np.float32]:
    """Convert floats, or the bits of bf16 (the upper half of fp32's), to fp32."""
    if numbers.dtype == np.uint16:
        bits = numbers.astype(np.uint32)
        bits <<= 16  # in place: the table may be large
        return bits.view(np.float32)
    return numbers.astype(np.float32, copy=False)
