"""Train several methods from the same start for the same time, and score each.

Every run is a `revela train` and a `revela eval` of its own (training/commands.py).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import TypeAdapter

from revela.errors import RevelaError
from revela.evaluation.collection import load_collection
from revela.evaluation.results import SystemScores, write_json
from revela.evaluation.significance import MEASURE, Difference, differences
from revela.training.check_settings import check_recipe
from revela.training.checkpoint import IGNORED_WHEN_COMPARING_FINISHED_RUNS, check_same_run
from revela.training.checks import format_scores
from revela.training.commands import eval_commands, is_finished, run_commands, train_commands
from revela.training.recipe import Recipe, check_unread
from revela.training.record import METRICS, START_SCORES, Metrics, parse

COMPARISON, SCORES = "compare.json", "scores"
COMPARED = ("revela-gated", "contrastive-crop")
"The methods that are compared by default."
FILE = TypeAdapter(dict[str, dict[str, SystemScores]])
"What `revela eval --json` writes: collection -> system -> scores."


@dataclass(frozen=True)
class CurvePoint:
    """One point of training; ``judged``: collection -> nDCG@10 of judged queries."""

    minutes: float
    tokens_read: int
    judged: dict[str, float]


@dataclass(frozen=True)
class Comparison:
    """compare.json.

    Attributes:
        scores: row -> collection -> nDCG@10. The rows are BM25, the start, and each method or
            variant, whose scores are means over seeds.
        differences: of each pair of rows, on each collection and over the queries of all.
        curves: run ("NAME, seed N") -> its points.
    """

    scores: dict[str, dict[str, float]]
    differences: list[Difference]
    curves: dict[str, list[CurvePoint]]

    def __str__(self) -> str:
        """Scores by row and differences by pair, in lines."""
        rows = [f"  {name:24} {format_scores(row, {})}" for name, row in self.scores.items()]
        pairs: dict[str, list[str]] = {}
        for d in self.differences:
            interval = "" if d.margin is None else f" ± {d.margin:.3f}"
            p = "p < 0.001" if d.p < 0.001 else f"p {d.p:.3f}"
            text = f"{d.on} {d.mean:+.3f}{interval} ({p})"
            pairs.setdefault(f"{d.first} - {d.second}", []).append(text)
        lines = (f"  {pair:40} {', '.join(found)}" for pair, found in pairs.items())
        about = (
            "differences ± half the 95 % interval; +: the first of the pair is better; p: "
            "randomisation test, not corrected for multiple comparisons"
        )
        return "\n".join(["nDCG@10 of the saved retrievers", *rows, about, *lines])


def rows_of(
    methods: Sequence[str],
    settings: Mapping[str, Any],
    variants: Mapping[str, Mapping[str, Any]],
    given: Mapping[str, Any],
) -> dict[str, dict[str, Any]]:
    """The settings of each method and of each of its variants, by the name of its runs.

    Args:
        methods: presets, methods, or FILE.py:Class; none: that of the settings, or ``COMPARED``.
        settings, variants: of a recipe file (``read_recipe``).
        given: settings above those of the file.

    Raises:
        RevelaError: two rows are equal, or none of them reads a setting that is given.
    """
    rows, recipes = dict[str, dict[str, Any]](), dict[str, Recipe]()
    made = list[tuple[str, set[str]]]()
    names = methods or ([str(settings["method"])] if "method" in settings else COMPARED)
    for method, (variant, changes) in product(names, (variants or {"": {}}).items()):
        named = {"keep": "last", **settings, "method": method, **changes, **given}
        recipe, unread = Recipe().merge(named)
        shown = re.sub(r".*:", "", method)  # of FILE.py:Class
        name = "-".join(filter(None, (shown if len(names) > 1 or not variant else "", variant)))
        if same := next((other for other, known in recipes.items() if known == recipe), None):
            raise RevelaError(f"{same} and {name} are the same run: leave one out")
        recipes[name] = recipe
        rows[name] = {key: value for key, value in named.items() if key not in unread}
        made.append((recipe.method.name, unread))
    check_unread(made)
    return rows


def compare(
    rows: Mapping[str, Mapping[str, Any]],
    corpus: Sequence[str],
    on: Sequence[Path],
    out: Path,
    *,
    seeds: Sequence[int] = (0,),
    points: int = 4,
    processes: int = 1,
    dry_run: bool = False,
) -> Comparison | None:
    """Train each row with each seed, and score it at the start, after each of ``points`` equal
    parts, and, as it is saved, with intervals and fusions.

    A finished run with the same settings is kept, an interrupted one goes on. compare.json is
    written after each run.

    Args:
        rows: name -> settings, with the method.
        corpus: as for `revela train`.
        on: folders in BEIR layout to score on; these scores do not select states.
        out: folder for the runs, scores and compare.json.
        seeds: each row is trained with each of them.
        points: number of scores after the start.
        processes: number of processes that train a run.
        dry_run: print the commands, and return None.

    Raises:
        RevelaError: a run is refused, before any starts, or fails.
    """
    runs = [
        (f"{name}, seed {seed}", out / f"{name}-{seed}", {**settings, "seed": seed})
        for seed, (name, settings) in product(seeds, rows.items())
    ]
    names = [load_collection(folder).name for folder in on]  # a bad one is refused at once
    if same := {name for name in names if names.count(name) > 1}:
        raise RevelaError(f"two folders of --on are called {min(same)}: rename one")
    for _, folder, settings in runs:
        recipe = Recipe.of(**settings)
        if is_finished(folder):
            check_same_run(recipe.to_dict(), folder, IGNORED_WHEN_COMPARING_FINISHED_RUNS)
        else:
            check_recipe(recipe, folder, resume=True)
    comparison, folders = None, dict[str, Path]()
    for label, folder, settings in runs:
        saved, recipe = out / SCORES / folder.name, Recipe.of(**settings)
        slots, precision = recipe.context.context, recipe.training.precision
        commands = [
            *train_commands(corpus, settings, folder, on=on, points=points, processes=processes),
            *eval_commands(folder, on, saved, slots=slots, precision=precision),
        ]
        run_commands(commands, dry_run=dry_run)
        if not dry_run:
            folders[label] = folder
            comparison = summary(folders, on)
            write_json(comparison, out / COMPARISON)
    return comparison


def summary(folders: Mapping[str, Path], on: Sequence[Path]) -> Comparison:
    """The comparison of finished runs, given by label ("NAME, seed N")."""
    curves = dict[str, list[CurvePoint]]()
    found = defaultdict[str, dict[str, list[dict[str, float]]]](lambda: {c.name: [] for c in on})
    for label, folder in folders.items():
        curves[label] = [
            CurvePoint(row.minutes, row.tokens_read or 0, row.judged)
            for row in Metrics(folder / METRICS).written()
            if row.judged is not None
        ]
        name = label.rpartition(", seed ")[0]
        start = parse(FILE, (folder / START_SCORES).read_bytes(), str(folder / START_SCORES))
        for c in on:
            scores = scores_of(folder.parent / SCORES / folder.name / f"{c.name}.json")
            saved = next(value for system, value in scores.items() if system != "BM25")
            of_rows = {"BM25": scores["BM25"], "start": start[c.name]["start"], name: saved}
            for row, system in of_rows.items():
                found[row][c.name].append({q: m[MEASURE] for q, m in system.queries.items()})
    # The mean over runs of each query's score.
    rows = {
        name: {c: {q: fmean(run[q] for run in runs) for q in runs[0]} for c, runs in row.items()}
        for name, row in found.items()
    }
    means = {name: {c: fmean(v.values()) for c, v in row.items()} for name, row in rows.items()}
    return Comparison(means, differences(rows), curves)


def scores_of(file: Path) -> dict[str, SystemScores]:
    """The scores by system of a file of `revela eval --json` about one collection; after BM25 the
    first is the model.

    Raises:
        RevelaError: it is damaged.
    """
    (systems,) = parse(FILE, file.read_bytes(), str(file)).values()
    return systems
