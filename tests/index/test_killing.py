"""A writer killed at random; `python -m research.benchmarks.search kill` kills it 20 times."""

from __future__ import annotations

from tests.index.killing import kill_while_appending


def test_nothing_acknowledged_is_lost_and_nothing_is_there_twice(tmp_path):
    found = kill_while_appending(tmp_path / "index", kills=3, seed=0)
    assert found["kills"] == 3 and found["acknowledged"] > 0
