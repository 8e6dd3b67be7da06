"""``revela queries``: queries about a corpus, to train on or to test by."""

from __future__ import annotations

from collections.abc import Sequence

from revela.cli.flags import Corpus, Out, check_paths
from revela.cli.printing import one_line, snippet
from revela.cli.recipe_flags import Given, Preset, RecipeFile, given_settings, recipe_of
from revela.errors import RevelaError, extra


def queries(
    corpus: Corpus,
    *,
    out: Out | None = None,
    show: int = 5,
    preset: Preset = "",
    recipe_file: RecipeFile = None,
    given: Given = None,
) -> None:
    """Write queries for a corpus with a language model, for objectives that read queries; with
    --out, make a test set of them.

    They are kept in revela's cache, or in --queries-file; a run that was stopped continues, and
    train uses what is there.

    Parameters
    ----------
    corpus:
        As for train.
    out:
        Folder for a test set in BEIR layout, for revela eval. --queries says where the queries come
        from, and --max-queries how many.
    show:
        Print this many of them.
    preset:
        Settings to start from, as for train.
    recipe_file:
        A TOML file of settings, as for train.
    """
    if out is not None and out.exists():
        raise RevelaError(f"{out} exists: choose another --out")
    named = preset or recipe_file or given_settings(given).get("objective")
    recipe = recipe_of(preset if named else "infonce", recipe_file, given)
    if recipe.objective.reads != "queries":
        recipe = recipe.replace(objective="infonce")
    check_paths(corpus, None)
    with extra("train", "revela queries"):
        from revela.training.groups.dataset import TrainingSet
    from revela.quiet_libraries import silence_libraries

    silence_libraries()
    data = TrainingSet.read(recipe, corpus, lazy_queries=False)
    if data.folder is not None:
        raise RevelaError(f"{corpus[0]} holds groups, with their queries: give the text itself")
    if out is None:
        pairs = [(row.query, row.text) for row in data.rows if row.query]
        print(f"queries are kept in {data.queries_file}")
    else:
        from revela.training.make_test_set import make_test_set

        pairs = make_test_set(data, out)
        print(f"{len(pairs):,} queries saved to {out}")
    _show(pairs, show)


def _show(pairs: Sequence[tuple[str, str]], count: int) -> None:
    """Print some queries and their passages, evenly spaced."""
    for query, passage in pairs[:: max(1, len(pairs) // max(1, count))][:count]:
        print(f"\n{one_line(query)}\n   {snippet(passage)}")
