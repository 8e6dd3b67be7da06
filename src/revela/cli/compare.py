"""``revela compare``: several methods from the same start for the same time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from revela.cli.flags import Corpus, Out, Several, Switch, check_paths
from revela.cli.recipe_flags import Given, RecipeFile, given_settings
from revela.errors import extra
from revela.training.recipe import read_recipe


def compare(
    corpus: Corpus,
    *,
    on: Annotated[list[Path], Several],
    out: Out,
    methods: Annotated[list[str], Several] = [],  # noqa: B006
    seeds: Annotated[list[int], Several] = [0],  # noqa: B006
    points: int = 4,
    processes: int = 0,
    dry_run: Switch = False,
    recipe_file: RecipeFile = None,
    given: Given = None,
) -> None:
    """Train several methods, or variants of one, from the same start for the same time.

    Limited by --max-minutes or, with --max-minutes 0, by --max-tokens-read. Settings given here
    hold for every run; the last state is saved, unless --keep best is one of them. Each run is a
    `revela train` and a `revela eval`, which are printed. Finished commands are not repeated: run
    it again to add methods or seeds, or to continue after an interruption.

    Parameters
    ----------
    corpus:
        As for train.
    on:
        Folders with judged queries, as for eval.
    out:
        Folder for the runs, their scores and compare.json.
    methods:
        What to compare: presets, methods, or FILE.py:Class of your own. Default: the method of
        --recipe, or else revela-gated and contrastive-crop.
    seeds:
        Run each method with each of these.
    points:
        Score a run at its start and after each of this many equal parts.
    processes:
        Train each run by this many processes, started by torchrun. Default: one for each GPU.
    dry_run:
        Print the commands, and run none.
    recipe_file:
        A TOML file of settings, which override every method's preset; flags override the file. Each
        table [variants.NAME] in it is a separate run: see research/recipes.
    """
    with extra("train", "revela compare"):
        from revela.training.commands import processes_here
        from revela.training.compare import compare as run
        from revela.training.compare import rows_of
        from revela.training.distributed import check_single_process

    check_single_process()
    check_paths(corpus, None)
    settings, variants = read_recipe(recipe_file) if recipe_file is not None else ({}, {})
    comparison = run(
        rows_of(methods, settings, variants, given_settings(given)),
        [*map(str, corpus)],
        on,
        out,
        seeds=seeds,
        points=points,
        processes=processes or processes_here(),
        dry_run=dry_run,
    )
    print(comparison or "nothing was run")
