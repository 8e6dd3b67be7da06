"""Several objectives from the same start for the same time: what does each learn, and how fast?"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from revela.errors import RevelaError
from revela.evaluation.beir import evaluate, load_collection
from revela.files import atomic_write
from revela.groups.training_set import TrainingSet
from revela.settings import Recipe
from revela.training.record import (
    FREE_WHEN_DONE,
    refuse_another,
    remove_begun,
    settings_of,
)
from revela.training.run import Check, train
from revela.types import Encoder

log = logging.getLogger(__name__)

Curve = list[
    dict[str, Any]
]  # {"minutes", "tokens_read", "judged": {collection: nDCG@10}} of each check


def compare(
    recipes: Mapping[str, Recipe],
    data: TrainingSet,
    on: Sequence[Path],
    out: Path,
    *,
    seeds: Sequence[int],
    points: int,
    check: Check | None,
    bm25: dict[str, float],
    corpus: str,
    command: str,
) -> tuple[dict[str, Curve], dict[str, float]]:
    """Train each recipe with each seed and score it at its start and after each of ``points`` equal
    parts.

    A run that is whole, and of these settings and documents, is not made again; one that was
    stopped goes on. compare.json and compare.png are written after each run.

    Args:
        recipes: by name.
        data: what is trained on.
        on: BEIR-layout folders; their scores decide nothing.
        out: folder of the runs.
        seeds: of the runs, one after another.
        points: checks of a run.
        check, bm25, corpus, command: as for ``train``.

    Returns:
        The curve of each run, "name, seed n", and BM25's nDCG@10 by collection.

    Raises:
        RevelaError: a run's folder holds something else, or a run of other settings or documents.
    """
    collections = [load_collection(folder) for folder in on]
    lexical = {c.name: evaluate(c, {})["BM25"]["ndcg@10"] for c in collections}

    def judge(encoder: Encoder) -> dict[str, float]:
        return {c.name: evaluate(c, {"it": encoder})["it"]["ndcg@10"] for c in collections}

    curves: dict[str, Curve] = {}
    for seed, (name, recipe) in product(seeds, recipes.items()):
        folder = out / f"{name}-{seed}"
        recipe = recipe.but(seed=seed, checks=points)
        begun = any((folder / "checkpoints").glob("checkpoint-*"))
        if (folder / "modules.json").is_file() and not begun:
            refuse_another(settings_of(recipe), data.fingerprint, folder, FREE_WHEN_DONE)
        else:
            log.info(f"== {name}, seed {seed}")
            if not begun:
                remove_begun(folder)
            outcome = train(
                recipe,
                data,
                folder,
                check=check,
                bm25=bm25,
                corpus=corpus,
                command=command,
                resume=begun,
                judge=judge,
            )
            if outcome.interrupted:
                raise RevelaError(f"stopped in {folder}: run the same command again to go on")
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        curves[f"{name}, seed {seed}"] = [
            {k: row[k] for k in ("minutes", "tokens_read", "judged")}
            for row in rows
            if "judged" in row
        ]
        with atomic_write(out / "compare.json") as temporary:
            temporary.write_text(json.dumps({"bm25": lexical, "curves": curves}, indent=1))
        _plot(
            curves,
            lexical,
            out / "compare.png",
            "tokens_read" if not recipe.training.max_minutes else "minutes",
        )
    return curves, lexical


def _plot(curves: Mapping[str, Curve], bm25: Mapping[str, float], path: Path, against: str) -> None:
    """nDCG@10 of every run against time or tokens, a plot a collection, BM25 dashed."""
    from matplotlib.figure import Figure

    presets = sorted({label.split(",")[0] for label in curves})
    figure = Figure(figsize=(5.5 * len(bm25), 4), layout="constrained")
    axes = figure.subplots(1, len(bm25), squeeze=False)[0]
    for axis, (name, level) in zip(axes, bm25.items(), strict=True):
        for label, curve in curves.items():
            preset = label.split(",")[0]
            first = label == next(other for other in curves if other.split(",")[0] == preset)
            axis.plot(
                [row[against] for row in curve],
                [row["judged"][name] for row in curve],
                marker="o",
                color=f"C{presets.index(preset)}",
                label=preset if first else None,
            )
        axis.axhline(level, linestyle="--", color="0.5", label="BM25")
        axis.set(
            xlabel="tokens read" if against == "tokens_read" else "minutes of training",
            ylabel="nDCG@10",
            title=name,
        )
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=110)
