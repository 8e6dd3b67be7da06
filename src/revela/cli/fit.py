"""``revela fit``: text and a language model in, a retriever out, in minutes."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from revela.cli.flags import Corpus, Flat, Out, Several
from revela.cli.printing import command_line, print_scores
from revela.errors import RevelaError, extra
from revela.terminal import counted, duration
from revela.text.load import READING, Reading
from revela.training.settings import Corpus as corpus_settings
from revela.training.settings import Fit, Pooling, Recipe, Retriever, TorchPrecision, Training


def fit(
    corpus: Corpus | None = None,
    *,
    model: str,
    out: Out,
    context: Annotated[list[Path] | None, Several] = None,
    layers: int = Retriever.layers,
    pooling: Pooling = Retriever.pooling,
    max_tokens: int = Retriever.max_tokens,
    token_weighting: float = Fit.token_weighting,
    whitening: float = Fit.whitening,
    lexical: float = Fit.lexical,
    prune: Annotated[bool, Parameter(negative=())] = False,
    static: Annotated[bool, Parameter(negative=())] = False,
    steps: int | None = None,
    reading: Annotated[Reading, Flat] = READING,
    max_bad_share: float = corpus_settings.max_bad_share,
    language: str = corpus_settings.language,
    seed: int = Training.seed,
    precision: TorchPrecision = Training.precision,
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
    layers:
        Lower layers of the model that are kept. 0: all.
    pooling:
        How token vectors become one vector.
    max_tokens:
        Longest text that the retriever reads, in tokens; the rest is truncated.
    token_weighting:
        Weight each token in the mean by a / (a + its share of the text's tokens), this being a. 0:
        equal weights.
    whitening:
        Whiten pooled vectors by (covariance of token vectors) ** -whitening. 0: off, 0.5: fully.
    lexical:
        Append the mean of the tokens' own whitened embeddings at this weight. 0: off.
    prune:
        Remove the tokens that the corpus does not use, most of a multilingual model's. Other words
        are then read in smaller pieces.
    static:
        Keep no layer: a row for each word of the corpus, begun with the model's input embeddings
        and trained on the text. Encodes and searches without torch.
    steps:
        Training steps for the rows of words: all rows with --static, else the lexical half.
        Default: as many as the corpus needs. 0: none.
    max_bad_share:
        Share of unreadable rows and files above which the fit stops.
    language:
        Language whose words are stemmed, as for index: by BM25 in the label-free check, and for the
        rows of --static.
    seed:
        Seed of the chunks that are drawn.
    precision:
        Arithmetic; auto is bf16 where the hardware has it.
    """
    with extra("train", "a fit"):
        from revela.training.fit import FitOptions, bake_context
        from revela.training.fit import fit as run

    if bool(corpus) == bool(context):
        raise RevelaError(
            "a fit reads one corpus: give it as revela fit CORPUS for a language model, or as "
            "--context CORPUS for a retriever that was trained with --context"
        )
    recipe = Recipe.of(
        model=model,
        layers=layers,
        pooling=pooling,
        max_tokens=max_tokens,
        language=language,
        max_bad_share=max_bad_share,
        seed=seed,
        precision=precision,
        token_weighting=token_weighting,
        whitening=whitening,
        lexical=lexical,
        **vars(reading),
    )
    options = FitOptions(prune, static, steps)
    text = shlex.join(map(str, corpus or context or []))
    go_on = f"go on with revela index {text} --model {shlex.quote(str(out))} --out INDEX"
    if context:
        count = bake_context(context, out, recipe, options)
        print(f"{counted(count, 'chunk')} of {text} in the slots of {out}: {go_on}")
        return
    result = run(corpus or [], out, recipe, options, command_line())
    if result.scores:
        print_scores("label-free check, nDCG@10", result.scores[result.kept], result.scores)
        if result.kept == "fitted" and "trained" in result.scores:
            print("training did not help on this text: the table is saved as it was fitted")
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file()) / 1e6
    print(f"fitted in {duration(result.minutes)}, {size:,.0f} MB in {out}: {go_on}")
