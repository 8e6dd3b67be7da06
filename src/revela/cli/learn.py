"""Verbs that make a retriever, or something on the way to one: train, queries, groups, compare,
heads.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from revela.cli.main import DEFAULTS, Corpus, Flat, Preset, RecipeFile, Several, app, each_over
from revela.cli.printing import print_group, print_scores, print_table, snippet
from revela.errors import RevelaError
from revela.settings import Recipe, refuse_unread


@app.command
def train(
    corpus: Corpus,
    *,
    out: Path,
    preset: Preset = "gated",
    recipe_file: RecipeFile = None,
    resume: Annotated[bool, Parameter(negative=())] = False,
    recipe: Annotated[Recipe, Flat] = DEFAULTS,
) -> None:
    """Train a retriever on raw text.

    Parameters
    ----------
    corpus:
        Folders, files (text, HTML, source code, JSONL, Parquet, CSV, PDF, StackExchange's
        Posts.xml; .gz of each), hub:owner/name. Or one folder of groups, made by revela groups.
    out:
        Folder for the retriever: a Sentence-Transformers model with metrics.jsonl and training.png.
    preset:
        The settings to start from: gated (ours), paper (Revela's), or those of another objective;
            --objective implies its own.
    recipe_file:
        A TOML file of settings; flags win over it, and it wins over the preset.
    resume:
        Continue the run in --out from its last checkpoint.
    """
    from revela.training.run import refuse_at_once
    from revela.training.run import train as run

    refuse_unread([(preset, recipe)])
    refuse_at_once(recipe, out, resume)  # before a language model writes questions for the check
    documents, check = divided(corpus, recipe)
    bm25 = check.bm25()
    outcome = run(
        recipe,
        documents,
        out,
        check=check if check.tasks else None,
        bm25=bm25,
        corpus=", ".join(map(str, corpus)),
        command="revela " + shlex.join(sys.argv[1:]),
        resume=resume,
        queries_file=queries_file(corpus, recipe),
    )
    if check.tasks:
        systems = {
            "BM25": bm25,
            "untrained": outcome.untrained,
            "before training": outcome.before,
            "trained": outcome.after,
        }
        print_scores("label-free check, nDCG@10", outcome.after, systems)
    more = ", go on with --resume" if outcome.interrupted else ""
    print(f"{outcome.steps:,} updates in {outcome.minutes:.1f} minutes; saved to {out}{more}")


@app.command
def queries(
    corpus: Corpus,
    *,
    show: int = 5,
    preset: Preset = "gated",
    recipe_file: RecipeFile = None,
    recipe: Annotated[Recipe, Flat] = DEFAULTS,
) -> None:
    """Have a language model write queries for a corpus, as the objectives dream and infonce need
    them.

    They are kept beside the corpus; a stopped run goes on where it was, and train uses what is
    there.

    Parameters
    ----------
    corpus:
        As for train.
    show:
        Print this many of them.
    preset:
        The settings to start from, as for train.
    recipe_file:
        A TOML file of settings, as for train.
    """
    import dataclasses

    from revela.groups.training_set import training_chunks, training_rows

    documents, _ = divided(corpus, recipe)
    recipe = dataclasses.replace(recipe, objective="infonce")
    rows = training_rows(
        recipe, documents, training_chunks(recipe, documents), queries_file(corpus, recipe)
    )
    asked = [row for row in rows if row.query]
    for row in asked[:: max(1, len(asked) // max(1, show))][:show]:
        print(f"\n{row.query}\n   {snippet(row.text)}")


@app.command
def groups(
    corpus: Corpus,
    *,
    out: Path | None = None,
    show: int = 0,
    shares: Annotated[list[float], Several] = [],  # noqa: B006
    preset: Preset = "gated",
    recipe_file: RecipeFile = None,
    recipe: Annotated[Recipe, Flat] = DEFAULTS,
) -> None:
    """Build the groups of chunks that training compares with one another, look at them, and keep
    them for train.

    Parameters
    ----------
    corpus:
        As for train; or rows that are groups already, lists of texts or {"src": ..., "text":
        [...]}, in JSONL or hub:owner/name; or a folder of groups, to look at.
    out:
        Folder for the groups.
    show:
        Print so many groups.
    shares:
        What share of the groups each corpus has, as weights; none: all groups of all.
    preset:
        The settings to start from, as for train.
    recipe_file:
        A TOML file of settings, as for train.
    """
    from revela.groups.build import build_groups
    from revela.groups.folder import GroupFolder, is_group_folder

    if len(corpus) == 1 and is_group_folder(corpus[0]):
        folder = GroupFolder(corpus[0])
    elif out is None:
        raise RevelaError("groups need a folder to be kept in: give --out")
    else:
        folder = build_groups(recipe, corpus, out, shares, queries_file(corpus, recipe))
    print(f"{len(folder):,} groups of {folder.size} in {folder.folder}")
    for group in islice(folder.order(recipe.seed)(0), show):
        members = folder.members(sorted(group))
        print_group(
            f"group {group[0] // folder.size + 1:,}", members, [member.name for member in members]
        )


@app.command
def compare(
    corpus: Corpus,
    *,
    on: Annotated[list[Path], Several],
    out: Path,
    presets: Annotated[list[Preset], Several] = ["gated", "crop"],  # noqa: B006
    seeds: Annotated[list[int], Several] = [0],  # noqa: B006
    points: int = 4,
    recipe_file: RecipeFile = None,
    recipe: Annotated[Recipe, Flat] = DEFAULTS,
) -> None:
    """Train several objectives, or variants of one, from the same start for the same time, and plot
    nDCG@10 against it.

    Bounded by --max-minutes or, with --max-minutes 0, by --max-tokens-read. Settings given here
    hold for every run. What is done already is kept: run it again to add presets or seeds.

    Parameters
    ----------
    corpus:
        As for train.
    on:
        Folders with judged queries, as for eval.
    out:
        Folder for the runs, compare.json and compare.png.
    presets:
        What to compare.
    seeds:
        Each preset is run with each of these.
    points:
        A run is scored at its start and after each of so many equal parts.
    recipe_file:
        A TOML file of settings; flags win over it, and it wins over every preset. Each [table] in
        it is a variant, run beside the others: see recipes/ablations.
    """
    from revela.evaluation.comparison import compare as run

    recipes = each_over(presets, recipe_file)
    documents, check = divided(corpus, recipe)
    found = run(
        recipes,
        documents,
        on,
        out,
        seeds=seeds,
        points=points,
        check=check if check.tasks else None,
        bm25=check.bm25(),
        corpus=", ".join(map(str, corpus)),
        command="revela " + shlex.join(sys.argv[1:]),
        queries_file=queries_file(corpus, recipe),
    )
    start = next(iter(found.curves.values()))[0].judged
    ends = {label: curve[-1].judged for label, curve in found.curves.items()}
    print_scores("nDCG@10 at the end", found.bm25, {"BM25": found.bm25, "start": start, **ends})


@app.command
def heads(
    corpus: Corpus,
    *,
    top: int = 32,
    out: Path | None = None,
    preset: Preset = "gated",
    recipe_file: RecipeFile = None,
    recipe: Annotated[Recipe, Flat] = DEFAULTS,
) -> None:
    """Show which heads of a language model look to a related document, or with --objective dream
    from a question to its answer.

    Found without labels; cached per model.

    Parameters
    ----------
    corpus:
        Text to probe with, as for train.
    top:
        How many heads to list.
    out:
        Write the whole ranking here, for train --heads.
    preset:
        The settings to start from, as for train.
    recipe_file:
        A TOML file of settings, as for train.
    """
    from revela.corpus.read import read_for
    from revela.lm.head_ranking import save_heads
    from revela.objectives.find_heads import rank_heads
    from revela.quiet import quieten

    quieten()
    documents, _ = read_for(recipe, corpus)
    folder, ranking = rank_heads(recipe, documents, queries_file(corpus, recipe))
    rows = [
        [rank, layer, head, f"{score:.5f}"]
        for rank, (layer, head, score) in enumerate(ranking[:top], 1)
    ]
    print_table(f"heads of {recipe.lm}", ["rank", "layer", "head", "score"], rows)
    if out is not None:
        save_heads(out, recipe.lm, folder, ranking)


def queries_file(corpus: Sequence[Path], recipe: Recipe) -> Path:
    name = str(corpus[0])
    if name.startswith("hub:"):
        name = name.removeprefix("hub:").replace("/", "-").replace(":", "-")
    first = Path(name).resolve()
    return Path(recipe.queries_file or first.with_name(f"{first.name}.queries.jsonl"))


def divided(corpus: Sequence[Path], recipe: Recipe) -> tuple[Any, Any]:
    """Documents to train on, and the label-free check by those that are held out; says what was
    read and what the check asks.
    """
    from revela.corpus.read import read_for
    from revela.evaluation.label_free import MIN_QUERIES, check_by, hold_out
    from revela.groups.folder import GroupFolder, is_group_folder
    from revela.groups.ready import holds_groups
    from revela.groups.training_set import written_answers
    from revela.quiet import quieten
    from revela.training.record import refuse_several_processes

    refuse_several_processes()  # before much is read
    quieten()
    ask = partial(written_answers, recipe, path=queries_file(corpus, recipe), of="held-out chunks")
    rest: Any
    if len(corpus) == 1 and is_group_folder(corpus[0]):
        rest = GroupFolder(corpus[0])
        held_out, check = len(rest.held_out), check_by(rest.held_out, recipe, ask)
    elif ready := next((source for source in corpus if holds_groups(source)), None):
        raise RevelaError(
            f"{ready} holds groups: store them by revela groups {ready} --out DIR, and give that folder"
        )
    else:
        documents, report = read_for(recipe, corpus)
        for line in report.lines():
            print(line)
        rest, check = hold_out(documents, recipe, ask)
        held_out = len(documents) - len(rest)
    if recipe.check_questions and all(task.name != "question" for task in check.tasks):
        print(
            f"fewer than {MIN_QUERIES} questions about held-out chunks were kept: the label-free check asks none"
        )
    unguarded = "too few for a task, so the last state is saved unseen"
    if not recipe.check_questions:
        unguarded += ": --check-questions 100 has a language model write questions about them"
    print(
        f"held out {held_out:,} documents for the label-free check ({check.describe() or unguarded})"
    )
    return rest, check
