"""``revela groups``: build groups of chunks, look at them, and keep them."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from revela import on_ray
from revela.cli.flags import (
    ENGINE,
    Corpus,
    Engine,
    Flat,
    Given,
    Out,
    Preset,
    RecipeFile,
    Several,
    recipe_of,
)
from revela.cli.main import MAKE, app
from revela.cli.printing import print_group
from revela.errors import RevelaError, extra

if TYPE_CHECKING:
    from revela.groups.store import GroupFolder
    from revela.settings import Recipe


@app.command(group=MAKE)
def groups(
    corpus: Corpus,
    *,
    out: Out | None = None,
    show: int = 0,
    weights: Annotated[list[float], Several] = [],  # noqa: B006
    cluster_column: str = "",
    shards: int = 0,
    engine: Annotated[Engine, Flat] = ENGINE,
    preset: Preset = "",
    recipe_file: RecipeFile = None,
    given: Given = None,
) -> None:
    """Build the groups of chunks that training compares, and keep them for train.

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
    cluster_column:
        Column with the cluster of each row, in a Parquet corpus whose rows are chunks (id, text and
        optionally title, chunk, vector, as revela encode writes them). No group has chunks of two
        clusters.
    shards:
        Files that the groups are written to. 0: 16, or fewer for few groups.
    preset:
        Settings to start from, as for train.
    recipe_file:
        A TOML file of settings, as for train.
    """
    from revela.groups.store import GroupFolder, is_group_folder

    recipe = recipe_of(preset, recipe_file, given)
    if len(corpus) == 1 and is_group_folder(corpus[0]):
        folder = GroupFolder(corpus[0])
        folder.check()
    elif out is None:
        raise RevelaError("groups need a folder to be kept in: give --out")
    elif cluster_column or engine.engine == "ray":
        folder = _of_clusters(recipe, corpus, out, cluster_column, shards, engine)
    else:
        with extra("train", "grouping"):
            from revela.groups.build import build_groups
            from revela.groups.dataset import default_queries_file

        queries_file = default_queries_file(corpus, recipe)
        folder = build_groups(recipe, corpus, out, weights, queries_file, shards)
    print(f"{len(folder):,} groups of {folder.size} in {folder.folder}")
    for group in islice(folder.order(recipe.training.seed)(0), show):
        members = folder.members(sorted(group))
        title = f"group {group[0] // folder.size + 1:,}"
        print_group(title, members, [member.name for member in members])


def _of_clusters(
    recipe: Recipe, corpus: list[Path], out: Path, column: str, shards: int, engine: Engine
) -> GroupFolder:
    from revela.groups.preclustered import groups_of_clusters

    if not column:
        raise RevelaError(
            "--engine ray groups chunks that are clustered: name the column by --cluster-column"
        )
    if engine.engine == "local":
        return groups_of_clusters(recipe, corpus, out, column, shards)
    with on_ray.connected(engine.cluster):
        return groups_of_clusters(recipe, corpus, out, column, shards, ray=True)
