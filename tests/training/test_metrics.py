"""The budget, the learning rate, and the metrics file."""

from __future__ import annotations

import json
from itertools import islice, pairwise

import pytest
import torch

import revela.training.step as steps
from revela.errors import RevelaError
from revela.training.metrics import Budget, Metrics
from revela.training.retriever.module import split_in_half
from revela.training.step import row_batches, sides


def test_progress_follows_the_nearer_limit():
    budget = Budget(max_steps=100, max_minutes=1)
    budget.spend([20, 30], [5, 5])  # two processes
    assert budget.done(10) == 0.5 and budget.done(80) == 0.8 and budget.done(200) == 1.0
    assert Budget(0).done(10**6) == 0.0
    by_tokens = Budget(0, max_million_tokens=2.0)
    by_tokens.spend([1, 1], [300_000, 200_000])
    assert by_tokens.done(10**6) == 0.25


def test_learning_rate_warms_up_and_falls_to_zero():
    budget = Budget(max_steps=100)
    factors = [budget.learning_rate_factor(step, 10) for step in range(101)]
    assert factors[0] == pytest.approx(0.1) and max(factors) <= 1 and factors[100] == 0
    assert all(a > b for a, b in pairwise(factors[10:]))


def test_a_resumed_run_drops_what_it_will_write_again_and_a_line_cut_short(tmp_path):
    path = tmp_path / "m.jsonl"
    metrics = Metrics(path)
    for step in range(5):
        metrics.write(step=step, minutes=0.1 * step, loss=5.0 - step)
    whole = path.read_text()
    path.write_text(whole + whole.splitlines()[-1][:9])  # by a kill
    assert [row["step"] for row in Metrics(path, keep_until=9).rows] == [0, 1, 2, 3, 4]
    assert path.read_text() == whole and list(tmp_path.iterdir()) == [path]
    again = Metrics(path, keep_until=2)
    written = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert written == [row["step"] for row in again.rows] == [0, 1, 2]


@pytest.mark.parametrize("bad", [b'{"step": 1, "lo', b"\xff", b"[1]", b"{}", b'{"step": null}'])
def test_a_damaged_line_among_others_is_one_sentence(tmp_path, bad):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 0}\n' + bad + b'\n{"step": 2}\n')
    with pytest.raises(RevelaError, match=r"m\.jsonl:2 is no line of a run's metrics: remove that"):
        Metrics(path, keep_until=9)


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


def test_first_half_is_half_of_the_tokens(tiny_tokenizer):
    text = "ocean1 engine2 garden3 planet4 market5 violin0"
    (half,) = split_in_half([text], tiny_tokenizer, 64)
    assert text.startswith(half)
    whole, part = (len(tiny_tokenizer(t)["input_ids"]) for t in (text, half))
    assert part == whole // 2
    assert split_in_half(["x", text], tiny_tokenizer, 64) == ["x", half]


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
    monkeypatch.setattr(steps.time, "monotonic", lambda: now)
    watch, laps = steps.Stopwatch(torch.device("cpu")), []
    for step in range(20):
        now += 0.1
        laps.append(watch.lap())
        if step == 9:
            with watch.stopped():
                now += 1000.0
    assert laps[0] == pytest.approx(0.1) and laps[1] == pytest.approx(5.0)
    assert 95.0 <= sum(laps) <= 101.0
