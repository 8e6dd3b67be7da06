"""``revela queries``: have a language model write queries."""

from __future__ import annotations

from revela.cli.flags import Corpus, Given, Preset, RecipeFile, given_settings, recipe_of
from revela.cli.main import app
from revela.cli.printing import one_line, snippet
from revela.errors import RevelaError


@app.command
def queries(
    corpus: Corpus,
    *,
    show: int = 5,
    preset: Preset = "",
    recipe_file: RecipeFile = None,
    given: Given = None,
) -> None:
    """Have a language model write queries for a corpus, for the objectives that read queries.

    They are kept in revela's cache, or in --queries-file; a run that was stopped continues, and
    train uses what is there.

    Parameters
    ----------
    corpus:
        As for train.
    show:
        Print this many of them.
    preset:
        Settings to start from, as for train.
    recipe_file:
        A TOML file of settings, as for train.
    """
    from revela.groups.dataset import TrainingSet
    from revela.silence import silence_libraries

    silence_libraries()
    named = preset or recipe_file or given_settings(given).get("objective")
    recipe = recipe_of(preset if named else "infonce", recipe_file, given)
    if recipe.objective.reads != "queries":
        recipe = recipe.replace(objective="infonce")
    data = TrainingSet.read(recipe, corpus, late=False)
    if data.folder is not None:
        raise RevelaError(f"{corpus[0]} holds groups, with their queries: give the text itself")
    rows = [row for row in data.rows if row.query]
    print(f"queries are kept in {data.queries_file}")
    for row in rows[:: max(1, len(rows) // max(1, show))][:show]:
        print(f"\n{one_line(row.query)}\n   {snippet(row.text)}")
