"""The budget, the learning rate, and the batches and seconds of a step."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from types import SimpleNamespace

import pytest
import torch

import revela.training.step as steps
from revela.training.settings import Optimizer, Training
from revela.training.step import Budget, make_optimizer, row_batches, sides, step_limit


def test_progress_follows_the_nearer_limit():
    budget = Budget(max_steps=100, max_minutes=1)
    budget.seconds = 30
    assert budget.done(10) == 0.5 and budget.done(80) == 0.8 and budget.done(200) == 1.0
    assert Budget(0).done(10**6) == 0.0
    by_tokens = Budget(0, max_mtokens=2.0)
    by_tokens.tokens = 500_000
    assert by_tokens.done(10**6) == 0.25


SCHEDULES = [
    ("linear", [0.1, 0.9, 0.5, 0.2]),
    ("cosine", [0.1, (1 + 0.9510565) / 2, 0.5, (1 - 0.8090170) / 2]),
    ("constant", [0.1, 1, 1, 1]),
]


@pytest.mark.parametrize(("schedule", "expected"), SCHEDULES)
def test_learning_rate_warms_up_and_follows_its_schedule(schedule, expected):
    """Over the run; or, with restarts, over every 100 steps."""
    settings = Optimizer(schedule=schedule, warmup_steps=10)
    budget, places = Budget(max_steps=100), (0, 10, 50, 80)
    assert [budget.learning_rate_factor(i, settings) for i in places] == pytest.approx(expected)
    assert budget.learning_rate_factor(100, settings) == (schedule == "constant")
    budget = Budget(max_steps=1000)
    restarted = [budget.learning_rate_factor(300 + i, settings, restarts=100) for i in places]
    assert restarted == pytest.approx(expected)


def test_epochs_are_a_limit_in_steps():
    settings = Training(max_epochs=3, groups_per_step=4)
    assert step_limit(settings, groups=10) == 8 and step_limit(Training(), groups=10) == 0
    assert step_limit(replace(settings, max_steps=5), groups=10) == 5


def test_adamw_has_the_betas_and_the_weight_decay_of_the_settings():
    settings = Optimizer(betas=(0.5, 0.6), weight_decay=0.1)
    (group,) = make_optimizer(torch.nn.Linear(1, 1), settings).param_groups
    assert (group["betas"], group["weight_decay"]) == ((0.5, 0.6), 0.1)


def test_batches_go_on_into_the_next_epoch():
    def groups(epoch):
        return iter([[0, 5], [1, 6], [2, 7]])

    first = [[(0, 0), (0, 5)], [(0, 1), (0, 6)], [(0, 2), (0, 7)], [(1, 0), (1, 5)]]
    assert list(islice(row_batches(groups, 1), 4)) == first
    pairs = list(islice(row_batches(groups, 2), 2))
    assert pairs == [first[0] + first[1], first[2] + first[3]]


def test_a_batch_is_split_into_its_sides():
    batch = {"query_input_ids": 1, "query_target": 2, "passage_input_ids": 3, "passage_mask": 4}
    assert sides(batch) == [{"input_ids": 1, "target": 2}, {"input_ids": 3, "mask": 4}]


def test_a_step_lasts_until_the_device_has_computed_the_one_before(monkeypatch):
    """The CPU asks for a step in .1 s, which takes the device 5 s; what a check takes is no time of
    a step.
    """
    now, free = 0.0, 0.0

    def work_so_far(_device):
        nonlocal free
        free = end = max(free, now) + 5.0

        def wait():
            nonlocal now
            now = max(now, end)

        return wait

    monkeypatch.setattr(steps, "work_so_far", work_so_far)
    # The module's name alone: the event loop of a server that is up reads time.monotonic, too.
    monkeypatch.setattr(steps, "time", SimpleNamespace(monotonic=lambda: now))
    watch, laps = steps.Stopwatch(torch.device("cpu")), []
    for step in range(20):
        now += 0.1
        laps.append(watch.lap())
        if step == 9:
            with watch.stopped():
                now += 1000.0
    assert laps[0] == pytest.approx(0.1) and laps[1] == pytest.approx(5.0)
    assert 95.0 <= sum(laps) <= 101.0
