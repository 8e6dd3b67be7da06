"""``revela groups``: build groups of chunks, look at them, and keep them."""

from __future__ import annotations

from itertools import islice
from typing import Annotated

from revela.cli.flags import Corpus, Out, Several
from revela.cli.printing import print_group
from revela.cli.recipe_flags import Given, RecipeFile, recipe_of
from revela.errors import RevelaError, extra
from revela.terminal import counted


def groups(
    corpus: Corpus,
    *,
    out: Out | None = None,
    show: int = 0,
    weights: Annotated[list[float], Several] = [],  # noqa: B006
    recipe_file: RecipeFile = None,
    given: Given = None,
) -> None:
    """Build the groups of chunks that training compares, and keep them for train. With a surrogate,
    print how hard they are: its mean score of the negatives within a group.

    Parameters
    ----------
    corpus:
        As for train; or rows that are groups already, lists of texts or {"src": ..., "text":
        [...]}, in JSONL, Parquet or hub:owner/name; or a folder of groups, to check and look at.
    out:
        Folder for the groups.
    show:
        Print this many groups.
    weights:
        Sampling weight of each corpus. Default: use all groups.
    recipe_file:
        A TOML file of settings, as for train.
    """
    from revela.training.groups.store import GroupFolder, is_group_folder

    with extra("train", "grouping"):
        from revela.training.build_groups import build_groups, hardness

    recipe = recipe_of(recipe_file, given)
    if len(corpus) == 1 and is_group_folder(corpus[0]):
        folder = GroupFolder(corpus[0])
        folder.check()
    elif out is None:
        raise RevelaError("no folder for the groups: give --out")
    else:
        folder = build_groups(recipe, corpus, out, weights)
    print(f"{counted(len(folder), 'group')} of {folder.size} in {folder.folder}")
    if (surrogate := recipe.groups.surrogate) or recipe.groups.groups == "cluster":
        by, score = surrogate or "the model's word vectors", hardness(recipe, folder)
        print(f"mean score of the negatives within a group, by {by}: {score:.3f}")
    for group in islice(folder.order(recipe.training.seed)(0), show):
        members = folder.members(sorted(group))
        title = f"group {group[0] // folder.size + 1:,}"
        print_group(title, members, [member.name for member in members])
