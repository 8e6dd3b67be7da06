"""The plot of steps, from made-up rows."""

from __future__ import annotations

import pytest
from matplotlib import pyplot as plt

from research.benchmarks import rows

FACTORS = {"ours": 1.0, "bound": 0.87, "plain": 1.08, "naive": 7.3, "naive, open layers": 2.3}


def made_up(chunks=(16,), depths=(30,), presets=("gated", "paper"), memory=True):
    found = []
    for preset in presets:
        for depth in depths:
            for n in chunks:
                for form, factor in FACTORS.items():
                    if (form, preset) == ("naive, open layers", "paper"):  # it has no gates
                        continue
                    row = {
                        "what": f"step, {preset}",
                        "form": form,
                        "preset": preset,
                        "lm_layers": depth,
                        "chunks": n,
                    }
                    if "naive" in form and n > 16:
                        found.append(row | {"note": "left out"})
                        continue
                    growth = factor * n / 16 * (3 if preset == "paper" else 1) * (depth + 8) / 38
                    found.append(
                        row | {"seconds": 3.5 * growth, "peak_gb": 1.9 * growth if memory else None}
                    )
    return found


def drawn(found, path, monkeypatch):
    """The axes that were drawn."""
    kept = []
    monkeypatch.setattr(plt, "close", kept.append)
    rows.plot(found, path)
    assert path.stat().st_size > 1000
    return kept[0].axes, kept[0].legends


@pytest.mark.parametrize(
    ("chunks", "depths", "labels"),
    [
        ((8, 16, 32), (30,), ["chunks per group"]),
        ((16,), (6, 12, 30), ["layers of the LM"]),
        ((8, 16, 32, 64, 128), (6, 12, 20, 30), ["chunks per group", "layers of the LM"]),
        ((16,), (30,), ["chunks per group"]),
    ],
)
def test_what_varies_gets_a_row_of_axes(tmp_path, monkeypatch, chunks, depths, labels):
    axes, legends = drawn(made_up(chunks, depths), tmp_path / "steps.png", monkeypatch)
    assert [a.get_xlabel() for a in axes] == [label for label in labels for _ in range(2)]
    assert [a.get_ylabel() for a in axes[:2]] == ["seconds per step", "peak memory of a step, GB"]
    assert len(legends) == 1 and len(legends[0].get_texts()) == 2 * len(FACTORS) - 1
    for axis in axes:
        assert len(axis.lines) == 2 * len(FACTORS) - 1


def test_without_memory_there_is_only_time_and_without_steps_nothing(tmp_path, monkeypatch):
    axes, _ = drawn(made_up((8, 16), memory=False), tmp_path / "steps.png", monkeypatch)
    assert [a.get_ylabel() for a in axes] == ["seconds per step"]
    rows.plot([{"what": "encoding", "form": "ours", "seconds": 1.0}], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_each_preset_is_shown_where_it_has_the_most_points():
    found = made_up((8, 16, 32), (30,), ("gated",)) + made_up((16,), (6, 12), ("gated",))
    by_depth, chunks = rows._sweep(found, "lm_layers")
    by_chunks, depth = rows._sweep(found, "chunks")
    assert (chunks, depth) == (16, 30)
    assert {r["lm_layers"] for r in by_depth} == {6, 12, 30} and {
        r["chunks"] for r in by_chunks
    } == {8, 16, 32}


def test_ratios_are_of_the_same_turn():
    assert rows.ratio([2.0, 30.0, 4.0], [1.0, 10.0, 2.0]) == 2.0
