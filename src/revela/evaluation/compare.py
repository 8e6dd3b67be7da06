"""Train several objectives from the same start for the same time, and score each along the way."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path

from revela.errors import RevelaError
from revela.evaluation.collection import load_collection
from revela.evaluation.evaluate import mean_outcomes
from revela.evaluation.label_free import HeldOutCheck
from revela.evaluation.results import COMPARISON, LINES, Comparison, CurvePoint, write_json
from revela.groups.dataset import TrainingSet
from revela.index.contexts import Context
from revela.settings import Corpus, Recipe
from revela.training.record import FREE_WHEN_DONE, check_another, remove_begun, settings_of
from revela.training.train import train
from revela.types import Encoder

log = logging.getLogger(__name__)

Data = tuple[TrainingSet, HeldOutCheck]


def compare(
    recipes: Mapping[str, Recipe],
    read: Callable[[Recipe], Data],
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
    compare.json is written after each run.

    Args:
        read: gives the training set of a recipe and the label-free check beside it.
        on: BEIR-layout folders to score on; nothing is selected by these scores.
    """
    readings = _read_each(recipes, read)
    collections = [load_collection(folder) for folder in on]

    def judge(encoder: Encoder) -> dict[str, float]:
        scores = {}
        for collection in collections:
            reader = Context("corpus").into(encoder, collection.documents)
            scores[collection.name] = mean_outcomes(collection, {"model": reader})["model"]
        return {name: metrics["ndcg@10"] for name, metrics in scores.items()}

    bm25 = {c.name: mean_outcomes(c, {})["BM25"]["ndcg@10"] for c in collections}
    comparison = Comparison(bm25, {})
    for seed, (name, recipe) in product(seeds, recipes.items()):
        folder = out / f"{name}-{seed}"
        recipe = recipe.replace(seed=seed)
        begun = any((folder / "checkpoints").glob("checkpoint-*"))
        data, check = readings[recipe.corpus]
        # A run that is limited by time would spend it on queries, which later runs find written.
        own = data.replace(recipe, lazy_queries=not recipe.training.max_minutes)
        if (folder / "modules.json").is_file() and not begun:
            check_another(settings_of(recipe), own.fingerprint, folder, FREE_WHEN_DONE)
        else:
            log.info(f"== {name}, seed {seed}")
            if not begun:
                remove_begun(folder)
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
                points=points,
            )
            if outcome.interrupted:
                raise RevelaError(f"stopped in {folder}: run the same command again to resume")
        comparison.curves[f"{name}, seed {seed}"] = _curve(folder)
        write_json(comparison, out / COMPARISON)
    return comparison


def _read_each(recipes: Mapping[str, Recipe], read: Callable[[Recipe], Data]) -> dict[Corpus, Data]:
    """The data of every way in which the recipes read the corpus."""
    readings: dict[Corpus, Data] = {}
    for name, recipe in recipes.items():
        if recipe.corpus not in readings:
            readings[recipe.corpus] = read(recipe)
        if not readings[recipe.corpus][1].tasks:
            raise RevelaError(
                f"{name}: runs are compared beside the label-free check, and too few documents are "
                "held out for one: raise --held-out, or add text"
            )
    return readings


def _curve(folder: Path) -> list[CurvePoint]:
    """The judged scores of a run, from its metrics.jsonl."""
    rows = [json.loads(line) for line in (folder / LINES).read_text().splitlines()]
    judged = [row for row in rows if "judged" in row]
    return [CurvePoint(row["minutes"], row["tokens_read"], row["judged"]) for row in judged]
