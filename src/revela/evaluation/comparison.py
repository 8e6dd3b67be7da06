"""Train several objectives from the same start for the same time, and score each along the way."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path

from revela.errors import RevelaError
from revela.evaluation.beir import load_collection, mean_outcomes
from revela.evaluation.label_free import HeldOutCheck
from revela.evaluation.results import COMPARISON, LINES, Comparison, CurvePoint
from revela.files import atomic_write
from revela.groups.training_set import TrainingSet
from revela.index.contexts import Context
from revela.settings import Corpus, Recipe
from revela.training.record import (
    FREE_WHEN_DONE,
    refuse_another,
    remove_begun,
    settings_of,
)
from revela.training.run import train
from revela.types import Encoder

log = logging.getLogger(__name__)


def compare(
    recipes: Mapping[str, Recipe],
    read: Callable[[Recipe], tuple[TrainingSet, HeldOutCheck]],
    on: Sequence[Path],
    out: Path,
    *,
    seeds: Sequence[int],
    points: int,
    corpus: str,
    command: str,
) -> Comparison:
    """Train each recipe with each seed, and score it at its start and after each of ``points``
    equal parts.

    A finished run of the same settings and documents is kept, and an interrupted one is resumed.
    compare.json and compare.png are written after each run.

    Args:
        recipes: by name.
        read: gives the training set of a recipe and the label-free check beside it; called for
            every way in which the recipes read the corpus.
        on: BEIR-layout folders to score on; nothing is selected by these scores.
        out: folder of the runs.
        seeds: of the runs, one after another.
        points: checks per run.
        corpus, command: as for ``train``.

    Raises:
        RevelaError: a run's folder holds something else, or a run of other settings or documents;
            too little is held out.
    """
    readings: dict[Corpus, tuple[TrainingSet, HeldOutCheck]] = {}
    for name, recipe in recipes.items():
        if recipe.corpus not in readings:
            readings[recipe.corpus] = read(recipe)
        if not readings[recipe.corpus][1].tasks:
            raise RevelaError(
                f"{name}: runs are compared beside the label-free check, and too few documents are "
                "held out for one: raise --held-out, or add text"
            )
    collections = [load_collection(folder) for folder in on]
    lexical = {c.name: mean_outcomes(c, {})["BM25"]["ndcg@10"] for c in collections}

    def judge(encoder: Encoder) -> dict[str, float]:
        readers = {c.name: Context("corpus").into(encoder, c.documents) for c in collections}
        scores = {c.name: mean_outcomes(c, {"the model": readers[c.name]}) for c in collections}
        return {name: systems["the model"]["ndcg@10"] for name, systems in scores.items()}

    comparison = Comparison(lexical, {})
    for seed, (name, recipe) in product(seeds, recipes.items()):
        folder = out / f"{name}-{seed}"
        recipe = recipe.but(seed=seed, checks=points)
        begun = any((folder / "checkpoints").glob("checkpoint-*"))
        data, check = readings[recipe.corpus]
        own = data.but(recipe)
        if (folder / "modules.json").is_file() and not begun:
            refuse_another(settings_of(recipe), own.fingerprint, folder, FREE_WHEN_DONE)
        else:
            log.info(f"== {name}, seed {seed}")
            if not begun:
                remove_begun(folder)
            if recipe.training.max_minutes:
                own.write_queries()  # otherwise the first run would spend its time on them
            outcome = train(
                recipe,
                own,
                folder,
                check=check,
                bm25=check.bm25(),
                corpus=corpus,
                command=command,
                resume=begun,
                judge=judge,
            )
            if outcome.interrupted:
                raise RevelaError(f"stopped in {folder}: run the same command again to resume")
        comparison.curves[f"{name}, seed {seed}"] = _curve(folder)
        with atomic_write(out / COMPARISON) as temporary:
            temporary.write_text(json.dumps(comparison.to_json(), indent=1))
        _plot(comparison, out / "compare.png", timed=bool(recipe.training.max_minutes))
    return comparison


def _curve(folder: Path) -> list[CurvePoint]:
    """The judged scores of a run, from its metrics.jsonl."""
    rows = [json.loads(line) for line in (folder / LINES).read_text().splitlines()]
    judged = [row for row in rows if "judged" in row]
    return [CurvePoint(row["minutes"], row["tokens_read"], row["judged"]) for row in judged]


def _plot(comparison: Comparison, path: Path, timed: bool) -> None:
    """nDCG@10 of every run against time or tokens, a plot per collection, BM25 as a dashed line."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        log.info(f"{path.name} is not drawn without matplotlib: run pip install 'revela[report]'")
        return

    bm25 = comparison.bm25
    figure = Figure(figsize=(5.5 * len(bm25), 4), layout="constrained")
    axes = figure.subplots(1, len(bm25), squeeze=False)[0]
    presets = {label: label.split(",")[0] for label in comparison.curves}
    colours = {preset: f"C{i}" for i, preset in enumerate(sorted(set(presets.values())))}
    for axis, (name, level) in zip(axes, bm25.items(), strict=True):
        named = set[str]()
        for label, curve in comparison.curves.items():
            x = [point.minutes if timed else point.tokens_read for point in curve]
            y = [point.judged[name] for point in curve]
            preset = presets[label]
            legend = None if preset in named else preset
            named.add(preset)
            axis.plot(x, y, marker="o", color=colours[preset], label=legend)
        axis.axhline(level, linestyle="--", color="0.5", label="BM25")
        x_label = "minutes of training" if timed else "tokens read"
        axis.set(xlabel=x_label, ylabel="nDCG@10", title=name)
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=110)
