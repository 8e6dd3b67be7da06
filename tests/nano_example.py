"""What the tests of examples/nano_*.py share: the example itself, texts, small models, a run."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
from transformers import AutoModelForCausalLM

from conftest import make_rows, tiny_config

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


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(model, expected) -> None:
    found, wanted = gradients(model), gradients(expected)
    assert found.keys() == wanted.keys()
    assert_close([found[name] for name in wanted], list(wanted.values()))


def run_on_a_folder(nano: ModuleType, folder: Path, capsys, *options: str) -> list[float]:
    """Write files with nested folders and both line ends, run ``main`` for three steps on them, and
    check what it prints. Returns the score before and after.
    """
    text = folder / "text"
    (text / "below").mkdir(parents=True)
    for i, row in enumerate(make_rows(12, sentences=30)):
        ends = "\r\n" if i % 3 else "\n"
        file = (text / "below" if i % 2 else text) / f"{i}.md"
        file.write_text(f"# {row['title']}{ends}{ends}{row['text']}", newline="")
    nano.main([str(text), "--out", str(folder / "out"), "--steps", "3", *options])
    printed = capsys.readouterr().out
    losses = re.findall(r"loss (\d+\.\d+)", printed)
    assert len(losses) == 3 and len(set(losses)) == 3
    hits = re.findall(r"^-?0\.\d{3}  (?:below/)?\d+\.md: .+", printed, re.M)
    assert len(hits) == 3 and hits == sorted(hits, reverse=True)
    [scores] = re.findall(r"^MRR .*: (0\.\d{3}) -> (0\.\d{3})", printed, re.M)
    return [float(score) for score in scores]


def train_and_stay(nano: ModuleType, folder: Path, model: Path, capsys) -> list[list[float]]:
    """Write files, run ``main`` for three steps on them, again with a learning rate of 0, and check
    what it prints. Returns the scores of both runs: before, after, and with other contexts.
    """
    for i, row in enumerate(make_rows(12, sentences=90)):
        (folder / f"{i}.md").write_text(f"# {row['title']}\n\n{row['text']}")
    (folder / "c.csv").write_text("not read")
    scores = []
    for rate in (nano.LEARNING_RATE, 0.0):
        with mock.patch.object(nano, "LEARNING_RATE", rate):
            nano.main([str(folder), "--model", str(model), "--steps", "3"])
        printed = capsys.readouterr().out
        losses = re.findall(r"loss (\d\.\d+)", printed)
        assert len(losses) == 3 and len(set(losses)) == 3
        hits = re.findall(r"^(-?[01]\.\d{3})  .+", printed, re.M)
        assert len(hits) == 3 and hits == sorted(hits, key=float, reverse=True)
        [line] = re.findall(r"^MRR.*", printed, re.M)
        scores.append([float(score) for score in re.findall(r"[01]\.\d{3}", line)])
    return scores
