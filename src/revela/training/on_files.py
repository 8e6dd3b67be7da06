"""A run on a corpus: read it, hold documents out for the label-free check, train on the rest, and
score the retriever on judged queries meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from revela.errors import RevelaError
from revela.evaluation.collection import Collection, load_collection
from revela.evaluation.evaluate import outcomes
from revela.evaluation.label_free import MIN_QUERIES, Ask, HeldOutCheck, tasks
from revela.evaluation.results import write_json
from revela.evaluation.significance import MEASURE, standings
from revela.terminal import counted
from revela.text.chunk import PASSAGE_WORDS
from revela.text.readers import Source
from revela.training.check_settings import check_recipe
from revela.training.checks import NO_CHECKS, CheckPlan, Judge
from revela.training.distributed import is_rank_zero, joined
from revela.training.generated_queries import write_queries
from revela.training.outcome import TrainingResult
from revela.training.recipe import Recipe
from revela.training.record import START_SCORES, Provenance, Scores
from revela.training.retriever.context import draw_documents
from revela.training.retriever.module import RetrieverEncoder
from revela.training.settings import Corpus, Training
from revela.training.train import train
from revela.training.training_set import TrainingSet
from revela.types import Document

log = logging.getLogger(__name__)


def check_by(
    held: Sequence[Document], corpus: Corpus, training: Training, ask: Ask | None = None
) -> HeldOutCheck:
    """Make a recipe's check of held-out documents; ``ask`` writes the questions."""
    limits = training.check_queries, training.check_passages, training.seed
    made = tasks(held, corpus.chunk_words, *limits, training.check_questions, ask)
    return HeldOutCheck(made, corpus.language)


def describe_held_out(data: TrainingSet, check: HeldOutCheck) -> str:
    """How many documents are held out, and how many queries of each task they give."""
    if not data.held_out:
        return "no documents held out, so no label-free check"
    held_out = counted(len(data.held_out), "document")
    if tasks := check.describe():
        return f"held out {held_out} for the label-free check ({tasks})"
    return f"held out {held_out}, too few for a label-free check"


def read_training_set(
    recipe: Recipe, corpus: Sequence[Source], lazy_queries: bool = True
) -> tuple[TrainingSet, HeldOutCheck]:
    """Read the training set, and make the label-free check of its held-out documents."""
    data = TrainingSet.read(recipe, corpus, lazy_queries=lazy_queries)

    def write_questions(texts: Sequence[str]) -> list[str]:
        return write_queries(data.query_lm(), texts, unit="held-out chunks")

    check = check_by(data.held_out, recipe.corpus, recipe.training, write_questions)
    about = describe_held_out(data, check)
    if not recipe.training.check_questions:
        if data.held_out and not check.tasks:
            about += ": --check-questions 100 has a language model write questions about them"
    elif all(task.name != "question" for task in check.tasks):
        log.info(f"fewer than {MIN_QUERIES} questions were accepted: the label-free check has none")
    log.info(about)
    return data, check


def judge_on(folders: Sequence[Path], out: Path) -> Judge:
    """The judge of a run in ``out``: nDCG@10 on each folder in BEIR layout. It reads texts as the
    saved retriever does, which may be longer than in training, and selects no state.

    Raises:
        RevelaError: a folder is not in BEIR layout.
    """
    collections = [load_collection(folder) for folder in folders]

    def judge(encoder: RetrieverEncoder, step: int) -> Scores:
        limit, encoder.retriever.max_tokens = encoder.retriever.max_tokens, None
        scores = {
            c.name: standings({"start": outcomes(c, {"": _in_context_of(c, encoder)})[""]}, [])
            for c in collections
        }
        encoder.retriever.max_tokens = limit
        if step == 0:
            write_json(scores, out / START_SCORES)
        return {name: system["start"].means[MEASURE] for name, system in scores.items()}

    return judge


def _in_context_of(collection: Collection, encoder: RetrieverEncoder) -> RetrieverEncoder:
    """The encoder; one with slots reads documents of the collection, as in the paper (CDE)."""
    if not encoder.slots:
        return encoder
    documents = [*map(Document, collection.document_ids, collection.documents)]
    return encoder.in_context(draw_documents(documents, encoder.slots, 0, PASSAGE_WORDS))


def train_on_files(
    corpus: Sequence[Source],
    out: Path,
    recipe: Recipe,
    *,
    resume: bool = False,
    overwrite: bool = False,
    on: Sequence[Path] = (),
    points: int = 0,
    command: str = "",
) -> TrainingResult:
    """Read a corpus, hold documents out, train on the others, and save a retriever.

    Args:
        corpus, out, recipe, resume, overwrite: as for ``train``.
        on: folders in BEIR layout, scored at every check.
        points: check after each of this many equal parts of the run. 0: by ``check_every``.
        command: the command line, for the model card.
    """
    with joined():
        if not corpus:
            raise RevelaError(f"{out} names no corpus to train on: give its folders or files")
        check_recipe(recipe, out, resume, overwrite, corpus)
        plan = NO_CHECKS
        if is_rank_zero():
            judge = judge_on(on, out) if on else None
            # Of runs that are compared after equal times, the first would lose time to questions
            # that the others find written.
            lazy = not (judge and recipe.training.max_minutes)
            data, check = read_training_set(recipe, corpus, lazy)
            plan = CheckPlan(check if check.tasks else None, check.bm25(), judge, points)
        else:
            data = TrainingSet.read(recipe, corpus)
        paths = (source for source in corpus if isinstance(source, Path))
        sources = [str(s if str(s).startswith("hub:") else s.absolute()) for s in paths]
        provenance = Provenance(", ".join(map(str, corpus)), command, sources)
        return train(
            recipe, data, out, plan=plan, provenance=provenance, resume=resume, overwrite=overwrite
        )
