"""``revela compare``: several methods from the same start for the same time."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from revela.cli.flags import Corpus, Out, Several
from revela.cli.main import command_line
from revela.cli.printing import print_scores
from revela.cli.recipe_flags import Given, RecipeFile, recipes_of
from revela.errors import extra


def compare(
    corpus: Corpus,
    *,
    on: Annotated[list[Path], Several],
    out: Out,
    methods: Annotated[list[str], Several] = [],  # noqa: B006
    seeds: Annotated[list[int], Several] = [0],  # noqa: B006
    points: int = 4,
    recipe_file: RecipeFile = None,
    given: Given = None,
) -> None:
    """Train several methods, or variants of one, from the same start for the same time.

    Limited by --max-minutes or, with --max-minutes 0, by --max-tokens-read. Settings given here
    hold for every run. Finished runs are kept: run it again to add methods or seeds.

    Parameters
    ----------
    corpus:
        As for train.
    on:
        Folders with judged queries, as for eval.
    out:
        Folder for the runs and compare.json.
    methods:
        What to compare: presets, methods, or FILE.py:Class of your own. Default: the method of
        --recipe, or else revela-gated and contrastive-crop.
    seeds:
        Run each method with each of these.
    points:
        Score a run at its start and after each of this many equal parts.
    recipe_file:
        A TOML file of settings, below flags and over every method's preset. Each table
        [variants.NAME] in it is run beside the others: see research/recipes.
    """
    with extra("train", "revela compare"):
        from revela.training.compare import compare as run
        from revela.training.distributed import check_single_process
        from revela.training.on_files import read_training_set
        from revela.training.record import Provenance

    check_single_process()
    comparison = run(
        recipes_of(methods, recipe_file, given),
        partial(read_training_set, corpus=corpus),
        on,
        out,
        seeds=seeds,
        points=points,
        provenance=Provenance(", ".join(map(str, corpus)), command_line()),
    )
    bm25, curves = comparison.bm25, comparison.curves
    start = next(iter(curves.values()))[0].judged
    ends = {label: curve[-1].judged for label, curve in curves.items()}
    print_scores("nDCG@10 at the end", bm25, {"BM25": bm25, "start": start, **ends})
