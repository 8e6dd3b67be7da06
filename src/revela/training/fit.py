"""Fit a raw language model to text: read a corpus, hold documents out, fit, check, save. Or give a
retriever with slots another context.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from sentence_transformers import SentenceTransformer

from revela.encoders.load import resolve
from revela.encoders.model_files import check_retriever, words_to_vectors_of
from revela.encoders.torch_model import open_model, uses_bf16
from revela.errors import RevelaError
from revela.evaluation.label_free import HeldOutCheck
from revela.files import atomic_write, check_free
from revela.quiet_libraries import silence_libraries
from revela.text.analyzer import check_language
from revela.text.chunk import PASSAGE_WORDS
from revela.text.load import Reading, read_corpus
from revela.text.readers import Source
from revela.training.device import compute_device
from revela.training.distributed import check_single_process
from revela.training.on_files import check_by, describe_held_out
from revela.training.recipe import Recipe
from revela.training.retriever.build import check_model, untrained_retriever
from revela.training.retriever.card import Card, metadata_of, without_folders
from revela.training.retriever.context import SavedContext, draw_documents, load_context_encoder
from revela.training.retriever.fit import WORDS_TO_VECTORS
from revela.training.retriever.module import RetrieverEncoder
from revela.training.retriever.save import save_retriever
from revela.training.training_set import TrainingSet
from revela.training.word_table import fit_encoder, tables

log = logging.getLogger(__name__)
FITTED_BY = (
    *("text_field", "title_field", "join_titles", "max_bad_share", "near_duplicates", "language"),
    *("chunk_words", "held_out"),
    *("layers", "pooling", "max_tokens", "lower_case", "query_prompt", "passage_prompt"),
    *("token_weighting", "whitening", "lexical", "seed", "precision"),
)
"The settings that a fit reads, other than the model."
LAYER_SETTINGS = (
    *("layers", "pooling", "max_tokens", "lower_case", "query_prompt", "passage_prompt"),
    *("token_weighting", "whitening", "lexical", "precision"),
)
"Settings of ``FITTED_BY`` that a table of words does not read."
MAY_LOSE = 0.005  # a trained table may lose this much nDCG@10 in the check


@dataclass(frozen=True)
class FitResult:
    """The result of a fit.

    Attributes:
        scores: system -> task -> nDCG@10 of the label-free check.
        kept: the system that is saved.
    """

    scores: dict[str, dict[str, float]]
    minutes: float
    kept: str


def fit(
    corpus: Sequence[Source],
    out: Path,
    recipe: Recipe,
    *,
    static: bool = False,
    steps: int | None = None,
    command: str = "",
) -> FitResult:
    """Read a corpus, hold documents out, fit a raw language model to the others, and save it.

    Args:
        static: make a table of word vectors, without any layer.
        steps: training steps of the table, or of the lexical half. None: by the size of the corpus.
        command: the command line, for the model card.
    """
    settings = recipe.to_dict()
    if steps and not static and not recipe.fit.lexical:
        raise RevelaError("--steps trains the lexical half: leave --lexical 0 out, or --steps")
    if steps is not None and steps < 0:
        raise RevelaError(f"--steps {steps}: give 0, which does not train, or more")
    unread = LAYER_SETTINGS if static else ()
    _refuse_unread(settings, unread, "--static, which keeps no layers")
    check_free(out)
    check_single_process()
    check_language(recipe.corpus.language)
    silence_libraries()
    name = recipe.retriever.model
    folder = resolve(name)
    if (folder / "modules.json").is_file():
        raise RevelaError(f"{name} is an embedder, which a fit would harm: give a language model")
    check_model(folder, 0 if static else recipe.retriever.layers, lora_rank=0)
    data = TrainingSet.read(recipe, corpus)
    if not static and len(data.chunks) < 2:  # a table reads longer windows
        raise RevelaError("a fit takes two chunks of text or more: give more text")
    check = check_by(data.held_out, recipe.corpus, recipe.training)
    log.info(describe_held_out(data, check))
    run = _fit_table if static else _fit_layers
    model, result = run(folder, data, check, steps)
    card = Card(
        name=out.name,
        learned_from=_learned_from(result.kept, static, steps, recipe.fit.lexical),
        corpus=", ".join(map(str, corpus)),
        documents=data.n_documents,
        command=command,
        settings={name: settings[name] for name in ("model", *FITTED_BY) if name not in unread},
        scores=result.scores,
        minutes=result.minutes,
        metadata=metadata_of(name, folder),
    )
    with atomic_write(out) as temporary:
        save_retriever(model, temporary, card.text(), words_to_vectors=WORDS_TO_VECTORS)
    return result


def bake_context(
    corpus: Sequence[Path], out: Path, recipe: Recipe, options: Sequence[str], most: int | None
) -> int:
    """Fill the slots of a retriever that was trained with a context with chunks of another corpus,
    at most ``most``, and save it; returns their number. ``options`` of ``fit`` are refused.
    """
    reason = "--context, which fills the slots of a retriever"
    _refuse_unread(recipe.to_dict(), (*LAYER_SETTINGS, "language"), reason, options)
    check_free(out)
    model, settings, seed = recipe.retriever.model, recipe.corpus, recipe.training.seed
    folder = resolve(model)
    check_retriever(folder)
    if (first := load_context_encoder(folder)) is None:
        raise RevelaError(f"{model} has no folder context/: give a retriever of train --context N")
    reading = Reading(settings.text_field, settings.title_field, settings.join_titles)
    documents, report = read_corpus(
        corpus, reading, distinct=False, min_words=1, max_bad_share=settings.max_bad_share
    )
    for line in report.lines():
        log.info(line)
    texts = draw_documents(documents, first.documents, seed, PASSAGE_WORDS)[:most]
    source = without_folders(", ".join(map(str, corpus)))
    about = {"drawn from": f"{len(texts)} chunks of {source}", "seed": seed}
    readme = folder / "README.md"
    with atomic_write(out) as temporary:
        save_retriever(
            open_model(folder),
            temporary,
            readme.read_text(encoding="utf-8") if readme.is_file() else "",
            SavedContext(first, first.of_texts(texts), about),
            words_to_vectors_of(folder),
        )
    return len(texts)


def _learned_from(kept: str, static: bool, steps: int | None, lexical: float) -> str:
    """The sentence of the model card that says what was fitted."""
    trained = ", trained so that titles, docstrings and runs of words find their text"
    if static:
        about = "a row for each word, initialised as the mean of the input embeddings of its pieces"
        about += trained * (kept == "trained")
    else:
        about = "the weights of tokens, whitening"
        if lexical:
            about += f", and a half of the vector for words{trained * (steps != 0)}"
    return f"{{model}} was fitted to text: {about}."


def _fit_layers(
    folder: Path, data: TrainingSet, check: HeldOutCheck, steps: int | None
) -> tuple[SentenceTransformer, FitResult]:
    """Fit the lower layers of a language model to the chunks, and train the lexical half."""
    recipe, scores = data.recipe, dict[str, dict[str, float]]()
    model = untrained_retriever(recipe.retriever, folder, data.documents).to(compute_device())
    encoder = RetrieverEncoder(model, uses_bf16(recipe.training.precision, model.device))
    if check.tasks:
        scores = {"BM25": check.bm25(), "untrained": check(encoder)}
    start = time.monotonic()
    fit_encoder(encoder, data, steps)
    minutes = (time.monotonic() - start) / 60
    if check.tasks:
        scores["fitted"] = check(encoder)
    return model, FitResult(scores, minutes, "fitted")


def _fit_table(
    folder: Path, data: TrainingSet, check: HeldOutCheck, steps: int | None
) -> tuple[SentenceTransformer, FitResult]:
    """Fit a table of all documents' words, and train it on those not held out. The untrained table
    is kept if the check finds it better by more than ``MAY_LOSE``.
    """
    recipe, scores = data.recipe, dict[str, dict[str, float]]()
    start = time.monotonic()
    language, seed = recipe.corpus.language, recipe.training.seed
    fitted, trained = tables(
        folder, data.documents, data.held_out, language=language, seed=seed, steps=steps
    )
    minutes = (time.monotonic() - start) / 60
    made, kept = {"fitted": fitted}, "fitted"
    if trained is not fitted:
        made["trained"], kept = trained, "trained"
    if check.tasks:
        scores = {"BM25": check.bm25()}
        scores |= {name: check(table.encoder()) for name, table in made.items()}
        means = {name: fmean(scores[name].values()) for name in made}
        if means[kept] < means["fitted"] - MAY_LOSE:
            kept = "fitted"
    return made[kept].model(), FitResult(scores, minutes, kept)


def _refuse_unread(
    settings: Mapping[str, Any], names: Sequence[str], reason: str, options: Sequence[str] = ()
) -> None:
    """Refuse options, and settings of these names, that would have no effect."""
    default = Recipe().to_dict()
    changed = [*options, *(name for name in names if settings[name] != default[name])]
    if changed:
        flag = changed[0].replace("_", "-")
        raise RevelaError(f"--{flag} has no effect with {reason}: leave one of them out")
