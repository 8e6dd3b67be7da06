"""``revela train``: text in, a retriever out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from revela.cli.flags import Corpus, Out, Several, Switch, check_paths
from revela.cli.main import command_line
from revela.cli.printing import print_scores
from revela.cli.recipe_flags import Given, RecipeFile, recipe_of
from revela.errors import RevelaError, extra
from revela.training.methods.registry import DEFAULT


def train(
    corpus: Corpus = [],  # noqa: B006
    *,
    out: Out,
    recipe_file: RecipeFile = None,
    resume: Switch = False,
    overwrite: Switch = False,
    on: Annotated[list[Path], Several] = [],  # noqa: B006
    points: int = 0,
    dry_run: Switch = False,
    given: Given = None,
) -> None:
    """Train a retriever on raw text.

    On several GPUs: ``torchrun --nproc-per-node N -m revela train GROUPS --out DIR``, on stored
    groups.

    ``--method NAME --help`` says what another method is and lists its settings,
    docs/command-line.md lists all.

    Parameters
    ----------
    corpus:
        Folders, files (text, HTML, source code, JSONL, Parquet, CSV, PDF, Word and others; .gz or
        .zst of each), hub:owner/name; or one folder of groups, made by revela groups.
    out:
        Folder for the retriever: a Sentence-Transformers model, with run.json and metrics.jsonl.
    recipe_file:
        A TOML file of settings, which override the method's preset; flags override the file.
    resume:
        Continue the run in --out from its last checkpoint. The corpus and the settings default to
        those of the run. If there is no run, start one; if it is finished, a higher limit extends
        it.
    overwrite:
        Replace the run in --out.
    on:
        Folders with judged queries, as for eval, which are scored at every check. These scores do
        not select the saved state.
    points:
        Check after each of this many equal parts of the run, in place of --check-every.
    dry_run:
        Estimate what a new run would read, and its memory and time, from a sample of the text and a
        few steps; write nothing to --out.
    """
    if "RANK" not in os.environ:  # under torchrun one of the processes says it later
        if not resume:
            recipe_of(recipe_file, given)
        check_paths(corpus, None if resume or overwrite else out)
    with extra("train", "training"):
        from revela.training.distributed import joined
    from revela.training.checkpoint import recorded_run

    if dry_run and (resume or overwrite):
        raise RevelaError("--dry-run estimates a new run: leave out --resume and --overwrite")
    if dry_run:
        from revela.training.estimate import estimate

        print(*estimate(corpus, out, recipe_of(recipe_file, given)), sep="\n")
        return
    from revela.training.on_files import train_on_files

    with joined():
        former, known = (resume and recorded_run(out)) or (DEFAULT, ())
        corpus = corpus or list(known)
        recipe = recipe_of(recipe_file, given, former, corpus)
        result = train_on_files(
            corpus,
            out,
            recipe,
            resume=resume,
            overwrite=overwrite,
            on=on,
            points=points,
            command=command_line(),
        )
        print(result.summary)
        if result.scores:
            print_scores("label-free check, nDCG@10", result.scores["saved"], result.scores)
        print(result.cost)
    if result.signal:
        raise SystemExit(128 + result.signal)
