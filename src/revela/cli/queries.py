"""``revela queries``: queries about a corpus, to train on or to test by."""

from __future__ import annotations

import json

from revela.cli.flags import Corpus, Out, check_paths
from revela.cli.printing import one_line, snippet
from revela.cli.recipe_flags import Given, RecipeFile, recipe_of
from revela.errors import RevelaError, extra
from revela.files import atomic_write, check_free
from revela.terminal import counted


def queries(
    corpus: Corpus,
    *,
    out: Out | None = None,
    chunks: Out | None = None,
    show: int = 5,
    recipe_file: RecipeFile = None,
    given: Given = None,
) -> None:
    """Write queries for a corpus with a language model, for methods that read queries; with
    --out, make a test set of them.

    The queries are saved in revela's cache, or in --queries-file; a stopped run resumes, and train
    reads the saved queries.

    Parameters
    ----------
    corpus:
        As for train.
    out:
        Folder for a test set in BEIR layout, for revela eval. --queries says where the queries come
        from, and --max-queries how many.
    chunks:
        Write the chunks to ask about to this JSONL file, and no queries. With a "question" added to
        each line, it is a file for --questions.
    show:
        Print this many of the queries.
    recipe_file:
        A TOML file of settings, as for train.
    """
    for path in filter(None, (out, chunks)):
        check_free(path)
    with extra("train", "revela queries"):
        from revela.training.methods.contrastive import Pairs
        from revela.training.training_set import TrainingSet
    from revela.quiet_libraries import silence_libraries

    recipe = recipe_of(recipe_file, given, "dream-infonce")
    if recipe.method.reads != "queries":
        recipe = recipe.replace(method=Pairs())
    check_paths(corpus, None)
    silence_libraries()
    data = TrainingSet.read(recipe, corpus, lazy_queries=chunks is not None)
    if data.folder is not None:
        raise RevelaError(f"{corpus[0]} holds groups, with their queries: give the text itself")
    if chunks is not None:
        asked = data.rows.select(data.is_target_R.nonzero()[0])
        lines = [json.dumps({"chunk": row.text}, ensure_ascii=False) + "\n" for row in asked]
        with atomic_write(chunks) as temporary:
            temporary.write_text("".join(lines), encoding="utf-8")
        return print(f"{counted(len(lines), 'chunk')} to ask about saved to {chunks}")
    if out is None:
        pairs = [(row.query, row.text) for row in data.rows if row.query]
        print(f"queries are saved in {data.queries_file}")
    else:
        from revela.training.make_test_set import make_test_set

        pairs = make_test_set(data, out)
        print(f"{counted(len(pairs), 'query', 'queries')} saved to {out}")
    # Some of them, evenly spaced.
    for query, passage in pairs[:: max(1, len(pairs) // max(1, show))][:show]:
        print(f"\n{one_line(query)}\n   {snippet(passage)}")
