"""The README's chart, docs/search.svg, from the means in docs/results.md.

python -m research.chart
"""

from __future__ import annotations

import re

import matplotlib

from research.docs_site import ROOT

SERVED = "## What do `revela index` and `revela search` find?"
WAYS = ["BM25", "vectors", "RRF", "fused by score", "fused, re-ranked"]
COLOURS = ["#9aa0a6", "#c8b273", "#d98c5f", "#4c78a8", "#1f4e79"]
ROWS = {
    "mean of 9": "nine collections in English (three of code)",
    "mean of 16": "sixteen others, in eleven languages",
}
TUNED = (
    "Hatched: constants of the fusion were chosen on these collections,\n"
    "those of the re-ranking on the nine in English."
)


def means() -> dict[str, list[float]]:
    """nDCG@10 of each way to search, by row."""
    section = (ROOT / "docs" / "results.md").read_text(encoding="utf-8").partition(SERVED)[2]
    found = {}
    for row in ROWS:
        cells = re.findall(rf"^\| {row} \|(.*)\|$", section, re.M)[0].split("|")
        found[row] = [float(cell) for cell in cells]
    return found


def main() -> None:
    matplotlib.use("Agg")
    # The salt makes the same file each time.
    matplotlib.rcParams |= {"svg.hashsalt": "revela", "svg.fonttype": "none"}
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 2.9), sharex=True, layout="constrained")
    for axis, (row, scores) in zip(axes, means().items(), strict=True):
        places = range(len(WAYS))
        hatches = [""] * 3 + ["///"] * 2
        axis.barh(places, scores, color=COLOURS, hatch=hatches, edgecolor="white", height=0.72)
        for place, score in zip(places, scores, strict=True):
            axis.text(score + 0.01, place, f"{score:.3f}".lstrip("0"), va="center", fontsize=10)
        axis.set_yticks(places, WAYS, fontsize=10)
        axis.set_title(ROWS[row], fontsize=11, loc="left")
        axis.set(xlim=(0, 1.02), xlabel="nDCG@10")
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(TUNED, fontsize=8, color="0.35")
    figure.savefig(ROOT / "docs" / "search.svg", metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()
