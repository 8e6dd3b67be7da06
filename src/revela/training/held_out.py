"""The label-free check of the documents that a run holds out (evaluation/label_free.py)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from revela.evaluation.label_free import MIN_QUERIES, Ask, HeldOutCheck, tasks
from revela.quiet_libraries import silence_libraries
from revela.training.generated_queries import write_queries
from revela.training.groups.dataset import TrainingSet
from revela.training.settings import Recipe
from revela.types import Document

log = logging.getLogger(__name__)


def check_by(held: Sequence[Document], recipe: Recipe, ask: Ask | None = None) -> HeldOutCheck:
    """Make a recipe's check of held-out documents; ``ask`` writes the questions."""
    settings, words = recipe.training, recipe.corpus.chunk_words
    limits = settings.check_queries, settings.check_passages, settings.seed
    made = tasks(held, words, *limits, settings.check_questions, ask)
    return HeldOutCheck(made, recipe.corpus.language)


def read_training_set(recipe: Recipe, corpus: Sequence[Path]) -> tuple[TrainingSet, HeldOutCheck]:
    """Read the training set, and make the label-free check of its held-out documents."""
    silence_libraries()
    data = TrainingSet.read(recipe, corpus)
    path = data.queries_file
    assert path is not None
    write_questions = partial(write_queries, recipe, path=path, unit="held-out chunks")
    check = check_by(data.held_out, recipe, write_questions)
    questions = recipe.training.check_questions
    if questions and all(task.name != "question" for task in check.tasks):
        log.info(
            f"fewer than {MIN_QUERIES} questions about held-out chunks were kept: "
            "the label-free check asks none"
        )
    about = "no documents held out, so no label-free check: the last state is saved"
    if data.held_out or recipe.corpus.held_out:
        made = check.describe() or "too few for a task, so the last state is saved unchecked"
        if not check.tasks and not questions:
            made += ": --check-questions 100 has a language model write questions about them"
        about = f"held out {len(data.held_out):,} documents for the label-free check ({made})"
    log.info(about)
    return data, check
