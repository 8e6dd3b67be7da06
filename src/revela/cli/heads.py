"""``revela heads``: which heads of a language model a method uses."""

from __future__ import annotations

from revela.cli.flags import Corpus, Out
from revela.cli.printing import print_table
from revela.cli.recipe_flags import Given, RecipeFile, recipe_of
from revela.errors import extra


def heads(
    corpus: Corpus,
    *,
    top: int = 32,
    out: Out | None = None,
    recipe_file: RecipeFile = None,
    given: Given = None,
) -> None:
    """Rank the attention heads of a language model that look to a related document or, with
    --method dream, from a question to its answer.

    Needs no labels; the ranking is cached per model and text.

    Parameters
    ----------
    corpus:
        Text to probe with, as for train.
    top:
        How many heads to list.
    out:
        Write the whole ranking here, for train --heads.
    recipe_file:
        A TOML file of settings, as for train.
    """
    with extra("train", "revela heads"):
        from revela.training.methods.heads import save_heads
        from revela.training.rank_heads import rank_heads
        from revela.training.training_set import default_queries_file, read_for
    from revela.quiet_libraries import silence_libraries

    silence_libraries()
    recipe = recipe_of(recipe_file, given)
    documents, _ = read_for(recipe.corpus, corpus)
    queries_file = default_queries_file(corpus, recipe.queries.queries_file)
    folder, ranking = rank_heads(recipe, documents, queries_file)
    rows = [
        [rank, layer, head, f"{score:.5f}"]
        for rank, (layer, head, score) in enumerate(ranking[:top], 1)
    ]
    print_table(f"heads of {recipe.lm.lm}", ["rank", "layer", "head", "score"], rows)
    if out is not None:
        save_heads(out, recipe.method.kind_of_heads, recipe.lm.lm, folder, ranking)
