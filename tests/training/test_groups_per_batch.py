"""How many groups a forward pass reads with --groups-per-batch auto."""

from __future__ import annotations

import json

import pytest
import torch

from revela.training.checkpoint import recorded
from revela.training.groups_per_batch import fitting_groups, greatest_that_fits
from revela.training.methods.revela import RevelaLoss
from revela.training.recipe import Recipe
from revela.training.train import train
from tests.test_records import DOCUMENTS, GATED, RUN


def peak_of(base: int, per_group: int, tried: list[int], memory: float = float("inf")):
    """A pass that needs ``base`` bytes and ``per_group`` more for each group."""

    def run(count: int) -> int:
        tried.append(count)
        if base + per_group * count > memory:
            raise torch.cuda.OutOfMemoryError("out of memory")
        return base + per_group * count

    return run


@pytest.mark.parametrize(
    ("total", "room", "fits"),
    [(32, 1000, 32), (32, 100, 8), (32, 90, 8), (32, 89, 4), (12, 70, 6), (12, 69, 4), (32, 5, 1)],
)
def test_the_greatest_divisor_that_fits_is_found_and_none_is_tried_that_cannot(total, room, fits):
    tried: list[int] = []
    assert greatest_that_fits(total, peak_of(10, 10, tried), room) == fits
    assert max(tried) <= max(fits, 2)


def test_a_pass_without_memory_ends_the_search():
    tried: list[int] = []
    assert greatest_that_fits(32, peak_of(0, 10, tried, memory=15), room=1000) == 1
    assert tried == [1, 2]


def test_a_pass_without_memory_leaves_no_gradient(monkeypatch):
    class Loss(torch.nn.Linear):
        def forward(self, sides):
            self.weight.sum().backward()
            if len(sides[0]["ids"]) > 1:
                raise torch.cuda.OutOfMemoryError("out of memory")
            return self.weight.sum()

    for name in ("memory_reserved", "reset_peak_memory_stats", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda _: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 1000))
    loss = Loss(1, 1)
    fits = fitting_groups(
        4,
        lambda _: iter([[i] for i in range(4)]),
        lambda rows: {"a_ids": torch.ones(len(rows))},
        loss,
    )
    assert fits == 1 and all(p.grad is None for p in loss.parameters())


def test_the_number_is_found_once_per_run_and_then_read(tiny_lm_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("REVELA_CACHE", str(tmp_path / "cache"))
    models, out = dict.fromkeys(("model", "lm"), str(tiny_lm_folder)), tmp_path / "out"
    recipe = Recipe.of(**models | RUN | GATED | dict(groups_per_step=4, max_steps=2))
    read: list[int] = []
    pass_over = RevelaLoss.forward

    def on_a_gpu(out, name, find):
        return recorded(out, name, (lambda: 2) if name == "groups_per_batch" else find)

    monkeypatch.setattr("revela.training.train.recorded", on_a_gpu)
    monkeypatch.setattr(
        RevelaLoss,
        "forward",
        lambda self, f: read.append(len(f[0]["input_ids"])) or pass_over(self, f),
    )
    train(recipe, DOCUMENTS, out)
    assert read == [2 * recipe.groups.group_size] * 4  # two passes in each of two steps
    record = json.loads((out / "run.json").read_text())
    assert record["groups_per_batch"] == "auto" and record["about"]["groups_per_batch"] == 2
    assert recorded(out, "groups_per_batch", lambda: 4) == 2
