"""``revela fit``: text and a language model in, a retriever out, in minutes."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

from revela.cli.flags import Corpus, Flat, Out, Several, Switch
from revela.cli.main import command_line
from revela.cli.printing import print_scores
from revela.cli.recipe_flags import Given, given_settings, settings_flags
from revela.errors import RevelaError, extra
from revela.files import bytes_of
from revela.terminal import counted, duration
from revela.training.methods.revela import Revela
from revela.training.recipe import Recipe

SETTINGS = (
    *("text_field", "title_field", "join_titles", "max_bad_share", "language", "layers", "pooling"),
    *("max_tokens", "token_weighting", "whitening", "lexical", "seed", "precision"),
)
"The settings of training that are flags of a fit."


def fit(
    corpus: Corpus | None = None,
    *,
    model: str,
    out: Out,
    context: Annotated[list[Path] | None, Several] = None,
    context_first: int | None = None,
    static: Switch = False,
    steps: int | None = None,
    given: Given = None,
) -> None:
    """Make a retriever of a raw language model by fitting it to text: minutes, no labels. Or put
    documents of another corpus into the slots of a retriever that was trained with --context.

    Parameters
    ----------
    corpus:
        As for train.
    model:
        Any raw language model, of the languages of the text: a hub id (owner/name, or
        owner/name@revision), a local folder or embedded:smollm2-135m. Embedders need no fit.
        With --context: a retriever that was trained with --context N.
    out:
        Folder for the retriever: a Sentence-Transformers model.
    context:
        In place of corpus: a corpus, of which N chunks are drawn for the slots of the retriever.
    context_first:
        With --context: read only so many of the drawn chunks, and leave the other slots without a
        document. 0: read none.
    static:
        Make a table of words without layers: a vector for each word of the corpus, initialised from
        the model's input embeddings and trained on the text. Encodes and searches without torch.
    steps:
        Training steps for the rows of words: all rows with --static, else the lexical half.
        Default: as many as the corpus needs. 0: none.
    """
    with extra("train", "a fit"):
        from revela.training.fit import bake_context
        from revela.training.fit import fit as run

    if bool(corpus) == bool(context):
        raise RevelaError("revela fit reads one corpus: give either CORPUS or --context")
    if context_first is not None and not (context and context_first >= 0):
        raise RevelaError(
            f"--context-first needs --context and must be 0 or more (got {context_first})"
        )
    recipe = Recipe.of(model=model, **given_settings(given))
    text = shlex.join(map(str, corpus or context or []))
    go_on = f"next, run revela index {text} --model {shlex.quote(str(out))} --out INDEX"
    if context:
        given_options = {"static": static, "steps": steps is not None}
        options = [name for name, is_given in given_options.items() if is_given]
        count = bake_context(context, out, recipe, options, context_first)
        print(f"{counted(count, 'chunk')} of {text} saved in the slots of {out}: {go_on}")
        return
    result = run(corpus or [], out, recipe, static=static, steps=steps, command=command_line())
    if result.scores:
        print_scores("label-free check, nDCG@10", result.scores[result.kept], result.scores)
        if result.kept == "fitted" and "trained" in result.scores:
            print("training did not help on this text: the table is saved as it was fitted")
    size = f"{bytes_of(out) / 1e6:,.0f} MB"
    print(f"fitted in {duration(result.minutes)}, saved to {out} ({size}): {go_on}")


fit.__annotations__["given"] = Annotated[settings_flags(Revela, {}, SETTINGS) | None, Flat]
