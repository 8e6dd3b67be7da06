"""What the tests of examples/nano_*.py share: the example itself, texts, and small models."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch
from transformers import AutoModelForCausalLM

from conftest import tiny_config

EXAMPLES = Path(__file__).parents[1] / "examples"
TEXTS = [  # of different lengths
    "Ocean1 ocean2 ocean3.",
    "Ocean4 ocean5 engine1 engine2 engine3 garden4 about the ocean and more words than before.",
    "Engine4 engine.",
    "Garden1 garden2, planet3 planet5; market1 market2 market3 violin1.",
    "Violin2 violin3 enzyme1 enzyme2 and the castle of the glacier.",
]


@contextmanager
def example(name: str) -> Iterator[ModuleType]:
    """The example as a module; its retriever has two layers."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    module.LAYERS = 2
    yield module
    sys.modules.pop(name, None)


def tiny_lm(kind: str, attention: str = "sdpa"):
    """The same weights at every call."""
    torch.manual_seed(2)
    config = tiny_config(kind)
    config.initializer_range = 0.1  # so that attention is far from the mean
    lm = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return lm.eval().requires_grad_(False)


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Equal to 1e-5 of the largest gradient."""
    largest = max([1e-9, *(float(gradient.abs().max()) for gradient in expected)])
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got / largest, want / largest, atol=1e-5, rtol=0)
