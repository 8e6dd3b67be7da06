"""The outcome of a run, and the saved retriever with its model card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from revela.training.record import Provenance, Scores
from revela.training.retriever.card import Card, metadata_of, without_folders
from revela.training.retriever.context import ContextEncoder, SavedContext
from revela.training.retriever.module import RetrieverEncoder
from revela.training.retriever.save import save_retriever
from revela.training.training_set import TrainingSet


@dataclass(frozen=True)
class Outcome:
    """Result of a run.

    Attributes:
        bm25: label-free scores of BM25.
        untrained: label-free scores before the fit.
        before: scores before the first step.
        after: scores of the saved state.
        steps: optimiser steps done.
        kept: step of the saved state.
        minutes: training time.
        last: scores after the last step.
        signal: number of the signal (Ctrl-C, SIGTERM) that ended the run; 0: none.
    """

    bm25: Scores
    untrained: Scores
    before: Scores
    after: Scores
    steps: int
    kept: int
    minutes: float
    last: Scores
    signal: int

    def systems(self) -> dict[str, Scores]:
        """System -> scores by task, for a table; {} without a check."""
        if not self.after:
            return {}
        systems = {
            "BM25": self.bm25,
            "untrained": self.untrained,
            "before training": self.before,
            "trained": self.last,
        }
        saved = {f"saved (step {self.kept})": self.after} if self.kept != self.steps else {}
        return systems | saved


def save_outcome(
    data: TrainingSet,
    encoder: RetrieverEncoder,
    context_encoder: ContextEncoder | None,
    context_texts: Sequence[str],
    outcome: Outcome,
    provenance: Provenance,
    models: Mapping[str, str],
    folder: Path,
    out: Path,
) -> None:
    """Save the retriever in its current state, and its model card.

    Args:
        context_encoder, context_texts: the first stage of a contextual retriever, and the documents
            that it is saved with.
        models: flag -> name of each model that the run read, for the card.
        folder: of the model that was trained.
    """
    recipe, steps = data.recipe, outcome.steps
    settings = {**recipe.to_dict(), **models}
    of_steps = "" if outcome.kept == steps else f"{outcome.kept} of "
    scores = {
        "BM25": outcome.bm25,
        "untrained": outcome.untrained,
        "before training": outcome.before,
        f"after {of_steps}{steps} steps": outcome.after,
    }
    if recipe.pairs:
        names = (without_folders(str(folder)) for folder in recipe.pairs)
        settings["queries"] = f"judged, of {' and '.join(names)}"
    card = Card(
        name=out.name,
        learned_from=recipe.method.learned_from,
        corpus=provenance.corpus,
        documents=data.n_documents,
        command=provenance.command,
        settings=settings,
        scores=scores if outcome.after else {},
        minutes=outcome.minutes,
        steps=steps,
        slots=recipe.context.context,
        supervised=bool(recipe.pairs),
        metadata=metadata_of(models["model"], folder),
        is_unchanged=outcome.kept == 0,
    ).text()
    context = None
    if context_encoder is not None:
        source = f"{len(context_texts)} chunks of {without_folders(provenance.corpus)}"
        rows = context_encoder.of_texts(context_texts)
        context = SavedContext(context_encoder, rows, {"drawn from": source})
    save_retriever(encoder.model, out, card, context, encoder.words_to_vectors)
