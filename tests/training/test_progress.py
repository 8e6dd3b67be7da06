"""The clock, the learning rate, and the metrics file."""

from __future__ import annotations

import json
import time
from itertools import islice, pairwise

import pytest
from matplotlib.figure import Figure

from revela.errors import RevelaError
from revela.retriever.tokens import halves
from revela.training.loop import row_batches, sides
from revela.training.progress import Clock, Metrics, plot


def test_progress_follows_the_nearer_limit():
    clock = Clock(max_steps=100, max_minutes=1)
    clock.seconds = 30
    assert clock.progress(10) == 0.5 and clock.progress(80) == 0.8 and clock.progress(200) == 1.0
    assert Clock(0, 0).progress(10**6) == 0.0
    by_tokens = Clock(0, 0, max_million_tokens=2.0)
    by_tokens.tokens = 500_000
    assert by_tokens.progress(10**6) == 0.25


def test_learning_rate_warms_up_and_falls_to_zero():
    clock = Clock(max_steps=100, max_minutes=0)
    factors = [clock.learning_rate_factor(step, 10) for step in range(101)]
    assert factors[0] == pytest.approx(0.1) and max(factors) <= 1 and factors[100] == 0
    assert all(a > b for a, b in pairwise(factors[10:]))


def test_metrics_drop_what_a_resumed_run_will_write_again(tmp_path):
    metrics = Metrics(tmp_path / "m.jsonl")
    for step in range(5):
        metrics.write(step=step, minutes=0.1 * step, loss=5.0 - step)
    again = Metrics(tmp_path / "m.jsonl", keep_until=2)
    assert (
        [json.loads(line)["step"] for line in (tmp_path / "m.jsonl").read_text().splitlines()]
        == [0, 1, 2]
        == [r["step"] for r in again.rows]
    )


def test_a_line_that_a_kill_cut_short_is_dropped(tmp_path):
    metrics = Metrics(tmp_path / "m.jsonl")
    for step in range(3):
        metrics.write(step=step, minutes=0.1 * step, loss=5.0 - step)
    whole = (tmp_path / "m.jsonl").read_text()
    (tmp_path / "m.jsonl").write_text(whole + whole.splitlines()[-1][:9])
    assert [row["step"] for row in Metrics(tmp_path / "m.jsonl", keep_until=9).rows] == [0, 1, 2]
    assert (tmp_path / "m.jsonl").read_text() == whole and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("bad", [b'{"step": 1, "lo', b"\xff", b"[1]", b"{}", b'{"step": null}'])
def test_a_damaged_line_among_others_is_one_sentence(tmp_path, bad):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 0}\n' + bad + b'\n{"step": 2}\n')
    with pytest.raises(RevelaError, match=r"m\.jsonl:2 is no line of a run's metrics: remove that"):
        Metrics(path, keep_until=9)


def test_plot_is_a_png_that_names_the_loss(tmp_path, monkeypatch):
    drawn, save = [], Figure.savefig
    monkeypatch.setattr(
        Figure,
        "savefig",
        lambda self, *args, **kwargs: (drawn.append(self), save(self, *args, **kwargs)),
    )
    metrics = Metrics(tmp_path / "m.jsonl")
    for step in range(20):
        metrics.write(step=step, minutes=0.1 * step, loss=5.0 - step / 20)
    metrics.write(step=19, minutes=2.0, check={"title": 0.4})
    plot(metrics, {"title": 0.5}, tmp_path / "t.png", "contrastive loss (nats)")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG") and len(
        list(tmp_path.iterdir())
    ) == 2
    assert drawn[0].axes[0].get_ylabel() == "contrastive loss (nats)"


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
    (half,) = halves([text], tiny_tokenizer, 64)
    assert text.startswith(half)
    whole, part = (len(tiny_tokenizer(t)["input_ids"]) for t in (text, half))
    assert part == whole // 2
    assert halves(["x", text], tiny_tokenizer, 64) == ["x", half]


def test_a_clock_of_processor_time_does_not_count_waiting():
    waited, worked = (Clock(0, 1.0, cpu=True) for _ in range(2))
    waited.start()
    time.sleep(0.2)
    idle = waited.stop()
    worked.start()
    began = time.process_time()
    while time.process_time() - began < 0.1:
        pass
    busy = worked.stop()
    assert idle < 0.1 <= busy
