"""Rank retrievers on a text without labels.

Language models are fitted to one part of the documents; queries about the other, held-out part test
every candidate.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from revela.encoders.base import TextEncoder
from revela.encoders.load import load_encoder, resolve
from revela.encoders.prompts import prompts_set
from revela.errors import RevelaError, extra
from revela.evaluation.label_free import HeldOutCheck, PerQuery, tasks, with_bm25
from revela.evaluation.metrics import mean_scores
from revela.evaluation.results import SystemScores
from revela.evaluation.significance import MEASURE, standings
from revela.quiet_libraries import silence_libraries
from revela.terminal import counted
from revela.text.analyzer import detect
from revela.text.chunk import PASSAGE_WORDS
from revela.text.load import split_held_out
from revela.text.spool import arrow_list
from revela.training.settings import Corpus, Retriever, Training
from revela.types import Document, evenly_spaced

log = logging.getLogger(__name__)

Kind = Literal["table", "embedder", "fit"]
BM25 = "BM25"
DOCUMENTS = 2000  # maximum of the sample
PASSAGES, QUERIES = 1000, 400  # maximum per task
HELD_OUT = 0.3  # share of the sample
MIN_QUERIES = 30  # with fewer, nothing is compared


@dataclass(frozen=True)
class Candidate:
    """An embedder as it is, a language model fitted to the text, or a table of the text's words."""

    model: str
    kind: Kind

    def __str__(self) -> str:
        forms = {"table": "table of words of {}", "embedder": "{}", "fit": "{}, fitted"}
        return forms[self.kind].format(self.model)


@dataclass(frozen=True)
class Sections:
    """The sections of a recipe that a ranking reads; without torch, as recipes are not."""

    corpus: Corpus
    retriever: Retriever
    training: Training


def rank_models(
    documents: Sequence[Document], models: Sequence[str], recipe: Sections
) -> dict[str, SystemScores]:
    """Score models on a text without labels, alone and fused with BM25, and BM25; best first.

    Among held-out documents, the first half of a chunk has to find the other chunks of its
    document, a title its document, and a docstring its function.

    Args:
        documents: the text; a sample of it is used.
        models: hub ids or folders. A language model gives two systems: fitted to the text, and as a
            table of words.
        recipe: settings of the fit, and the language of the text.

    Returns:
        System -> means over all queries and over those of each task, and p values against the first
        system and against BM25.

    Raises:
        RevelaError: the text gives too few queries.
    """
    drawn = evenly_spaced(len(documents), DOCUMENTS) if documents else ()
    sample = arrow_list(Document, (documents[i] for i in drawn))
    if recipe.corpus.language == "auto":
        language = detect([document.full_text for document in sample])
        recipe = replace(recipe, corpus=replace(recipe.corpus, language=language))
    fitted_to, held_out = split_held_out(sample, HELD_OUT, DOCUMENTS)
    test = tasks(held_out, PASSAGE_WORDS, QUERIES, PASSAGES, recipe.training.seed)
    if (count := sum(len(task.queries) for task in test)) < MIN_QUERIES:
        raise RevelaError(f"the text gives {count} queries: give more, or judged ones with --on")
    candidates, check = _candidates(models), HeldOutCheck(test, recipe.corpus.language)
    log.info(
        f"comparing {counted(len(candidates), 'retriever')} by "
        f"{counted(len(held_out), 'held-out document')} "
        f"({check.describe()}), nDCG@10 with BM25:"
    )
    systems = {BM25: check.queries_of_bm25()}
    log.info(f"{_mean(systems[BM25]):.3f} BM25 alone")
    for candidate in candidates:
        name = str(candidate)
        systems |= check.queries(encoder_of(candidate, recipe, fitted_to, held_out), name)
        alone, fused = _mean(systems[name]), _mean(systems[with_bm25(name)])
        log.info(f"{fused:.3f} {name} (without BM25 {alone:.3f})")
    scores = {name: _by_query(by_task) for name, by_task in systems.items()}
    ranked = sorted(scores, key=lambda name: -mean_scores(scores[name])[MEASURE])
    tested = standings(scores, list(dict.fromkeys((ranked[0], BM25))))
    means = {name: {task: float(s.mean()) for task, s in systems[name].items()} for name in ranked}
    return {n: replace(tested[n], means={**tested[n].means, **means[n]}) for n in ranked}


def _by_query(by_task: Mapping[str, PerQuery]) -> dict[str, dict[str, float]]:
    """ "TASK NUMBER" of each query -> its score."""
    return {
        f"{task} {i}": {MEASURE: float(score)}
        for task, scores_Q in by_task.items()
        for i, score in enumerate(scores_Q)
    }


def _mean(by_task: Mapping[str, PerQuery]) -> float:
    """The mean over all queries."""
    return float(np.concatenate([*by_task.values()]).mean())


def _candidates(names: Sequence[str]) -> list[Candidate]:
    """A language model gives two."""
    kinds: dict[bool, tuple[Kind, ...]] = {True: ("embedder",), False: ("table", "fit")}
    is_embedder = {name: (resolve(name) / "modules.json").is_file() for name in names}
    return [Candidate(name, kind) for name, known in is_embedder.items() for kind in kinds[known]]


def encoder_of(
    candidate: Candidate,
    recipe: Sections,
    documents: Sequence[Document],
    held_out: Sequence[Document],
) -> TextEncoder:
    """Load a candidate, or fit it to documents, as the CLI does; a table also gets the words of the
    held-out ones.
    """
    folder, seed = resolve(candidate.model), recipe.training.seed
    if candidate.kind == "embedder":
        prompts = prompts_set(recipe.retriever.query_prompt, recipe.retriever.passage_prompt)
        return load_encoder(folder, recipe.training.precision, prompts=prompts)
    with extra("train", str(candidate)):
        from revela.encoders.torch_model import uses_bf16
        from revela.training.device import compute_device
        from revela.training.recipe import Recipe
        from revela.training.retriever.build import untrained_retriever
        from revela.training.retriever.module import RetrieverEncoder
    from revela.training.training_set import TrainingSet
    from revela.training.word_table import fit_encoder, tables

    silence_libraries()
    if candidate.kind == "table":
        language = recipe.corpus.language
        _, table = tables(folder, documents, held_out, language=language, seed=seed)
        return table.encoder()
    model = untrained_retriever(recipe.retriever, folder, documents).to(compute_device())
    encoder = RetrieverEncoder(model, uses_bf16(recipe.training.precision, model.device))
    whole = Recipe(recipe.corpus, retriever=recipe.retriever, training=recipe.training)
    fit_encoder(encoder, TrainingSet(whole, documents))
    return encoder
