"""Train several methods from the same start for the same time, and score each meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path

from revela.encoders.base import TextEncoder
from revela.errors import RevelaError
from revela.evaluation.collection import Collection, load_collection
from revela.evaluation.evaluate import outcomes
from revela.evaluation.label_free import HeldOutCheck
from revela.evaluation.results import write_json
from revela.evaluation.significance import MEASURE
from revela.text.chunk import PASSAGE_WORDS
from revela.training.checkpoint import IGNORED_WHEN_COMPARING_FINISHED_RUNS, check_same_run
from revela.training.checks import CheckPlan
from revela.training.recipe import Recipe
from revela.training.record import COMPARISON, Comparison, CurvePoint, Provenance, Run
from revela.training.retriever.context import draw_documents
from revela.training.retriever.module import RetrieverEncoder
from revela.training.settings import Corpus
from revela.training.train import train
from revela.training.training_set import TrainingSet
from revela.types import Document

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
    provenance: Provenance,
) -> Comparison:
    """Train each recipe with each seed; score at the start and after each of ``points`` parts.

    A finished run with the same settings and documents is kept, an interrupted one is resumed.
    compare.json is written after each run.

    Args:
        recipes: name -> recipe.
        read: recipe -> its training set and label-free check.
        on: folders in BEIR layout to score on; these scores do not select states.
        out: folder for the runs.
        seeds: each recipe is trained with each of them.
        points: number of scores after the start.
        provenance: corpus and command, for the model cards.
    """
    data_by_corpus: dict[Corpus, Data] = {}
    for name, recipe in recipes.items():
        if recipe.corpus not in data_by_corpus:
            data_by_corpus[recipe.corpus] = read(recipe)
        if not data_by_corpus[recipe.corpus][1].tasks:
            raise RevelaError(
                f"{name}: runs are compared beside the label-free check, and too few documents are "
                "held out for one: raise --held-out, or add text"
            )
    collections = [load_collection(folder) for folder in on]

    def judge(encoder: TextEncoder) -> dict[str, float]:
        found = {c.name: outcomes(c, {"model": _in_context_of(c, encoder)}) for c in collections}
        return {name: systems["model"].means()[MEASURE] for name, systems in found.items()}

    bm25 = {c.name: outcomes(c, {})["BM25"].means()[MEASURE] for c in collections}
    comparison = Comparison(bm25, {})
    for seed, (name, recipe) in product(seeds, recipes.items()):
        folder = out / f"{name}-{seed}"
        recipe = recipe.replace(seed=seed)
        data, check = data_by_corpus[recipe.corpus]
        # With a time limit, the first run would lose time to queries that later runs find written.
        own = data.replace(recipe, lazy_queries=not recipe.training.max_minutes)
        if (folder / "modules.json").is_file() and Run.read(folder).finished:
            check_same_run(
                recipe.to_dict(), own.fingerprint, folder, IGNORED_WHEN_COMPARING_FINISHED_RUNS
            )
        else:
            log.info(f"== {name}, seed {seed}")
            plan = CheckPlan(check, check.bm25(), judge, points)
            outcome = train(recipe, own, folder, plan=plan, provenance=provenance, resume=True)
            if outcome.signal:
                error = RevelaError(f"stopped in {folder}: run the same command again to resume")
                error.exit_code = 128 + outcome.signal
                raise error
        comparison.curves[f"{name}, seed {seed}"] = _curve(folder)
        write_json(comparison, out / COMPARISON)
    return comparison


def _in_context_of(collection: Collection, encoder: TextEncoder) -> TextEncoder:
    """The encoder; one with slots reads documents of the collection, as in the paper (CDE)."""
    if not isinstance(encoder, RetrieverEncoder) or not encoder.slots:
        return encoder
    documents = [*map(Document, collection.document_ids, collection.documents)]
    return encoder.in_context(draw_documents(documents, encoder.slots, 0, PASSAGE_WORDS))


def _curve(folder: Path) -> list[CurvePoint]:
    """The judged scores of a run."""
    return [
        CurvePoint(row.minutes, row.tokens_read or 0, row.judged)
        for row in Run.read(folder).metrics
        if row.judged is not None
    ]
